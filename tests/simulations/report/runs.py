"""Run folders and rows for the tests of reports."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrot.simulations.folder import Run, file_name, title_of

HOSTILE = "</script><script>alert(1)</script> & \"q\" 'x' $\\x$ ../../../x | " + 300 * "y"
CODE = "FedRot(model.config, fit_head=True)"
#: Differences from fedavg by seed, each with a spread.
WOBBLE = (0.0, 0.002, -0.001, 0.001, -0.002)
SEEDS = range(5)


def row(strategy: str, seed: int, value: float | None, **more: Any) -> dict[str, Any]:
    """Return a row of the global model after round 1."""
    about = {"experiment": "main", "strategy": strategy, "seed": seed, "round": 1}
    return {**about, "scope": "central", "metric": "accuracy", "value": value, **more}


def levels(strategy: str, values: Mapping[str, Sequence[float]], **more: Any) -> list[dict[str, Any]]:
    """Return rows of metrics with a value per seed."""
    return [
        row(strategy, seed, value, metric=metric, **more)
        for metric, own in values.items()
        for seed, value in enumerate(own)
    ]


def strategy(name: str, **more: Any) -> dict[str, Any]:
    """Return a strategy as it stands in a configuration."""
    kind = "joined" if name == "joined" else "fedrot"
    return {"name": name, "kind": kind, "code": f"FedRot({name})", "says": f"It is {name}.", **more}


def run_of(rows: list[dict[str, Any]], strategies: Sequence[Mapping[str, Any]] = (), **more: Any) -> Run:
    """Return a run of the experiment "main", with the given strategies and the others of the rows."""
    known = [own["name"] for own in strategies]
    others = [{"name": n} for n in dict.fromkeys(own["strategy"] for own in rows) if n not in known]
    return Run(experiments=[{"name": "main", "strategies": [*strategies, *others]}], rows=rows, **more)


def group(number: int, part: str, layer: int, share: float, **more: Any) -> dict[str, Any]:
    """Return a row of alignment; its share was found and removed, and chance is unknown."""
    about = {"experiment": "main", "strategy": "aligned", "seed": 0, "round": number, "client": 0}
    found = {"part": part, "layer": layer, "found": 2.0 * share, "moved": 0}
    return {**about, **found, "before": 2.0, "after": 2.0 * (1 - share), **more}


def rows_of(experiment: str, gains: Mapping[str, float], rounds: int = 3) -> list[dict[str, Any]]:
    """Return rows of strategies whose final accuracy is 0.6 and a gain."""
    found = []
    for name, gain in gains.items():
        for seed in SEEDS:
            for number in range(rounds + 1):
                about = {"experiment": experiment, "round": number}
                shift = (gain + (name != "fedavg") * WOBBLE[(seed + len(name)) % 5]) * number / rounds
                accuracy = 0.3 + 0.3 * number / rounds + 0.01 * seed + shift
                f1 = accuracy - 0.1 + shift
                values = {"accuracy": accuracy, "macro_f1": f1, "ece": 0.1, "loss": 2 - 1.5 * accuracy}
                found += [row(name, seed, v, metric=m, **about) for m, v in values.items()]
                for client in range(8):
                    own = {"scope": f"client:{client}", **about}
                    found.append(row(name, seed, accuracy - 0.02 * client, **own))
                for metric, value in (("bytes-sent", 4e7), ("bytes-received", 3e7), ("requests", 16)):
                    own = {"scope": "messages", "metric": metric, **about}
                    found.append(row(name, seed, value * number * (1 + gain), **own))
    return found


def write_folder(folder: Path, experiments: Mapping[str, Mapping[str, float]], **files: Any) -> Path:
    """Write a run of experiments with strategies and their gains; ``files`` are other JSON files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cells").mkdir(exist_ok=True)
    names = ["anger", "<disgust>", "fear", "joy", "sadness", "surprise"]
    counts = [[40, 3, 8, 120, 22, 9 + n * n] if n % 2 else [5 * n, 0, 30, 15, n, 80] for n in range(8)]
    seeds = {str(s): {"sizes": [sum(c) for c in counts], "counts": counts} for s in (0, 1)}
    written: dict[str, Any] = {
        "config": {
            "commands": ["fedrot simulate --data 'a <b>.csv' --out runs/a"],
            "experiments": [
                {
                    **{"name": name, "model": None, "rounds": 3, "seeds": [*SEEDS]},
                    "strategies": [*map(strategy, gains)],
                }
                for name, gains in experiments.items()
            ],
        },
        "versions": {"date": "2026-01-31", "torch": "2.9.0"},
        "partition": {name: {"label_names": names, "seeds": seeds} for name in experiments},
        **files,
    }
    for name, value in written.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    for name, gains in experiments.items():
        shares = {"attention": 0.3, "ffn": 0.02}
        alignment = [
            {**group(r, part, layer, share * (layer + 1) / r, chance=0.1), "experiment": name}
            for r in (1, 2, 3)
            for layer in (0, 1)
            for part, share in shares.items()
        ]
        lost = {"round": 1, "client": 3, "dropped": "NaN in 'w'"}
        alignment.append({"experiment": name, "strategy": "aligned", **lost})
        rows = rows_of(name, gains)
        for own, seed in itertools.product(gains, SEEDS):
            title = title_of(name, seed, own)
            mine = [r for r in rows if (r["strategy"], r["seed"]) == (own, seed)]
            first = (own, seed) == (next(iter(gains)), 0)
            cell = {"title": title, "rows": mine, "alignment": alignment if first else [], "log": ""}
            (folder / "cells" / f"{file_name(title)}.json").write_text(json.dumps(cell))
    return folder
