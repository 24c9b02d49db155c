"""Speed and memory of aligning one client of BERT-base size, on the CPU.

Attention and feed-forward alignment (``fedrot.align(...).apply(...)``) is compared with

* a per-head loop: scipy's assignment in every layer, permutations as dense matrices
  that are multiplied, one SVD per head, like published research code; and
* the time that Flower's own ``FedAvg`` spends on one reply (decode, multiply, add).

The contestants take turns within every repetition; a ratio is the median of the ratios
within the repetitions, so that a slow minute of the machine hits all of them. Peak
memory is measured in a separate process: the high-water mark of its resident set during
one ``align`` and ``apply``, less the resident set before (anchor and update are loaded,
and an untimed pass over the numbers of one layer has loaded the numerical libraries).
On systems without ``/proc`` it is the rise of ``ru_maxrss``.

    python benchmarks/align.py [--regimes near] [--repeats 5] [--threads N] [--clock
    cpu] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from scipy.optimize import linear_sum_assignment
from torch import Tensor

import fedrot

State = dict[str, Tensor]

WIDTH, HEADS, NEURONS, VOCABULARY, POSITIONS = 768, 12, 3072, 30522, 512
DIM = WIDTH // HEADS
REPLIES = 4
REGIMES = ("near", "unrelated")
BARS = {"loop": 20.0, "flower": 1.0, "memory": 1.2}


def config(layers: int) -> dict[str, Any]:
    """Return the part of BERT-base's configuration that fedrot reads."""
    return {
        "model_type": "bert",
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "hidden_size": WIDTH,
        "intermediate_size": NEURONS,
    }


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors of ``BertModel``."""
    out: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCABULARY, WIDTH),
        "embeddings.position_embeddings.weight": (POSITIONS, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
        "embeddings.LayerNorm.weight": (WIDTH,),
        "embeddings.LayerNorm.bias": (WIDTH,),
        "pooler.dense.weight": (WIDTH, WIDTH),
        "pooler.dense.bias": (WIDTH,),
    }
    for layer in range(layers):
        prefix = f"encoder.layer.{layer}."
        linears = {
            "attention.self.query": (WIDTH, WIDTH),
            "attention.self.key": (WIDTH, WIDTH),
            "attention.self.value": (WIDTH, WIDTH),
            "attention.output.dense": (WIDTH, WIDTH),
            "intermediate.dense": (NEURONS, WIDTH),
            "output.dense": (WIDTH, NEURONS),
        }
        for module, shape in linears.items():
            out[f"{prefix}{module}.weight"] = shape
            out[f"{prefix}{module}.bias"] = shape[:1]
        for norm in ("attention.output.LayerNorm", "output.LayerNorm"):
            out[f"{prefix}{norm}.weight"] = (WIDTH,)
            out[f"{prefix}{norm}.bias"] = (WIDTH,)
    return out


def initialise(layers: int, seed: int) -> State:
    """Return a model with BERT's initialisation (0.02) and small random biases."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).mul_(0.02)
        for name, shape in shapes(layers).items()
    }


def drifted(anchor: State, drift: float, seed: int) -> State:
    """Return the anchor plus Gaussian noise of relative norm ``drift`` in every
    tensor.
    """
    generator = torch.Generator().manual_seed(seed)
    out: State = {}
    for name, tensor in anchor.items():
        noise = torch.randn(tensor.shape, generator=generator)
        out[name] = noise.mul_(drift * tensor.norm() / noise.norm()).add_(tensor)
    return out


def client(anchor: State, regime: str, layers: int, drift: float, seed: int) -> State:
    """Return a client's update: near the anchor, or from an initialisation of its
    own.
    """
    return (
        drifted(anchor, drift, seed) if regime == "near" else initialise(layers, seed)
    )


