"""Speed and memory of aligning one client on a GPU, layer by layer, against the floor.

The floor is a lower bound, the time of moving every byte once at the measured
bandwidths: the copy of the update to the device, or the work on the device (update and
mean read, moved update and mean written). The longer of the two counts, because they
overlap.

Every layer takes a server's path (``fedrot.alignment.by_layer``): the updates are
near the anchor, and are added to a float32 mean on the device, which is the anchor of
all clients but the first. All layers of a model hold the same random numbers, so that
the host holds one layer only. ``first`` and ``next`` are clients from the host's memory
to the mean, with copies and work overlapped; the stages are timed one after the other.
Required packages: torch, rich and fedrot.

    python benchmarks/gpu.py [--device cuda] [--models llama-8b] [--layers N] [--repeats
    3] [--json FILE] python benchmarks/gpu.py --device cpu --models bert-base --layers 2
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import statistics
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fedrot
from fedrot.aggregation import Mean
from fedrot.alignment.by_layer import (
    STACKED,
    align_by_layer,
    copied,
    moved_by_layer,
    parts_of,
)
from fedrot.symmetry.actions import HeadRotation
from fedrot.tensors import check_finite, checked_device

Seconds = dict[str, float]
Model = Mapping[str, Tensor]

#: Updates near the anchor are noise: the benchmark moves them all the same, as the
#: dearest case.
EAGER = fedrot.AlignmentOptions(chance=0)

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
STAGES = ("upload", "finite", "neurons", "heads", "apply", "fold", "download")
DRIFT = 0.02
#: Bytes per copy in the measurement of bandwidth.
COPIED = 2**28
#: Times the floor, pieces' worth of memory, |R^T R - I|, and units in the last place.
BARS = {"floor": 3.0, "memory": 2.0, "orthogonal": 1e-6, "difference": 2.0}


@dataclass(frozen=True)
class Shape:
    """The sizes of a model.

    ``keys`` is the number of key heads: that of query heads in an encoder. ``tied``:
    logits are computed with the embeddings.
    """

    family: str
    layers: int
    width: int
    heads: int
    keys: int
    neurons: int
    vocabulary: int
    tied: bool = True

    def config(self, layers: int) -> dict[str, Any]:
        """Return the part of the configuration that fedrot reads."""
        return {
            "model_type": self.family,
            "num_hidden_layers": layers,
            "hidden_size": self.width,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.keys,
            "intermediate_size": self.neurons,
        }

    def shapes(self, layers: int) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the base model's tensors."""
        return (_llama if self.family == "llama" else _bert)(self, layers)


def _bert(shape: Shape, layers: int) -> dict[str, tuple[int, ...]]:
    width, neurons = shape.width, shape.neurons
    out: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (shape.vocabulary, width),
        "embeddings.position_embeddings.weight": (512, width),
        "embeddings.LayerNorm.weight": (width,),
        "embeddings.LayerNorm.bias": (width,),
    }
    linears = {
        f"attention.self.{part}": (width, width) for part in ("query", "key", "value")
    }
    linears |= {
        "attention.output.dense": (width, width),
        "intermediate.dense": (neurons, width),
        "output.dense": (width, neurons),
    }
    for layer in range(layers):
        for module, size in linears.items():
            out[f"encoder.layer.{layer}.{module}.weight"] = size
            out[f"encoder.layer.{layer}.{module}.bias"] = size[:1]
        for norm in ("attention.output.LayerNorm", "output.LayerNorm"):
            out[f"encoder.layer.{layer}.{norm}.weight"] = (width,)
            out[f"encoder.layer.{layer}.{norm}.bias"] = (width,)
    return out


def _llama(shape: Shape, layers: int) -> dict[str, tuple[int, ...]]:
    width, neurons = shape.width, shape.neurons
    keys = width // shape.heads * shape.keys
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocabulary, width)
    }
    linears = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (neurons, width),
        "mlp.up_proj": (neurons, width),
        "mlp.down_proj": (width, neurons),
    }
    for layer in range(layers):
        for module, size in linears.items():
            out[f"model.layers.{layer}.{module}.weight"] = size
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"model.layers.{layer}.{norm}.weight"] = (width,)
    out["model.norm.weight"] = (width,)
    return out if shape.tied else out | {"lm_head.weight": (shape.vocabulary, width)}


MODELS = {
    "bert-base": Shape("bert", 12, 768, 12, 12, 3072, 30522),
    "roberta-large": Shape("roberta", 24, 1024, 16, 16, 4096, 50265),
    "llama-1b": Shape("llama", 16, 2048, 32, 8, 8192, 128256),
    "llama-8b": Shape("llama", 32, 4096, 32, 8, 14336, 128256, tied=False),
}


