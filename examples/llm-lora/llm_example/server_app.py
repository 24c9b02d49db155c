"""The server: FedRotLoRA in the place of FedAvg."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedrot.lora import AdapterOptions, adapter_tensors, load_adapter
from fedrot.strategies import FedRotLoRA
from llm_example.models import get_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds; the log says how inexact each average was."""
    config = context.run_config
    model = get_model(config)
    strategy = FedRotLoRA(
        model.peft_config["default"],
        AdapterOptions(str(config["strategy.method"])),
        fraction_train=float(config["strategy.fraction-train"]),
        fraction_evaluate=0.0,
    )
    start = {name: tensor.cpu() for name, tensor in adapter_tensors(model).items()}
    result = strategy.start(
        grid, ArrayRecord(start), num_rounds=int(config["num-server-rounds"])
    )
    if config["train.save-folder"]:
        load_adapter(model, result.arrays.to_torch_state_dict())
        model.save_pretrained(str(config["train.save-folder"]))
