"""Speed and memory of averaging LoRA adapters by products, against PEFT's
``add_weighted_adapter``.

Ours is timed on all linear layers of a LLaMA 3.2 1B shape. Each adapter is drawn before
it is added, and drawing is not timed. PEFT forms dense updates and takes their SVD, so
both are compared on one layer, with the same adapters in the same run; so are the other
methods, against a mean of all tensors as FedAvg computes it. Memory is the high-water
mark of the resident set above that before, in units of one adapter, less what the sums
keep. It is measured in a process of its own whose allocator returns what is freed: the
client's adapter, the means of the factors, and copies.

    python benchmarks/lora.py [--clients 50] [--rank 16] [--layers 16] [--json FILE]
    LORA_SHAPE=7b python benchmarks/lora.py --layers 32
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import peft
import torch
from align import reset_peak, status
from rich.console import Console
from torch import Tensor, nn

from fedrot.lora import AdapterOptions, AdapterUpdate, LoraSettings, average_adapters
from fedrot.lora.module_sums import KEPT_RANKS

sys.path.append(str(Path(__file__).parent.parent))
from reproductions.lora_rivals import RivalOptions


def linear_layers(width: int, keys: int, inner: int) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of the linear layers of one block."""
    return {
        "q_proj": (width, width),
        "k_proj": (width, keys),
        "v_proj": (width, keys),
        "o_proj": (width, width),
        "gate_proj": (width, inner),
        "up_proj": (width, inner),
        "down_proj": (inner, width),
    }


#: LLaMA 3.2 1B, and with LORA_SHAPE=7b in the environment LLaMA 2 7B (32 layers).
SHAPES = linear_layers(2048, 512, 8192)
if os.environ.get("LORA_SHAPE") == "7b":
    SHAPES = linear_layers(4096, 4096, 11008)
SETTINGS = LoraSettings(alpha=32)
#: Methods that are timed on one layer.
METHODS = {
    "mean": AdapterOptions("mean"),
    "rotate": RivalOptions("rotate"),
    "exact, none": AdapterOptions("exact", gauge="none"),
    "exact, keep-a": AdapterOptions("exact", gauge="keep-a"),
    "mean, fold": RivalOptions("mean", residual="fold"),
    "stack, fold": RivalOptions("stack", residual="fold"),
}
#: Limits: seconds, adapters beside the sums, and how many times faster than PEFT.
BARS = {"seconds": 10.0, "adapters": 2.0, "speed-up": 10.0}


def adapter(seed: int, rank: int, layers: int) -> dict[str, Tensor]:
    """Return a random adapter of all linear layers, near a common start as after a
    round.
    """
    start, own = (
        torch.Generator().manual_seed(0),
        torch.Generator().manual_seed(seed + 1),
    )
    found = {}
    for layer in range(layers):
        for name, (width, outputs) in SHAPES.items():
            for half, shape in (("A", (rank, width)), ("B", (outputs, rank))):
                tensor = torch.randn(shape, generator=start)
                tensor += 0.5 * torch.randn(shape, generator=own)
                found[f"base_model.model.layers.{layer}.{name}.lora_{half}.weight"] = (
                    tensor
                )
    return found


def warm_up(rank: int) -> None:
    """Average adapters of one layer, so many that a sum is full: loads libraries and
    their buffers.
    """
    few = (
        AdapterUpdate(adapter(n, rank, 1), 1.0, SETTINGS)
        for n in range(2 * KEPT_RANKS + 1)
    )
    average_adapters(few, SETTINGS, AdapterOptions("exact"))


