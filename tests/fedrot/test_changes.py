"""Packed changes turn one model into another, bit for bit."""

import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedrot.changes import packed_change, with_change
from fedrot.tensors import same_bits

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.bool,
)
SHAPES = ((), (0, 3), (1,), (5, 7), (2, 3, 4))


def drawn(dtype, shape, generator):
    """Return random bits, infinities and NaN among them."""
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    size = torch.empty((), dtype=dtype).element_size()
    flat = torch.empty(shape, dtype=dtype).numel()
    bits = torch.randint(0, 256, (flat * size,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).reshape(shape)


@given(seed=st.integers(0, 2**32), kept=st.sets(st.integers(0, len(SHAPES) - 1)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_new_model_comes_back_bit_for_bit(dtype, seed, kept):
    generator = torch.Generator().manual_seed(seed)
    old = {f"{shape}": drawn(dtype, shape, generator) for shape in SHAPES}
    new = {
        name: tensor if place in kept else drawn(dtype, tensor.shape, generator)
        for place, (name, tensor) in enumerate(old.items())
    }
    change = packed_change(old, new)
    assert {*change} == {n for n in old if not same_bits(old[n], new[n])}
    found = with_change(old, change)
    assert list(found) == list(new)
    for name, tensor in new.items():
        assert found[name].shape == tensor.shape
        assert same_bits(found[name], tensor)


def test_views_and_transposed_tensors_have_the_bits_of_their_values():
    old = torch.arange(12.0).reshape(3, 4)
    new = {"a": (old + 1).T, "b": old[:, 1:] * 2}
    change = packed_change({"a": old.T, "b": old[:, 1:]}, new)
    found = with_change({"a": old.T, "b": old[:, 1:]}, change)
    assert all(torch.equal(found[name], new[name]) for name in new)


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 0.55), (torch.bfloat16, 0.1)]
)
def test_near_models_are_packed_into_few_bytes(dtype, most):
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(300, 100, generator=generator, dtype=torch.float64)
    factor = 1 + 1e-3 * torch.randn(old.shape, generator=generator, dtype=old.dtype)
    change = packed_change({"a": old.to(dtype)}, {"a": (old * factor).to(dtype)})
    size = torch.empty((), dtype=dtype).element_size()
    assert change["a"].dtype == torch.uint8
    assert len(change["a"]) < most * old.numel() * size


def test_damaged_changes_and_those_of_other_shapes_raise():
    old, new = {"a": torch.zeros(3)}, {"a": torch.ones(3)}
    change = packed_change(old, new)
    damaged = {"a": change["a"].clone()}
    damaged["a"][-1] ^= 1
    with pytest.raises(zlib.error):
        with_change(old, damaged)
    with pytest.raises(ValueError, match="shape"):
        with_change({"a": torch.zeros(4)}, change)
