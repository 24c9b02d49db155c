"""Does ``diagnose`` name the better average, from the first round alone? Checked on the published runs.

The better average of a setting is ``aligned`` or ``whole`` if its headline metric or its loss after
round 1 is better than plain averaging's by the paired 95 % interval and neither is worse, else
``plain``. The published rows are older than the evidence: there every group moved, so that ``found`` is
what was removed, and chance is the share (d_h - 1) / 4D of a rotation near its anchor. With ``--train``,
the first round of settings is trained again, and the clients' models themselves are diagnosed.

    python benchmarks/diagnose.py [--train one-shot --data-dir DATA] [--only NAME] [--seeds 1]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import parquet

from fedrot.diagnosis import ALIGNED, PLAIN, ROTATED, WHOLE, Diagnosis, diagnose, diagnosis_of
from fedrot.simulations.report.summaries import Place, compare_seeds, final_values, headline

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"

#: The arms that stand for each choice, by published run.
SHARED = {ALIGNED: "attention+ffn@running*0"}
ARMS = {
    "one-shot": SHARED,
    "rounds": SHARED,
    "merging": {ALIGNED: "aligned"},
    "different-one-shot": {ALIGNED: "attention+ffn", WHOLE: "aligned"},
    "different-rounds": {WHOLE: "aligned"},
    "different-short-rounds": {WHOLE: "aligned"},
}

#: Width of the pretrained model of ``merging``, all-MiniLM-L6-v2.
PRETRAINED_WIDTH = 384


@dataclass(frozen=True)
class Published:
    """A published setting: the better average, and the diagnosis of its first round by seed."""

    run: str
    setting: str
    better: str
    pooled: Diagnosis
    by_seed: tuple[Diagnosis, ...]

    @property
    def agreed(self) -> int:
        """The number of seeds whose diagnosis alone names the better average."""
        return sum(found.choice == self.better for found in self.by_seed)


def published() -> Iterator[Published]:
    """Yield the published settings with alignments."""
    for run, arms in ARMS.items():
        folder = RESULTS / run
        results = [row for row in _rows(folder, "rows") if row["round"] == 1]
        rows = [row for row in _rows(folder, "alignment") if row["round"] == 1]
        for config in json.loads((folder / "config.json").read_text())["settings"]:
            setting, width = config["setting"], config["width"]
            width = PRETRAINED_WIDTH if config["model"] else width
            arm = arms.get(WHOLE, arms.get(ALIGNED))
            own = [_with_evidence(r, width) for r in rows if (r["setting"], r["arm"]) == (setting, arm)]
            by_seed = _by(("seed",), own).values()
            better = better_average([row for row in results if row["setting"] == setting], arms)
            yield Published(run, setting, better, diagnosis_of(own), tuple(by_seed))


def by_round(arm: str) -> dict[int, list[str]]:
    """Return the choices of all settings and seeds of ``rounds``, by the number of the round."""
    found: dict[int, list[str]] = {}
    rows = [row for row in _rows(RESULTS / "rounds", "alignment") if row["arm"] == arm]
    own = _by(("round", "setting", "seed"), [_with_evidence(row, 128) for row in rows])
    for (number, *_), one in own.items():
        found.setdefault(number, []).append(one.choice)
    return found


def _rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return published rows without the fields that have no value."""
    stored = parquet.read_table(folder / f"{name}.parquet").to_pylist()
    return [{key: value for key, value in row.items() if value is not None} for row in stored]


def _by(keys: tuple[str, ...], rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], Diagnosis]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return {key: diagnosis_of(groups[key]) for key in sorted(groups)}


def _with_evidence(row: dict[str, Any], width: int) -> dict[str, Any]:
    removed = row["before"] - row["after"]
    share = (width / row["of"] - 1) / (4 * width) if row["part"] == ROTATED else 0.0
    chance = share * row["before"] if row["part"] == ROTATED else removed
    return {**row, "found": removed, "chance": chance}


def better_average(rows: list[dict[str, Any]], arms: dict[str, str]) -> str:
    """Return which average the metrics of round 1 recommend."""
    values, gains = final_values(rows), dict[str, float]()
    setting, start = rows[0]["setting"], rows[0]["start"]
    for choice, arm in arms.items():
        pairs = {}
        for metric in dict.fromkeys((*headline(rows), "loss")):
            ours, theirs = (values[Place(setting, start, one, metric)] for one in (arm, PLAIN))
            pairs[metric] = compare_seeds(ours, theirs, metric)
        verdicts = {pair.verdict for pair in pairs.values()}
        if "better" in verdicts and "worse" not in verdicts:
            gains[choice] = -pairs["loss"].mean
    return max(gains, key=gains.__getitem__, default=PLAIN)


def trained(grid: str, data_dir: Path, only: str, seeds: int) -> Iterator[tuple[str, int, Diagnosis]]:
    """Train the clients of a grid's settings for one round, and diagnose their models."""
    from fedrot.simulations.config import SimulationConfig
    from fedrot.simulations.grids import read_grid
    from fedrot.simulations.models.build import build_model, model_config
    from fedrot.simulations.tasks import training
    from fedrot.simulations.tasks.task import task_of
    from fedrot.symmetry import symmetry_of

    base, entries = read_grid(Path(grid), "setting")
    for entry in entries:
        config = SimulationConfig.from_flat({**base, **entry, "data_dir": str(data_dir)})
        task = task_of(config.to_json())
        for seed in config.seeds[:seeds] if only in config.setting else ():
            broadcast = build_model(config, task.data, seed).state_dict()
            updates = []
            for client in range(config.clients):
                stream = (seed * 1_000 + 1) * 1_000 + client  # as ``Job.stream``
                own_start = config.starts == ("different",)
                model = build_model(config, task.data, stream if own_start else seed)
                rows = task.client_rows(seed, client)[0]
                training.train(model, task, rows, stream, config.epochs(1))
                updates.append({name: t.detach().clone() for name, t in model.state_dict().items()})
            symmetry = symmetry_of(model_config(config, task.data), broadcast)
            yield config.setting, seed, diagnose(broadcast, updates, symmetry)


def main() -> None:
    """Print a line per setting, and how many are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--train", metavar="GRID")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    if options.train:
        how = (options.train, options.data_dir, options.only, options.seeds)
        for setting, seed, diagnosis in trained(*how):
            print(f"{setting}, seed {seed}: {diagnosis.choice}. {diagnosis}", flush=True)
        return
    found = list(published())
    for one in found:
        verdict = "right" if one.pooled.choice == one.better else "WRONG"
        counts = f"{one.agreed} of {len(one.by_seed)} seeds"
        print(f"{verdict}: {one.run}, {one.setting}: better {one.better}; {one.pooled} ({counts})")
    right = sum(one.pooled.choice == one.better for one in found)
    agreed, of = sum(one.agreed for one in found), sum(len(one.by_seed) for one in found)
    print(f"{right} of {len(found)} settings, {agreed} of {of} seeds alone")


if __name__ == "__main__":
    main()
