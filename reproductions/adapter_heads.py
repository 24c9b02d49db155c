"""``python -m reproductions.adapter_heads``: adapters and fitted heads where each
client has one class.

Near the set-up of arXiv 2605.08992: rank 8 on query and value, one local epoch; a
client's accuracy is that on the test rows of its classes. There DistilBERT has AG News,
10 clients and Dirichlet .1.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import typer
from flwr.app import ArrayRecord, ConfigRecord

from fedrot.lora import adapter_tensors, load_adapter
from fedrot.simulations.experiment import Experiment
from fedrot.simulations.federation.client_app import app
from fedrot.simulations.federation.grids import LocalGrid, local_clients
from fedrot.simulations.models import build_model
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.training import Task, task_of
from fedrot.strategies import FedRotLoRA, fit_task_head
from fedrot.strategies.wire.flower_compat import outside_of_the_engine

#: The mean of factors; one fit after it; one fit and no training; a fit before and
#: after every round. Rates have the lowest loss on held-out rows among 3e-4, 1e-3 and
#: 3e-3 (dair_emotion, one class a client, seed 10; ``fit_head`` has that of one fit).
ARMS = {"fedavg": 3e-3, "fedavg+fit": 1e-3, "fit": 1e-3, "fit_head": 1e-3}


def federation(experiment: Experiment, seed: int) -> tuple[LocalGrid, ConfigRecord]:
    """Return the harness's clients, and what every request tells them."""
    told: dict[str, Any] = {
        "experiment": experiment.to_json(),
        "seed": seed,
        "lr": experiment.lr,
    }
    told |= {"cache": "", "server-round": 0, "batches": 0, "loads": ""}
    return local_clients(app, experiment.clients), ConfigRecord(told)


def trained(
    experiment: Experiment, seed: int, rounds: int, fits: bool
) -> tuple[Any, ArrayRecord]:
    """Return the initial model, and its adapter after the rounds."""
    model: Any = build_model(experiment, task_of(experiment.to_json()).data, seed)
    arrays = ArrayRecord(adapter_tensors(model))
    if rounds:
        strategy = FedRotLoRA(
            model.peft_config["default"], fit_head=fits, fraction_evaluate=0.0
        )
        grid, told = federation(experiment, seed)
        arrays = strategy.start(
            grid, arrays, num_rounds=rounds, train_config=told
        ).arrays
    return model, arrays


def measured(experiment: Experiment, arm: str, seed: int) -> dict[str, Any]:
    """Return the row of one arm."""
    model, arrays = trained(
        experiment, seed, 0 if arm == "fit" else experiment.rounds, arm == "fit_head"
    )
    if arm in ("fit", "fedavg+fit"):
        grid, told = federation(experiment, seed)
        arrays = fit_task_head(
            grid, arrays, model.peft_config["default"], config=told
        ).arrays
    load_adapter(model, arrays.to_torch_state_dict())
    setting = {
        "data": experiment.data,
        "partition": experiment.partition,
        "count": experiment.clients,
    }
    setting |= {"arm": arm, "rate": experiment.lr, "seed": seed}
    return setting | scores(model, task_of(experiment.to_json()), seed)


def scores(model: Any, task: Task, seed: int) -> dict[str, float]:
    """Return test scores, mean and least accuracy of clients, and the loss on their
    held-out rows.
    """
    evaluate, labels = partial(training.evaluate, model, task), task.data.test.labels
    parts = [
        task.client_rows(seed, client) for client in range(task.experiment.clients)
    ]
    held_out = evaluate(task.train, np.concatenate([held for _, held in parts]))
    found = evaluate(task.test, np.arange(len(labels)))
    places = [
        np.flatnonzero(np.isin(labels, task.data.train.labels[rows]))
        for rows, _ in parts
    ]
    own = [evaluate(task.test, of_client)["accuracy"] for of_client in places]
    clients = {"mean_client": float(np.mean(own)), "worst_client": min(own)}
    whole = {name: found[name] for name in ("accuracy", "macro_f1", "calibrated_loss")}
    return {**whole, **clients, "held_out_loss": held_out["calibrated_loss"]}


def main(
    data_dir: Path,
    out: Path,
    data: str = "dair_emotion",
    model: str = "minilm",
    partition: str = "pathological:1",
    clients: int = 6,
    seed: int = 11,
) -> None:
    """Append a row of each arm to the CSV file OUT."""
    lora = {
        "r": 8,
        "target_modules": ["query", "value"],
        "lora_alpha": 16,
        "lora_dropout": 0.1,
    }
    fixed: dict[str, Any] = {"lora": lora, "holdout": 0.25, "batch_size": 16}
    fixed |= {
        "train_limit": 800,
        "test_limit": 1000,
        "rounds": 5,
        "data": data,
        "data_dir": data_dir,
    }
    fixed |= {"model": model, "partition": partition, "clients": clients}
    for arm, rate in ARMS.items():
        row = measured(Experiment.model_validate({**fixed, "lr": rate}), arm, seed)
        pd.DataFrame([row]).round(4).to_csv(
            out, mode="a", header=not out.exists(), index=False
        )


if __name__ == "__main__":
    with outside_of_the_engine():
        typer.run(main)
