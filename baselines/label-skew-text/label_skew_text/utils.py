"""label_skew_text: A Flower Baseline."""

import csv
from logging import INFO
from pathlib import Path

from flwr.app import UserConfig
from flwr.common import log
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor


def scores(labels: Tensor, guess: Tensor) -> dict[str, float]:
    """Return accuracy and macro F1 of the test rows."""
    return {
        "accuracy": float(accuracy_score(labels, guess)),
        "macro_f1": float(f1_score(labels, guess, average="macro")),
    }


def write_row(config: UserConfig, strategy: str, found: dict[str, float]) -> None:
    """Log what a strategy reached, and append it to the file ``results``."""
    row = {
        "dataset": Path(str(config["dataset"])).name,
        "concentration": config["concentration"],
        "seed": config["seed"],
        "strategy": strategy,
        **{name: f"{value:.4f}" for name, value in found.items()},
    }
    log(INFO, "Result: %s", " ".join(f"{name}={value}" for name, value in row.items()))
    if path := str(config["results"]):
        new = not Path(path).exists()
        with Path(path).open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*row])
            if new:
                writer.writeheader()
            writer.writerow(row)
