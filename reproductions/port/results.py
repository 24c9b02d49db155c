"""What a fine-tuning is worth on another base: the base alone, the naive port, and matched ones.

Two bases of one architecture are trained as language models from different starts, on halves of the
GoEmotions comments. The first is fine-tuned to a classifier of other texts, which is carried
over to the second base (``porting``). Rows have loss and accuracy on held-out texts of ``base`` (the
second base with the head of the fine-tuned model), ``none`` (the naive port), ``permutation``,
``rotation``, and ``tuned``, the fine-tuned model itself.

    python -m reproductions.port.results --data-dir DIR --out runs/port
"""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedrot._io import json_line, write_json, write_text
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation.run_folder import versions
from fedrot.simulations.models.build import build_model
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.task import task_of
from fedrot.symmetry import Symmetry, symmetry_of
from fedrot.tensors import Tensors
from reproductions.port.porting import MATCHES, ported

ARCHITECTURES = ("gpt2", "llama")
TEXTS = ("dair_emotion", "sst2")


def main() -> None:
    """Train, carry over, evaluate; what ``--out`` holds is not done again."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=8000, help="training rows of both bases together")
    parser.add_argument("--tuning-rows", type=int, default=4000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {k: str(v) for k, v in vars(options).items() if k not in ("data_dir", "out")}
    write_json(options.out / "config.json", {"settings": settings, "scale": 1.0})
    write_json(options.out / "versions.json", versions())
    for seed in range(options.seeds):
        for architecture in ARCHITECTURES:
            path = options.out / f"{architecture}.{seed}.jsonl"
            if not path.exists():
                rows = measured(architecture, seed, options)
                write_text(path, "".join(map(json_line, rows)))
                for row in rows:
                    print(json.dumps(row), flush=True)
    files = sorted(options.out.glob("*.*.jsonl"))
    write_text(options.out / "rows.jsonl", "".join(file.read_text() for file in files))


def measured(architecture: str, seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one pair of bases."""

    def task(kind: str, data: str, rows: int) -> Any:
        config = SimulationConfig(
            task=kind,
            data=data,
            architecture=architecture,
            data_dir=options.data_dir,
            train_limit=rows,
            test_limit=1000,
            local_epochs=3,
            lr=1e-3,
        )
        return task_of(config.to_json())

    comments = task("clm", "goemotions", options.rows)
    halves = np.array_split(np.random.default_rng(seed).permutation(len(comments.train)), 2)
    bases = []
    for number, half in enumerate(halves):
        model = build_model(comments.config, comments.data, 2 * seed + number)
        training.train(model, comments, np.sort(half), 2 * seed + number)
        bases.append(model.eval())
    old, new = map(Weights.of, bases)
    rows = []
    for data in TEXTS:
        texts = task("classification", data, options.tuning_rows)
        tuned = build_model(texts.config, texts.data, seed)
        tuned.load_state_dict(bases[0].state_dict(), strict=False)
        training.train(tuned, texts, np.arange(len(texts.train)), seed)
        fine = Weights.of(tuned.eval())
        models = {"base": copy.deepcopy(tuned), "tuned": tuned}
        models["base"].load_state_dict(bases[1].state_dict(), strict=False)
        for name, how in MATCHES.items():
            tensors, _, _ = ported(old, fine, new, how)
            models[name] = copy.deepcopy(tuned)
            models[name].load_state_dict(tensors)
        for name, model in models.items():
            found = training.evaluate(model, texts, texts.test, np.arange(len(texts.test)))
            labels = {"architecture": architecture, "seed": seed, "texts": data, "model": name}
            rows.append({**labels, "loss": found["loss"], "accuracy": found["accuracy"]})
    return rows


@dataclass(frozen=True)
class Weights:
    """The tensors of a model of the harness, whose tables are separate already, and their symmetry."""

    tensors: Tensors
    symmetry: Symmetry

    @classmethod
    def of(cls, model: Any) -> Weights:
        """Return those of a model; it may go on training."""
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return cls(tensors, symmetry_of(model.config, tensors))


if __name__ == "__main__":
    main()
