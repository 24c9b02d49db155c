"""Run folders and rows for the tests of reports."""

from __future__ import annotations

import itertools
import json

from fedrot.simulations.comparison.summary import BOUNDS
from fedrot.simulations.run_folder import Run, file_name, title_of

HOSTILE = (
    "</script><script>alert(1)</script> & \"q\" 'x' $\\x$ ../../../x | " + 300 * "y"
)
#: Differences from fedavg by seed, each with a spread.
WOBBLE = (0.0, 0.002, -0.001, 0.001, -0.002)
SEEDS = range(5)
#: As plug-ins do.
BOUNDS["joined"] = "all rows in one place, an upper bound"


def row(strategy, seed, value, **more):
    """Return a row of the global model after round 1."""
    about = {"experiment": "main", "strategy": strategy, "seed": seed, "round": 1}
    return {**about, "scope": "central", "metric": "accuracy", "value": value, **more}


def levels(strategy, values, **more):
    """Return rows of metrics with a value per seed."""
    return [
        row(strategy, seed, value, metric=metric, **more)
        for metric, of_seeds in values.items()
        for seed, value in enumerate(of_seeds)
    ]


def strategy(name, **more):
    """Return a strategy as it stands in a configuration."""
    kind = "joined" if name == "joined" else "fedrot"
    return {
        "name": name,
        "kind": kind,
        "learning_rate": None,
        "code": f"FedRot({name})",
        "says": f"It is {name}.",
        **more,
    }


def run_of(
    rows,
    strategies=(),
    **more,
):
    """Return a run of the experiment "main", with the given strategies and the others
    of the rows.
    """
    known = {about["name"]: about for about in strategies}
    for name in (row["strategy"] for row in rows):
        known.setdefault(name, {"name": name})
    about = {"name": "main", "strategies": known, "label_names": [], "seeds": {}}
    return Run(experiments={"main": {**about, **more}}, rows=rows)


def group(number, part, layer, share, **more):
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


def rows_of(experiment, name, gain, seed):
    """Return rows of a strategy whose accuracy after three rounds is 0.6 and a gain."""
    found = []
    for number in range(4):
        about = {"experiment": experiment, "round": number}
        shift = (
            (gain + (name != "fedavg") * WOBBLE[(seed + len(name)) % 5]) * number / 3
        )
        accuracy = 0.3 + 0.1 * number + 0.01 * seed + shift
        values = [("central", "accuracy", accuracy)]
        values += [("central", "macro_f1", accuracy - 0.1 + shift)]
        values += [("central", "ece", 0.1), ("central", "loss", 2 - 1.5 * accuracy)]
        sent = {"bytes-sent": 4e7, "bytes-received": 3e7, "requests": 16}
        values += [("messages", m, v * number * (1 + gain)) for m, v in sent.items()]
        found += [
            row(name, seed, value, scope=scope, metric=metric, **about)
            for scope, metric, value in values
        ]
    return found


def write_folder(folder, experiments):
    """Write a run of experiments with strategies and their gains."""
    (folder / "cells").mkdir(parents=True)
    names = ["anger", "<disgust>", "fear", "joy", "sadness", "surprise"]
    counts = [
        [40, 3, 8, 120, 22, 9 + n * n] if n % 2 else [5 * n, 0, 30, 15, n, 80]
        for n in range(8)
    ]
    about = {
        "model": "encoder",
        "lora": {},
        "lr": 1e-3,
        "clients": 8,
        "rounds": 3,
        "scored": "1 of 6 classes have no test row.",
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
        for seed, (own, gain) in itertools.product(SEEDS, gains.items()):
            title = title_of(name, seed, own)
            moved = [{**row, "experiment": name} for row in alignment]
            written[f"cells/{file_name(title)}"] = {
                "title": title,
                "rows": rows_of(name, own, gain, seed),
                "alignment": moved if (own, seed) == ("fedavg", 0) else [],
            }
    for file, value in written.items():
        (folder / f"{file}.json").write_text(json.dumps(value))
    return folder