def loop_baseline(update: State, anchor: State, layers: int) -> State:
    """Align head by head and layer by layer with dense permutation matrices (Zhang et
    al. 2025).
    """
    out = dict(update)
    for layer in range(layers):
        prefix = f"encoder.layer.{layer}."
        q, k, v = (
            f"{prefix}attention.self.{part}" for part in ("query", "key", "value")
        )
        modules = ("attention.output.dense", "intermediate.dense", "output.dense")
        o, up, down = (f"{prefix}{module}" for module in modules)
        for name in (q, k, v):
            out[f"{name}.weight"] = update[f"{name}.weight"].clone()
            out[f"{name}.bias"] = update[f"{name}.bias"].clone()
        out[f"{o}.weight"] = update[f"{o}.weight"].clone()
        for head in range(HEADS):
            rows = slice(head * DIM, (head + 1) * DIM)
            for names, columns in (((q, k), ()), ((v,), (o,))):
                m = torch.zeros(DIM, DIM)
                for name in names:
                    m += (
                        anchor[f"{name}.weight"][rows]
                        @ update[f"{name}.weight"][rows].T
                    )
                    m += torch.outer(
                        anchor[f"{name}.bias"][rows], update[f"{name}.bias"][rows]
                    )
                for name in columns:
                    m += (
                        anchor[f"{name}.weight"][:, rows].T
                        @ update[f"{name}.weight"][:, rows]
                    )
                left, _, right = torch.linalg.svd(m)
                rotation = left @ right
                for name in names:
                    out[f"{name}.weight"][rows] = (
                        rotation @ update[f"{name}.weight"][rows]
                    )
                    out[f"{name}.bias"][rows] = rotation @ update[f"{name}.bias"][rows]
                for name in columns:
                    out[f"{name}.weight"][:, rows] = (
                        update[f"{name}.weight"][:, rows] @ rotation.T
                    )
        score = anchor[f"{up}.weight"] @ update[f"{up}.weight"].T
        score += torch.outer(anchor[f"{up}.bias"], update[f"{up}.bias"])
        score += anchor[f"{down}.weight"].T @ update[f"{down}.weight"]
        _, column = linear_sum_assignment(score.numpy(), maximize=True)
        permutation = torch.eye(NEURONS)[torch.from_numpy(column)]
        out[f"{up}.weight"] = permutation @ update[f"{up}.weight"]
        out[f"{up}.bias"] = permutation @ update[f"{up}.bias"]
        out[f"{down}.weight"] = update[f"{down}.weight"] @ permutation.T
    return out


def flower_round(layers: int) -> Callable[[], object]:
    """Return Flower's own weighted average over several replies of this size."""
    from flwr.app import ArrayRecord, MetricRecord, RecordDict
    from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

    replies = [
        RecordDict(
            {
                "arrays": ArrayRecord(initialise(layers, 100 + i)),
                "metrics": MetricRecord({"num-examples": 10 + i}),
            }
        )
        for i in range(REPLIES)
    ]
    return lambda: aggregate_arrayrecords(replies, "num-examples")


def align_and_apply(
    update: State, anchor: fedrot.Anchor, symmetry: fedrot.Symmetry
) -> State:
    """Align attention and neurons, and return the moved update."""
    return fedrot.align(update, anchor, symmetry).apply(update)


#: Seconds on the wall, or of this process's CPU: on a busy machine only the latter can
#: be compared.
CLOCKS: dict[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    "cpu": time.process_time,
}


def timed(run: Callable[[], object], clock: str) -> float:
    """Return the seconds of one run."""
    start = CLOCKS[clock]()
    run()
    return CLOCKS[clock]() - start


