"""Groups of the usual transformer blocks; a family lists its module names and calls these."""

from __future__ import annotations

from fedrot.symmetry.description import Group, Slot
from fedrot.symmetry.kinds import HeadPermutation, HeadRotation, Permutation, Rescale


def attention(
    layer: int, prefix: str, query: str, key: str, value: str, output: str, heads: int, dim: int
) -> tuple[Group, ...]:
    """Return the groups of one multi-head attention block without rotary positions.

    Module names are relative to ``prefix``; every module is a ``Linear`` with bias. The heads of all
    four modules are permuted together; query and key share one rotation and one scale per head,
    value and output another (Zhang et al. 2025, Eq. 5, 8-11; Verma & Elbayad 2024, section 3.2).
    """
    width = heads * dim

    def rows(module: str, contravariant: bool = False) -> tuple[Slot, ...]:
        return tuple(
            Slot(f"{prefix}{module}.{leaf}", 0, 0, width, contravariant) for leaf in ("weight", "bias")
        )

    # The key undoes what the query does, the output projection what the value does.
    query_key = rows(query) + rows(key, contravariant=True)
    value_output = (*rows(value), Slot(f"{prefix}{output}.weight", 1, 0, width, contravariant=True))
    name = f"{prefix}heads"
    rotation, scale = HeadRotation(heads, dim), Rescale(heads)
    return (
        Group(name, layer, "heads", HeadPermutation(heads), query_key + value_output),
        Group(f"{prefix}qk", layer, "attention", rotation, query_key, within=name),
        Group(f"{prefix}vo", layer, "attention", rotation, value_output, within=name),
        Group(f"{prefix}qk.scale", layer, "rescale", scale, query_key, within=name),
        Group(f"{prefix}vo.scale", layer, "rescale", scale, value_output, within=name),
    )


def feed_forward(layer: int, prefix: str, up: str, down: str, neurons: int) -> tuple[Group, ...]:
    """Return the neuron permutation of one feed-forward block with an elementwise activation.

    Source: Zhang et al. 2025, Eq. 6-7.
    """
    slots = (
        Slot(f"{prefix}{up}.weight", 0, 0, neurons),
        Slot(f"{prefix}{up}.bias", 0, 0, neurons),
        Slot(f"{prefix}{down}.weight", 1, 0, neurons),
    )
    return (Group(f"{prefix}ffn", layer, "ffn", Permutation(neurons), slots),)