def ours(
    clients: int,
    rank: int,
    layers: int,
    options: AdapterOptions = METHODS["exact, keep-a"],
) -> tuple[float, float, float]:
    """Return seconds, memory in adapters beside the sums, and the share that was
    lost.
    """
    seconds, average = 0.0, options.average(SETTINGS)
    size = sum(t.nbytes for t in adapter(0, rank, layers).values())
    warm_up(rank)
    reset_peak()
    before = status("VmRSS")
    for client in range(clients):
        update = AdapterUpdate(adapter(client, rank, layers), 1.0, SETTINGS)
        start = time.perf_counter()
        average.add(update)
        seconds += time.perf_counter() - start
        del update  # FedRotLoRA keeps none either.
    start = time.perf_counter()
    _, report = average.result()
    seconds += time.perf_counter() - start
    # A sum is full at twice the ranks that it keeps; means of the factors take one
    # adapter.
    beside = (status("VmHWM") - before) / size - 2 * KEPT_RANKS
    return seconds, beside, max(report.lost.values())


def fedavg(clients: int, rank: int, layers: int) -> float:
    """Return the seconds of a mean of all tensors."""
    seconds, mean = 0.0, {}
    for client in range(clients):
        update = adapter(client, rank, layers)
        start = time.perf_counter()
        for name, tensor in update.items():
            mean[name] = mean.get(name, 0) + tensor / clients
        seconds += time.perf_counter() - start
    return seconds


class Block(nn.Module):
    """The linear layers of one block."""

    def __init__(self) -> None:
        super().__init__()
        block = {name: nn.Linear(*shape, bias=False) for name, shape in SHAPES.items()}
        self.layers = nn.ModuleList([nn.ModuleDict(block)])


def theirs(clients: int, rank: int) -> float:
    """Return the seconds of PEFT on one block."""
    config = peft.LoraConfig(
        r=rank, lora_alpha=int(SETTINGS.alpha), target_modules=list(SHAPES)
    )
    model = peft.get_peft_model(Block(), config, adapter_name="0")
    for client in range(clients):
        if client:
            model.add_adapter(str(client), config)
        peft.set_peft_model_state_dict(
            model, adapter(client, rank, 1), adapter_name=str(client)
        )
    names = [str(client) for client in range(clients)]
    start = time.perf_counter()
    model.add_weighted_adapter(
        names, [1 / clients] * clients, "merged", combination_type="svd", svd_rank=rank
    )
    return time.perf_counter() - start


def memory(clients: int, rank: int, layers: int) -> float:
    """Return the memory in adapters beside the sums, with an allocator that keeps
    nothing.
    """
    script = "import sys, lora; print(lora.ours(*map(int, sys.argv[1:]))[1])"
    returns = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", script, *map(str, (clients, rank, layers))]
    found = subprocess.run(
        command,
        env=os.environ | returns,
        cwd=Path(__file__).parent,
        check=True,
        capture_output=True,
    )
    return float(found.stdout)


def main() -> None:
    """Measure, print, and compare with the limits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    seconds, _, lost = ours(given.clients, given.rank, given.layers)
    adapters = memory(given.clients, given.rank, given.layers)
    methods = {
        name: ours(given.clients, given.rank, 1, how)[0]
        for name, how in METHODS.items()
    }
    methods["FedAvg"] = fedavg(given.clients, given.rank, 1)
    one, peer = methods["exact, keep-a"], theirs(given.clients, given.rank)
    found = {"seconds": seconds, "adapters": adapters, "speed-up": peer / one}
    print_ = Console(highlight=False).print
    print_(
        f"{given.clients} adapters of rank {given.rank}, {given.layers} layers of "
        f"width {SHAPES['q_proj'][0]}"
    )
    print_(
        f"all layers: {seconds:.1f} s, {adapters:.1f} adapters beside the sums; lost "
        f"{lost:.1e}"
    )
    print_(
        f"one layer: {one:.2f} s, PEFT's svd {peer:.2f} s: {peer / one:.1f} times as "
        "long"
    )
    for name, of_method in methods.items():
        print_(f"one layer, {name}: {of_method:.3f} s")
    for name, bar in BARS.items():
        met = found[name] >= bar if name == "speed-up" else found[name] <= bar
        print_(f"{name}: {found[name]:.2f}, bar {bar:g}: {'met' if met else 'missed'}")
    if given.json:
        rows = {**found, "lost": lost, "clients": given.clients, "one layer": methods}
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
