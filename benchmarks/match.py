"""Speed of matching one whole model of BERT-base size from another start, on the CPU.

``whole`` is ``fedrot.align`` with ``WHOLE_MODEL``, from weights alone, until it
converges. It is compared with ``layers``, one default alignment of attention and
neurons in the same run. Regimes: ``unrelated`` models (nothing matches, the slowest
case) and ``moved``, a client that drifted and was moved to a random equivalent basis,
which matching has to find.

    python benchmarks/match.py [--repeats 1] [--layers 12] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from align import WIDTH, State, config, drifted, initialise
from rich.console import Console
from rich.table import Table

import fedrot

BAR = 60.0
CLASSES = 6
OPTIONS = {
    "whole": fedrot.AlignmentOptions(parts=fedrot.WHOLE_MODEL),
    "layers": fedrot.AlignmentOptions(),
}


def classifier(layers: int, seed: int) -> State:
    """Return a model with a classifier on its pooler."""
    generator = torch.Generator().manual_seed(1000 + seed)
    head = {
        "classifier.weight": torch.randn(CLASSES, WIDTH, generator=generator).mul_(
            0.02
        ),
        "classifier.bias": torch.zeros(CLASSES),
    }
    encoder = {
        f"bert.{name}": tensor for name, tensor in initialise(layers, seed).items()
    }
    return encoder | head


def main() -> None:
    """Run both regimes and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--drift", type=float, default=0.02)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)

    anchor = classifier(options.layers, 0)
    symmetry = fedrot.symmetry_of(config(options.layers), anchor)
    near = drifted(anchor, options.drift, 1)
    clients = {
        "unrelated": classifier(options.layers, 1),
        "moved": fedrot.random_equivalent(
            near, symmetry, seed=2, parts=fedrot.WHOLE_MODEL
        ),
    }
    rows = []
    for regime, client in clients.items():
        seconds: dict[str, list[float]] = {name: [] for name in OPTIONS}
        removed = {}
        for _ in range(options.repeats):
            for name, choice in OPTIONS.items():
                start = time.perf_counter()
                report = fedrot.align(client, anchor, symmetry, choice).report
                seconds[name].append(time.perf_counter() - start)
                removed[name] = report.share()
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        ratio = statistics.median(
            a / b for a, b in zip(seconds["whole"], seconds["layers"], strict=True)
        )
        rows.append(
            {"regime": regime, **medians, "ratio": ratio, "removed": removed["whole"]}
        )

    table = Table(
        title=f"Whole-model matching, {options.layers} layers; bar: {BAR:.0f} s"
    )
    for column in ("regime", "whole", "layers", "whole / layers", "distance removed"):
        table.add_column(column, justify="right")
    for row in rows:
        figures = (
            f"{row['whole']:.1f} s",
            f"{row['layers']:.1f} s",
            f"{row['ratio']:.1f}",
        )
        table.add_row(row["regime"], *figures, f"{100 * row['removed']:.1f} %")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
