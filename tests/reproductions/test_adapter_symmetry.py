"""Adapters as models with rotations: everything that aligns models aligns them."""

from __future__ import annotations

from dataclasses import replace

import peft
import pytest
import torch
from flwr.app import ArrayRecord

import fedrot
from fedrot.errors import SymmetryError, UpdateError
from fedrot.lora import adapter_tensors, load_adapter
from fedrot.strategies import FedRot
from reproductions.adapter_symmetry import adapter_symmetry
from reproductions.lora_rivals import RivalOptions
from tests.fedrot.lora.test_averaging import IN, MODULES, adapter, drawing, pair
from tests.fedrot.lora.test_peft import SETTINGS, outputs
from tests.models import largest_difference
from tests.reproductions.test_lora_rivals import averaged
from tests.strategies.fakes import grid_of, reply
from tests.strategies.test_lora import floats

#: The adapters of these tests are too small for a test against chance.
EVERYTHING = fedrot.AlignmentOptions(parts=("adapters",), chance=0)


@pytest.mark.parametrize("kind", SETTINGS)
def test_rotations_do_not_change_the_function(kind):
    build, options = SETTINGS[kind]
    torch.manual_seed(0)
    model = peft.get_peft_model(build(), peft.LoraConfig(r=4, lora_alpha=6, **options))
    model = model.double().eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    before = outputs(model)
    tensors = adapter_tensors(model)
    symmetry = adapter_symmetry(tensors)
    turned = fedrot.random_equivalent(tensors, symmetry, seed=1, parts=("adapters",))
    assert largest_difference(turned, tensors) > 0.1
    load_adapter(model, turned)
    assert torch.allclose(outputs(model), before, atol=1e-10)
    # The way back is found.
    alignment = fedrot.align(turned, tensors, symmetry, EVERYTHING)
    assert largest_difference(alignment.apply(turned), tensors) < 1e-9


def test_alignment_is_the_rotation_by_both_factors():
    start = adapter(0)
    given = adapter(1)
    found = fedrot.align(given, start, adapter_symmetry(start), EVERYTHING).apply(given)
    expected = averaged([given], RivalOptions("rotate"), start)
    assert largest_difference(found, expected) < 1e-9


def test_evidence_decides():
    """Noise around the received adapter turns nothing; a client that has turned is
    turned back.
    """
    drawn = drawing(6)
    start = pair(drawing(5), width=64, outputs=48)
    noisy = {name: t + 0.2 * drawn(*t.shape) for name, t in start.items()}
    symmetry = adapter_symmetry(start)
    turned = fedrot.random_equivalent(noisy, symmetry, seed=1, parts=("adapters",))
    options = fedrot.AlignmentOptions(parts=("adapters",))
    for update, moved in ((noisy, 0), (turned, 1)):
        alignment = fedrot.align(update, start, symmetry, options)
        (group,) = alignment.report.groups
        assert group.moved == moved
        if not moved:
            assert all(
                alignment.apply(update)[n] is tensor for n, tensor in update.items()
            )


def turning(index):
    """Return a node that sends what it received, moved by a little and rotated."""

    def train(message):
        (received,) = message.content.array_records.values()
        start = received.to_torch_state_dict()
        step = floats(adapter(index))
        near = {name: start[name] + 0.01 * step[name] for name in start}
        symmetry = adapter_symmetry(near)
        sent = fedrot.random_equivalent(near, symmetry, seed=index, parts=("adapters",))
        return reply(message, sent, 10, index)

    return train


def test_the_server_aligns_adapters():
    """Updates are averaged as before they were rotated."""
    start = floats(adapter(9))
    steps = [floats(adapter(i)) for i in range(3)]
    mean = {n: t + 0.01 * sum(step[n] for step in steps) / 3 for n, t in start.items()}
    strategy = FedRot(
        adapter_symmetry(start),
        alignment=replace(EVERYTHING, anchor="global"),
        fraction_evaluate=0.0,
    )
    plain = FedRot(alignment=None, fraction_evaluate=0.0)
    aligned, turned = (
        each.start(grid_of(map(turning, range(3))), ArrayRecord(start), 1)
        for each in (strategy, plain)
    )
    assert largest_difference(aligned.arrays.to_torch_state_dict(), mean) < 1e-2
    assert largest_difference(turned.arrays.to_torch_state_dict(), mean) > 0.3


def test_factors_need_a_common_rank():
    module = next(iter(MODULES))
    with pytest.raises(UpdateError, match="have no common rank"):
        adapter_symmetry(
            {f"{module}.lora_A.weight": (3, IN), f"{module}.lora_B.weight": (7, 2)}
        )


def test_options_of_whole_models_are_refused_before_clients_train():
    start = adapter(0)
    symmetry = adapter_symmetry(start)
    said = r"these are LoRA adapters\. Write AlignmentOptions\(parts=\('adapters',\)\)"
    with pytest.raises(SymmetryError, match=said):
        fedrot.align(adapter(1), start, symmetry)
    grid = grid_of(map(turning, range(3)))
    with pytest.raises(SymmetryError, match=said):
        FedRot(symmetry).start(grid, ArrayRecord(floats(start)), 1)
    assert not grid.asked