class Repeated(Mapping[str, Tensor]):
    """A model whose layers all hold the same random numbers, made when they are first
    asked for.
    """

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, near: Model | None
    ) -> None:
        self._shapes, self._dtype, self._near = shapes, dtype, near
        self._made: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        key = re.sub(r"\.\d+\.", ".", name)
        if key not in self._made:
            generator = torch.Generator().manual_seed(
                zlib.crc32(key.encode()) + (self._near is None)
            )
            made = torch.randn(self._shapes[name], generator=generator).mul_(0.02)
            if self._near is not None:
                made = made.mul_(DRIFT).add_(self._near[name])
            self._made[key] = made.to(self._dtype)
        return self._made[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


class Clock:
    """Adds up the seconds of stages, with events on a GPU and the wall clock
    elsewhere.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: Seconds = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        if self._device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            end.synchronize()
            elapsed = start.elapsed_time(end) / 1000
        else:
            begun = time.perf_counter()
            yield
            elapsed = time.perf_counter() - begun
        self.seconds[stage] = self.seconds.get(stage, 0.0) + elapsed


def bandwidth(source: Tensor, target: Tensor) -> float:
    """Return the bytes per second of copying one tensor to another, the best of
    five.
    """
    found = []
    for _ in range(6):
        clock = Clock(target.device)
        with clock("copy"):
            target.copy_(source, non_blocking=True)
        found.append(source.numel() * source.element_size() / clock.seconds["copy"])
    return max(found[1:])


def bandwidths(device: torch.device, size: int) -> dict[str, float]:
    """Return bytes per second from pinned memory to the device, and read plus written
    on the device.
    """
    host = torch.ones(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    here, there = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    return {"host": bandwidth(host, here), "device": 2 * bandwidth(here, there)}


def staged(
    update: Model,
    anchor: Model,
    symmetry: fedrot.Symmetry,
    device: torch.device,
    repeats: int,
) -> Seconds:
    """Return the median seconds of each stage, for a client that is not the first of a
    round.
    """
    parts, reused, found = parts_of(symmetry), fedrot.Anchor(anchor), []
    means = [Mean() for _ in parts]
    for _ in range(repeats + 1):
        clock = Clock(device)
        with clock("upload"):
            for _ in copied(
                [[(update, name) for name in part.shapes] for part in parts], device
            ):
                pass
        for part, mean in zip(parts, means, strict=True):
            ours, theirs = (
                {n: model[n].to(device) for n in part.shapes}
                for model in (update, anchor)
            )
            with clock("finite"):
                check_finite(ours)
            for stage, kind in (("neurons", "ffn"), ("heads", "attention")):
                options = replace(EAGER, parts=(kind,))
                with clock(stage):
                    alignment = fedrot.align(
                        ours, replace(reused, tensors=theirs), part, options
                    )
                with clock("apply"):
                    ours = alignment.apply(ours)
            with clock("fold"):
                mean.fold(ours, 1.0)
        with clock("download"):
            for mean in means:
                mean.result("cpu")
        found.append(clock.seconds)
    return {
        stage: statistics.median(seconds[stage] for seconds in found[1:])
        for stage in STAGES
    }


def clients(
    update: Model,
    anchor: Model,
    symmetry: fedrot.Symmetry,
    device: torch.device,
    repeats: int,
) -> tuple[float, list[float], int | None]:
    """Return the seconds of a round's first client, of others, and the most bytes
    beside the mean.
    """
    mean, to, seconds = Mean(), fedrot.Anchor(anchor), []
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(repeats + 1):
        clock, before = Clock(device), mean.weight
        with clock("client"):
            parts, _, _ = moved_by_layer(update, to, symmetry, EAGER, device)
            mean.fold_parts(parts, 1.0)
        to = to.towards_last(mean.current, 1 - before / mean.weight)
        seconds.append(clock.seconds["client"])
    if device.type != "cuda":
        return seconds[0], seconds[1:], None
    held = sum(t.numel() * t.element_size() for t in mean.current.values())
    return seconds[0], seconds[1:], torch.cuda.max_memory_allocated(device) - held


def errors(
    update: Model,
    anchor: Model,
    symmetry: fedrot.Symmetry,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, float]:
    """Return how far a layer's rotations are from orthogonal, and its tensors from the
    CPU's.

    The latter in units in the last place of the largest entry.
    """
    part = next(part for part in parts_of(symmetry) if part.groups)
    ours, theirs = (
        {name: model[name] for name in part.shapes} for model in (update, anchor)
    )
    (wanted,), (found,) = (
        list(align_by_layer(ours, theirs, part, EAGER, where))
        for where in ("cpu", device)
    )
    orthogonal = 0.0
    for move in found.alignment.moves:
        if isinstance(move.group.action, HeadRotation):
            gram = move.element.double() @ move.element.double().mT
            eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
            orthogonal = max(orthogonal, float((gram - eye).abs().max()))
    apart = 0.0
    for name, tensor in wanted.tensors.items():
        other, here = found.tensors[name].cpu().double(), tensor.double()
        unit = torch.finfo(dtype).eps * float(here.abs().max())
        apart = max(apart, float((other - here).abs().max()) / unit)
    return {"orthogonal": orthogonal, "difference": apart}


def measure(
    name: str, options: argparse.Namespace, speed: Mapping[str, float]
) -> dict[str, Any]:
    """Return all measurements of one model as plain data."""
    shape, device, dtype = MODELS[name], options.device, DTYPES[options.dtype]
    layers = options.layers or shape.layers

    def models(layers: int) -> tuple[Model, Model, fedrot.Symmetry]:
        shapes = shape.shapes(layers)
        anchor = Repeated(shapes, dtype, None)
        update = Repeated(shapes, dtype, anchor)
        return update, anchor, fedrot.symmetry_of(shape.config(layers), shapes)

    update, anchor, symmetry = given = models(layers)
    sizes = {n: math.prod(s) for n, s in symmetry.shapes.items()}
    moving = {
        s.tensor for part in parts_of(symmetry) for g in part.groups for s in g.slots
    }
    parameters, moved = sum(sizes.values()), sum(sizes[n] for n in moving)
    for tensors in (update, anchor):
        check_finite(tensors)  # and made, before anything is timed
    first, later, held = clients(*given, device, options.repeats)
    # As many layers as are moved together.
    stacked = max(1, min(layers, STACKED * layers // sum(sizes[n] for n in moving)))
    _, _, alone = clients(*models(stacked), device, 0)
    # Read: update and mean; written: moved update and mean.
    traffic = dtype.itemsize * (parameters + moved) + 4 * 2 * parameters
    floor = max(dtype.itemsize * parameters / speed["host"], traffic / speed["device"])
    following = statistics.median(later)
    return {
        "layers": layers,
        "parameters": parameters,
        "first": first,
        "next": following,
        "stages": staged(*given, device, options.repeats),
        "floor": floor,
        "of_floor": following / floor,
        "uploaded_per_second": dtype.itemsize * parameters / following,
        "moved_per_second": traffic / following,
        "held_beside_mean": held,
        "held_by_one_piece": alone,
        **errors(*given, device, dtype),
    }


def bars(row: dict[str, Any]) -> dict[str, bool]:
    """Return the limits for one model and whether they hold; speed and memory count on
    a GPU only.
    """
    found = {
        f"rotations orthogonal to {BARS['orthogonal']:g}": row["orthogonal"]
        <= BARS["orthogonal"],
        f"within {BARS['difference']:g} units in the last place of the CPU": row[
            "difference"
        ]
        <= BARS["difference"],
    }
    if row["held_beside_mean"] is not None:
        found[f"at most {BARS['floor']:g}x the floor"] = (
            row["of_floor"] <= BARS["floor"]
        )
        name = f"beside the mean at most {BARS['memory']:g}x what one piece takes"
        found[name] = (
            row["held_beside_mean"] <= BARS["memory"] * row["held_by_one_piece"]
        )
    return found


def show(result: dict[str, Any], console: Console) -> None:
    """Print the table, and whether the bars are met."""
    speed = result["bytes_per_second"]
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=(
            f"Aligning one client on {result['card']}, {result['dtype']}, drift "
            f"{DRIFT:g}"
        ),
    )
    table.add_column("model", no_wrap=True)
    for column in (
        "layers",
        "first",
        "next",
        *STAGES,
        "floor",
        "next/floor",
        "GB/s",
        "memory",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in result["models"].items():
        held = row["held_beside_mean"]
        table.add_row(
            name,
            str(row["layers"]),
            *(f"{row[which]:.3f}" for which in ("first", "next")),
            *(f"{row['stages'][stage]:.3f}" for stage in STAGES),
            f"{row['floor']:.3f}",
            f"{row['of_floor']:.1f}",
            f"{row['moved_per_second'] / 1e9:.1f}",
            "" if held is None else f"{held / 2**30:.2f}",
        )
    console.print(table)
    console.print(
        f"Seconds, medians of {result['repeats']}. first, next: clients of a round, "
        "from the host's memory to the mean. neurons: certificate. heads: cross "
        "matrices and polar factors. download: the mean, once a round. floor: every "
        f"byte moved once, {speed['host'] / 1e9:.1f} GB/s from the host, "
        f"{speed['device'] / 1e9:.1f} GB/s on the device. GB/s: read and written on "
        "the device by next. memory: GiB beside the mean at most."
    )
    for name, row in result["models"].items():
        for bar, met in bars(row).items():
            console.print(f"{'met   ' if met else 'MISSED'}  {name}: {bar}")


def card(device: torch.device) -> str:
    """Return the name of the processor or GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return (
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} "
        "threads"
    )


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument(
        "--layers", type=int, default=0, help="cut the models; 0: all they have"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--json", type=Path, default=None, help="also write the numbers to this file"
    )
    options = parser.parse_args()
    if options.repeats < 1 or options.layers < 0:
        parser.error("--repeats takes 1 or more, --layers 0 or more")
    try:
        options.device = checked_device(options.device)
    except fedrot.FedrotError as error:
        parser.error(str(error))
    speed = bandwidths(options.device, COPIED)
    result = {
        "card": card(options.device),
        "device": options.device.type,
        "dtype": options.dtype,
        "repeats": options.repeats,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "cuda": torch.version.cuda,
        "bytes_per_second": speed,
        "models": {name: measure(name, options, speed) for name in options.models},
    }
    show(result, Console(width=200))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
