"""Run folders and rows for the tests of reports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrot.simulations.run_folder import Run, file_name, title_of
from fedrot.simulations.summary import BOUNDS
from tests.simulations.commands import Fields, Rows

HOSTILE = (
    "</script><script>alert(1)</script> & \"q\" 'x' $\\x$ ../../../x | " + 300 * "y"
)
#: Differences from fedavg by seed, each with a spread.
WOBBLE = (0.0, 0.002, -0.001, 0.001, -0.002)
SEEDS = range(5)
#: As plug-ins do.
BOUNDS["joined"] = "all rows in one place, an upper bound"


def row(strategy: str, seed: int, value: float | None, **more: Any) -> Fields:
    """Return a row of the global model after round 1."""
    about = {"experiment": "main", "strategy": strategy, "seed": seed, "round": 1}
    return {**about, "scope": "central", "metric": "accuracy", "value": value, **more}


def levels(strategy: str, values: Mapping[str, Sequence[float]], **more: Any) -> Rows:
    """Return rows of metrics with a value per seed."""
    pairs = [
        (metric, *pair) for metric, own in values.items() for pair in enumerate(own)
    ]
    return [
        row(strategy, seed, value, metric=metric, **more)
        for metric, seed, value in pairs
    ]


def strategy(name: str, **more: Any) -> Fields:
    """Return a strategy as it stands in a configuration."""
    kind = "joined" if name == "joined" else "fedrot"
    return {
        "name": name,
        "kind": kind,
        "code": f"FedRot({name})",
        "says": f"It is {name}.",
        **more,
    }


def run_of(
    rows: Rows,
    strategies: Sequence[Mapping[str, Any]] = (),
    **more: Any,
) -> Run:
    """Return a run of the experiment "main", with the given strategies and the others
    of the rows.
    """
    known = {own["name"]: own for own in strategies}
    known |= {
        own["strategy"]: {"name": own["strategy"]}
        for own in rows
        if own["strategy"] not in known
    }
    about = {
        "name": "main",
        "strategies": known,
        "label_names": [],
        "seeds": {},
        **more,
    }
    return Run(experiments={"main": about}, rows=rows)


def group(number: int, part: str, layer: int, share: float, **more: Any) -> Fields:
    """Return a row of alignment; its share was found and removed, and chance is
    unknown.
    """
    about = {
        "experiment": "main",
        "strategy": "aligned",
        "seed": 0,
        "round": number,
        "client": 0,
    }
    found = {"part": part, "layer": layer, "found": 2.0 * share, "moved": 0}
    return {**about, **found, "before": 2.0, "after": 2.0 * (1 - share), **more}


def rows_of(experiment: str, name: str, gain: float, seed: int) -> Rows:
    """Return rows of a strategy whose accuracy after three rounds is 0.6 and a gain."""
    found = []
    for number in range(4):
        about = {"experiment": experiment, "round": number}
        shift = (
            (gain + (name != "fedavg") * WOBBLE[(seed + len(name)) % 5]) * number / 3
        )
        accuracy = 0.3 + 0.1 * number + 0.01 * seed + shift
        f1 = accuracy - 0.1 + shift
        values = {
            "accuracy": accuracy,
            "macro_f1": f1,
            "ece": 0.1,
            "loss": 2 - 1.5 * accuracy,
        }
        found += [
            row(name, seed, value, metric=metric, **about)
            for metric, value in values.items()
        ]
        clients = {f"client:{client}": accuracy - 0.02 * client for client in range(8)}
        found += [
            row(name, seed, value, scope=scope, **about)
            for scope, value in clients.items()
        ]
        sent = {"bytes-sent": 4e7, "bytes-received": 3e7, "requests": 16}
        about |= {"scope": "messages"}
        found += [
            row(name, seed, v * number * (1 + gain), metric=m, **about)
            for m, v in sent.items()
        ]
    return found


def write_folder(folder: Path, experiments: Mapping[str, Mapping[str, float]]) -> Path:
    """Write a run of experiments with strategies and their gains."""
    (folder / "cells").mkdir(parents=True)
    names = ["anger", "<disgust>", "fear", "joy", "sadness", "surprise"]
    counts = [
        [40, 3, 8, 120, 22, 9 + n * n] if n % 2 else [5 * n, 0, 30, 15, n, 80]
        for n in range(8)
    ]
    about = {
        "model": None,
        "rounds": 3,
        "label_names": names,
        "seeds": {str(s): counts for s in SEEDS},
    }
    configured = {
        name: {
            "name": name,
            **about,
            "strategies": {own: strategy(own) for own in gains},
        }
        for name, gains in experiments.items()
    }
    config = {
        "commands": ["fedrot simulate --data 'a <b>.csv'"],
        "experiments": configured,
        "versions": {"date": "2026-01-31", "torch": "2.9.0"},
    }
    written = {"config": config}
    alignment = [
        group(number, part, layer, share * (layer + 1) / number, chance=0.1)
        for number in (1, 2, 3)
        for layer in (0, 1)
        for part, share in (("attention", 0.3), ("ffn", 0.02))
    ]
    alignment.append(
        {"strategy": "aligned", "round": 1, "client": 3, "dropped": "NaN in 'w'"}
    )
    for name, gains in experiments.items():
        for seed in SEEDS:
            for own, gain in gains.items():
                title = title_of(name, seed, own)
                moved = [
                    {**one, "experiment": name}
                    for one in alignment
                    if own == "fedavg" and seed == 0
                ]
                cell = {
                    "title": title,
                    "rows": rows_of(name, own, gain, seed),
                    "alignment": moved,
                }
                written[f"cells/{file_name(title)}"] = cell
    for file, value in written.items():
        (folder / f"{file}.json").write_text(json.dumps(value))
    return folder
