"""The server: FedRotLoRA in the place of FedAvg."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from classifier_example import task
from fedrot.lora import AdapterOptions, adapter_tensors, load_adapter
from fedrot.strategies import FedRotLoRA

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds with an adapter of the largest rank, and save it."""
    config = context.run_config
    model = task.build_model(config, max(task.ranks(config)))
    strategy = FedRotLoRA(
        model.peft_config["default"],
        AdapterOptions(str(config["method"])),
        fraction_train=float(config["fraction-train"]),
        fraction_evaluate=float(config["fraction-evaluate"]),
    )
    initial = ArrayRecord(adapter_tensors(model))
    result = strategy.start(grid, initial, num_rounds=int(config["num-server-rounds"]))
    if config["save-folder"]:
        load_adapter(model, result.arrays.to_torch_state_dict())
        model.save_pretrained(str(config["save-folder"]))