def seconds(regime: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of every contestant in every repetition; the first, untimed
    one warms up.
    """
    layers = options.layers
    anchor = initialise(layers, 0)
    symmetry = fedrot.symmetry_of(config(layers), anchor)
    update = client(anchor, regime, layers, options.drift, 1)
    flower = flower_round(layers)
    times: dict[str, list[float]] = {
        name: [] for name in ("first", "next", "loop", "flower")
    }
    for repetition in range(options.repeats + 1):
        reused = fedrot.Anchor(anchor)
        runs: dict[str, Callable[[], object]] = {
            "first": partial(align_and_apply, update, reused, symmetry),
            "next": partial(align_and_apply, update, reused, symmetry),
            "flower": flower,
            "loop": partial(loop_baseline, update, anchor, layers),
        }
        for name, run in runs.items():
            elapsed = timed(run, options.clock) / (REPLIES if name == "flower" else 1)
            if repetition > 0:
                times[name].append(elapsed)
    return times


def status(field: str) -> int:
    """Return one field of ``/proc/self/status`` in bytes, or ``ru_maxrss`` where there
    is none.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if platform.system() == "Darwin" else peak * 1024
    return next(
        int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")
    )


def reset_peak() -> None:
    """Set the high-water mark of the resident set to its present size, where Linux
    allows it.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def memory_child(regime: str, layers: int, drift: float) -> None:
    """Print the peak extra memory of one align and apply, in model sizes."""
    small = initialise(1, 5)
    warm = fedrot.symmetry_of(config(1), small)
    align_and_apply(drifted(small, drift, 6), fedrot.Anchor(small), warm)
    del small
    anchor = initialise(layers, 0)
    update = client(anchor, regime, layers, drift, 1)
    symmetry = fedrot.symmetry_of(config(layers), anchor)
    size = sum(t.numel() * t.element_size() for t in update.values())
    reset_peak()
    before = status("VmRSS")
    aligned = align_and_apply(update, fedrot.Anchor(anchor), symmetry)
    peak = status("VmHWM")
    assert len(aligned) == len(update)
    print((peak - before) / size)


def peak_memory(regime: str, options: argparse.Namespace) -> float:
    """Return the peak extra memory in model sizes, from a process of its own."""
    command = [sys.executable, os.path.abspath(__file__), "--memory-child", regime]
    command += ["--layers", str(options.layers), "--drift", str(options.drift)]
    command += ["--threads", str(options.threads)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(result.stdout.strip().splitlines()[-1])


def ratio(times: dict[str, list[float]], above: str, below: str) -> float:
    """Return the median over the repetitions of one contestant's seconds by
    another's.
    """
    return statistics.median(
        a / b for a, b in zip(times[above], times[below], strict=True)
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return all measurements as plain data."""
    layers = options.layers
    parameters = sum(torch.Size(shape).numel() for shape in shapes(layers).values())
    result: dict[str, Any] = {
        "layers": layers,
        "parameters": parameters,
        "threads": torch.get_num_threads(),
        "repeats": options.repeats,
        "drift": options.drift,
        "clock": options.clock,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "regimes": {},
    }
    for regime in options.regimes:
        times = seconds(regime, options)
        result["regimes"][regime] = {
            "seconds": {
                name: statistics.median(values) for name, values in times.items()
            },
            "faster_than_loop": {a: ratio(times, "loop", a) for a in ("first", "next")},
            "of_flower": {a: ratio(times, a, "flower") for a in ("first", "next")},
            "peak_memory_model_sizes": peak_memory(regime, options),
        }
    return result


def show(result: dict[str, Any], console: Console) -> None:
    """Print the table, and whether the bars (near regime) are met."""
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=f"Aligning one client: {result['layers']} layers, "
        f"{result['parameters'] / 1e6:.0f} M "
        f"parameters, {result['threads']} threads, drift {result['drift']:g}",
    )
    for column in (
        "regime",
        "client",
        "ours",
        "loop",
        "loop/ours",
        "Flower",
        "ours/Flower",
        "memory",
    ):
        text = column in ("regime", "client")
        table.add_column(
            column,
            justify="left" if text else "right",
            no_wrap=True,
            min_width=len(column),
        )
    for regime, row in result["regimes"].items():
        for which in ("first", "next"):
            table.add_row(
                regime,
                which,
                f"{row['seconds'][which]:.2f}",
                f"{row['seconds']['loop']:.2f}",
                f"{row['faster_than_loop'][which]:.1f}",
                f"{row['seconds']['flower']:.2f}",
                f"{row['of_flower'][which]:.2f}",
                f"{row['peak_memory_model_sizes']:.2f}" if which == "first" else "",
            )
    console.print(table)
    console.print(
        f"Medians, in seconds ({result['clock']} clock). client: first of a round (new "
        "anchor) or next (anchor reused). ours: align + apply. Flower: FedAvg per "
        "reply. memory: peak extra, in model sizes."
    )
    near = result["regimes"].get("near")
    if near is None:
        return
    met = {
        f"next clients at least {BARS['loop']:g}x faster than the loop": near[
            "faster_than_loop"
        ]["next"]
        >= BARS["loop"],
        f"next clients at most {BARS['flower']:g}x Flower's time": near["of_flower"][
            "next"
        ]
        <= BARS["flower"],
        f"peak extra memory below {BARS['memory']:g} model sizes": near[
            "peak_memory_model_sizes"
        ]
        < BARS["memory"],
    }
    for bar, ok in met.items():
        console.print(f"{'met   ' if ok else 'MISSED'}  near: {bar}")


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--threads", type=int, default=0, help="torch threads; 0: torch's own choice"
    )
    parser.add_argument(
        "--drift", type=float, default=0.02, help="relative change of the near client"
    )
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: on a busy machine"
    )
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=REGIMES)
    parser.add_argument(
        "--json", type=Path, default=None, help="also write the numbers to this file"
    )
    parser.add_argument(
        "--memory-child", choices=REGIMES, default=None, help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.threads > 0:
        torch.set_num_threads(options.threads)
    if options.memory_child:
        memory_child(options.memory_child, options.layers, options.drift)
        return
    result = measure(options)
    show(result, Console())
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
