"""Time and memory to match the residual stream of a large LLaMA by weights.

Two models of random weights in the shape of LLaMA 3.2 1B (width 2,048, 16 layers,
128,256 tokens, tables of their own) are matched in the part ``residual`` alone. Printed
are seconds, and the largest memory of the process in sizes of one model, both models
included.

    python benchmarks/stream.py [--dtype bfloat16] [--layers 16] [--folded]
"""

from __future__ import annotations

import argparse
import resource
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fedrot


def main() -> None:
    """Match and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--folded", action="store_true", help="all gains are 1 already")
    options = parser.parse_args()
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=options.layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        shapes = {
            name: tensor.shape
            for name, tensor in LlamaForCausalLM(config).state_dict().items()
        }
    dtype = getattr(torch, options.dtype)
    models = []
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        models.append(
            {n: _drawn(s, generator, dtype, options.folded) for n, s in shapes.items()}
        )
    size = sum(tensor.numel() * tensor.element_size() for tensor in models[0].values())
    symmetry = fedrot.symmetry_of(config, models[0])
    start = time.perf_counter()
    found = fedrot.align(
        models[1], models[0], symmetry, fedrot.AlignmentOptions(("residual",))
    )
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    left = found.report.after / found.report.before
    print(
        f"{size / 2**30:.1f} GiB a model, {torch.get_num_threads()} threads: "
        f"{seconds:.0f} s, at most {peak / size:.2f} model sizes; {left:.3f} of the "
        "distance left"
    )


def _drawn(
    shape: torch.Size, generator: torch.Generator, dtype: torch.dtype, folded: bool
) -> torch.Tensor:
    if len(shape) == 1:
        gain = torch.ones(shape)
        return (
            gain if folded else gain + 0.1 * torch.randn(shape, generator=generator)
        ).to(dtype)
    # One row at a time would be slow, all at once would take float32 memory for a
    # half-precision model.
    rows = [
        0.02 * torch.randn(part, generator=generator).to(dtype)
        for part in _parts(shape)
    ]
    return torch.cat(rows)


def _parts(shape: torch.Size, rows: int = 8192) -> list[tuple[int, ...]]:
    return [
        (min(rows, shape[0] - start), *shape[1:]) for start in range(0, shape[0], rows)
    ]


if __name__ == "__main__":
    main()
