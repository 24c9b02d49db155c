"""Layer by layer: the same alignment and mean as at once, two layers on the device at a
time.
"""

import math
import threading
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
import transformers

from fedrot import (
    AlignmentOptions,
    FedrotError,
    UpdateError,
    align,
    align_round,
    symmetry_of,
)
from fedrot.aggregation import Mean
from fedrot.alignment import by_layer
from fedrot.alignment.by_layer import (
    align_by_layer,
    merged_report,
    moved_by_layer,
    parts_of,
)
from fedrot.matching import descent
from fedrot.symmetry.groups import Move, apply_moves
from fedrot.tensors import checked_device
from tests.families import KINDS, symmetry_for
from tests.fedrot.oracles import seeded
from tests.fedrot.pairs import OPTIONS, beside, movable_options
from tests.fedrot.pretend import DEVICE, Pretend
from tests.models import (
    EAGER,
    align_tensors,
    cast,
    largest_difference,
    tensors_of,
)

CPU = torch.device("cpu")
PLACES = {"cpu": CPU, "device": DEVICE}
NEURONS = 96


def fold_by_layer(mean, update, weight, *how, **more):
    """Align an update layer by layer while it is added to a mean, as a round does."""
    parts, statistics, report = moved_by_layer(update, *how, **more)
    mean.check(update, weight, statistics)
    mean.fold_parts(parts, weight, statistics)
    return report()


@pytest.fixture(autouse=True)
def a_piece_per_layer(monkeypatch):
    """Layers as small as these would be stacked to one piece."""
    monkeypatch.setattr(by_layer, "STACKED", 0)


#: Options of families here, with those of all tests of families.
MORE = {
    **OPTIONS,
    "last": AlignmentOptions(layers="last:1", chance=0),
    "nothing": AlignmentOptions(parts=()),
}


def sizes_of(parts):
    return [sum(map(math.prod, part.shapes.values())) for part in parts]


def with_groups(parts):
    return [part for part in parts if part.groups]


@pytest.mark.parametrize("which", MORE)
@pytest.mark.parametrize("family", KINDS)
def test_parts_share_nothing_and_leave_nothing_out(family, which):
    symmetry = symmetry_for(family)
    options = movable_options(MORE[which], family)
    parts = parts_of(symmetry, options)
    assert sorted(n for part in parts for n in part.shapes) == sorted(symmetry.shapes)
    groups = {group.name for part in parts for group in part.groups}
    layers = options.layer_indices(symmetry.layers)
    chosen = symmetry.select(options.parts, layers)
    assert groups == {group.name for group in chosen}
    assert sum(len(part.groups) for part in parts) == len(chosen)
    assert bool(groups) == (which != "nothing")
    for part in parts:
        assert tensors_of(part.groups) <= part.shapes.keys()
        layers = options.layer_indices(part.layers)
        assert part.select(options.parts, layers) == part.groups


def test_a_layer_is_a_part_and_packets_are_no_larger_unless_a_single_tensor_is():
    """Of eight layers one moves; all others come in packets, and large embeddings come
    alone.
    """
    symmetry = symmetry_for("llama")
    parts = parts_of(symmetry)
    layers = with_groups(parts)
    assert [{group.layer for group in part.groups} for part in layers] == [{0}, {1}]
    assert max(sizes_of(parts)) == sizes_of(layers)[0]
    options = movable_options(MORE["whole"], "llama")
    (whole, *_) = parts_of(symmetry, options)
    assert whole.groups == symmetry.rotated.select(options.parts)

    symmetry = llama(8)
    options = AlignmentOptions(layers=[3])
    parts = parts_of(symmetry, options)
    (layer,) = sizes_of(with_groups(parts))
    packets = sizes_of(part for part in parts if not part.groups)
    assert math.prod(symmetry.shapes["lm_head.weight"]) < layer
    assert len(packets) >= 7
    assert max(packets) <= layer
    # They are filled: two in a row would not fit into one.
    assert all(one + other > layer for one, other in pairwise(packets))
    nothing = parts_of(symmetry, AlignmentOptions(parts=()))
    assert [[*part.shapes] for part in nothing] == [[name] for name in symmetry.shapes]
    large = {**symmetry.shapes, "lm_head.weight": (1000, 32)}
    parts = parts_of(replace(symmetry, shapes=large), options)
    assert ["lm_head.weight"] in [[*part.shapes] for part in parts]


FAMILIES = ("bert", "gpt2", "llama", "t5", "albert", "clip")


@pytest.mark.parametrize(
    ("family", "which", "where"),
    [
        (
            FAMILIES[(step + 2 * index) % len(FAMILIES)],
            which,
            ("cpu", "device")[(step + index) % 2],
        )
        for index, which in enumerate(MORE)
        for step in range(3)
    ],
)
def test_the_parts_together_are_the_whole(family, which, where, monkeypatch):
    """On the CPU, what does not move is not copied."""
    # More passes add up more rounding, which differs between the two ways.
    monkeypatch.setattr(descent, "SWEEPS", 2)
    symmetry = symmetry_for(family)
    anchor, client = beside(family, 0.5)
    options = movable_options(MORE[which], family)
    alignment = align(client, anchor, symmetry, options)
    expected = alignment.apply(client)
    moved = {}
    reports = []
    with Pretend():
        for part in align_by_layer(client, anchor, symmetry, options, PLACES[where]):
            reports.append(part.alignment.report)
            for name, tensor in part.tensors.items():
                assert tensor.device == PLACES[where]
                moved[name] = tensor.cpu()
                if where == "cpu" and expected[name] is client[name]:
                    assert tensor.data_ptr() == client[name].data_ptr()
    assert largest_difference(moved, expected) <= 1e-6
    assert all(tensor.dtype == client[name].dtype for name, tensor in moved.items())
    report = merged_report(reports, symmetry)
    wanted = alignment.report
    slack = 1e-6 * wanted.before
    assert report.before == pytest.approx(wanted.before, rel=1e-6)
    assert report.after == pytest.approx(wanted.after, rel=1e-6, abs=slack)
    assert report.seconds == sum(each.seconds for each in reports)
    assert bool(report.groups) == (which != "nothing")
    for row, other in zip(report.groups, wanted.groups, strict=True):
        for name in ("group", "moved", "of", "certified"):
            assert getattr(row, name) == getattr(other, name)
        assert row.after == pytest.approx(other.after, rel=1e-5, abs=slack)


@pytest.mark.parametrize(("more", "stacked"), [(0, [2, 2, 2, 2]), (-1, [1] * 8)])
def test_small_layers_are_stacked(more, stacked, monkeypatch):
    symmetry = llama(8)
    size = sizes_of(with_groups(parts_of(symmetry)))[0]
    monkeypatch.setattr(by_layer, "STACKED", 2 * size + more)
    parts = with_groups(parts_of(symmetry))
    assert [len({group.layer for group in part.groups}) for part in parts] == stacked


@pytest.mark.parametrize("where", PLACES)
def test_a_mean_folded_by_layer_is_that_of_a_round(where):
    """With the running mean as anchor, which lies on the device already."""
    symmetry = symmetry_for("llama")
    broadcast, client = beside("llama", 0.5)
    clients = [
        ({name: share * tensor for name, tensor in client.items()}, weight)
        for share, weight in ((1.0, 3.0), (0.9, 1.0), (1.1, 2.0))
    ]
    wanted = Mean()
    mean = Mean()
    for result in align_round(clients, broadcast, symmetry):
        wanted.add(result.tensors, result.weight)
    how = (symmetry, None, PLACES[where])
    with Pretend() as device:
        for client, weight in clients:
            anchor = mean.current or broadcast
            device.uploads = 0
            report = fold_by_layer(mean, client, weight, anchor, *how)
            assert report.after <= report.before
            if where == "device" and anchor is not broadcast:
                # One packet for each part of the client; of the anchor nothing.
                assert device.uploads == len(parts_of(symmetry))
        assert {t.device for t in mean.current.values()} == {PLACES[where]}
        found = mean.result("cpu")
    assert mean.weight == 6
    assert largest_difference(found, wanted.result()) <= 1e-6


@pytest.mark.parametrize("where", PLACES)
def test_statistics_of_what_moves_move_with_it_whatever_comes_beside_them(
    where,
):
    """Rows of a feed-forward that a client has not trained change places; what else it
    sends stays.
    """
    symmetry = symmetry_for("llama")
    anchor, client = beside("llama", 0.5)
    neurons, labels = "model.layers.0.mlp.up_proj.weight", "lm_head.weight"
    (group,) = symmetry.select(("ffn",), (0,))
    units = torch.arange(group.action.units)
    moved = cast(apply_moves(client, [Move(group, units.roll(1) + 1)]), torch.float32)
    trained = units < 3
    statistics = {
        "trained": {neurons: trained},
        "fisher": {labels: torch.ones(symmetry.shapes[labels])},
    }
    alignment = align(moved, anchor, symmetry)
    wanted = Mean()
    mean = Mean()
    wanted.add(anchor, 1.0)
    wanted.add(alignment.apply(moved), 3.0, alignment.transport(statistics))
    how = (anchor, symmetry, None, PLACES[where])
    with Pretend():
        fold_by_layer(mean, anchor, 1.0, *how)
        fold_by_layer(mean, moved, 3.0, *how, statistics)
        found = mean.result("cpu")
    assert largest_difference(found, wanted.result()) <= 1e-6
    # Without the move, other rows would be the anchor's.
    kept = (found[neurons] == anchor[neurons]).all(1)
    assert int(kept.sum()) == len(units) - 3
    assert not torch.equal(kept, ~trained)


@pytest.mark.parametrize("which", ["update", "anchor"])
def test_a_wrong_last_tensor_is_refused_before_the_first_part(which):
    anchor, client = beside("llama", 0.5)
    states = {"update": client, "anchor": anchor}
    name = next(reversed(client))
    states[which][name] = states[which][name][:-1]
    with pytest.raises(UpdateError, match=name):
        next(align_by_layer(**states, symmetry=symmetry_for("llama")))


@cache
def llama(layers):
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=NEURONS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with torch.device("meta"):
        return symmetry_of(config, transformers.LlamaForCausalLM(config).state_dict())


def random(symmetry, seed, dtype=torch.bfloat16):
    generator = seeded(seed)
    return {
        name: (torch.randn(shape, generator=generator) / 8).to(dtype)
        for name, shape in symmetry.shapes.items()
    }


#: What aligning one layer takes, in sizes of the layer as it travels in bfloat16: the
#: update, the anchor and the moved update, and in float32 what a group is compared
#: with.
HELD = 14


@pytest.mark.parametrize("drift", [0.01, 1.0])
def test_the_device_holds_two_layers_and_the_mean(drift, monkeypatch):
    """However many layers there are: the one that is being aligned, and the next
    one.
    """
    # More passes take time and no more memory.
    monkeypatch.setattr(descent, "SWEEPS", 2)
    held = {}
    for layers in (1, 2, 4):
        symmetry = llama(layers)
        anchor, noise = (random(symmetry, seed) for seed in (0, 1))
        client = {name: tensor + drift * noise[name] for name, tensor in anchor.items()}
        mean = Mean()
        with Pretend() as device:
            for _ in range(2):
                device.peak = 0
                fold_by_layer(mean, client, 1.0, anchor, symmetry, None, DEVICE)
            accumulator = 4 * sum(map(math.prod, symmetry.shapes.values()))
            assert device.held == accumulator
            held[layers] = device.peak - accumulator
            assert device.unrecorded == 0
    layer = 2 * max(sizes_of(with_groups(parts_of(symmetry))))
    # Of every layer there stay some numbers for each neuron, which other clients need
    # again.
    noted = 4 * 8 * NEURONS
    assert held[4] <= held[2] + 2 * noted
    most = held[1] + 2 * layer + noted
    assert held[2] <= most, "more than an update and an anchor on their way"
    assert held[1] <= HELD * layer


class AtOnce(Executor):
    """Does what it is given as soon as it can be done."""

    def __init__(self, threads):
        pass

    def submit(self, run, /, *args, **kwargs):
        done = Future()
        done.set_result(run(*args, **kwargs))
        return done


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_pinned_memory_is_not_filled_again_before_it_was_sent(dtype, monkeypatch):
    """There are two buffers for many parts; they are filled early, and copies are made
    late.
    """
    monkeypatch.setattr(by_layer, "ThreadPoolExecutor", AtOnce)
    symmetry = llama(5)
    anchor, client = (random(symmetry, seed, dtype) for seed in (0, 1))
    moved = {}
    with Pretend():
        for part in align_by_layer(client, anchor, symmetry, EAGER, DEVICE):
            moved |= {name: tensor.cpu() for name, tensor in part.tensors.items()}
    wanted = align_tensors(client, anchor, symmetry, EAGER)
    assert {tensor.dtype for tensor in moved.values()} == {dtype}
    assert largest_difference(moved, wanted) <= torch.finfo(dtype).eps


def test_leaving_early_ends_the_copies():
    symmetry = llama(5)
    anchor, client = (random(symmetry, seed) for seed in (0, 1))
    with Pretend() as device:
        parts = align_by_layer(client, anchor, symmetry, None, DEVICE)
        next(parts)
        before = threading.active_count()
        parts.close()  # type: ignore[attr-defined]
        del parts
        assert threading.active_count() < before
        assert device.held == 0


def test_a_device_that_does_not_exist_is_refused():
    assert checked_device("cpu") == CPU
    with pytest.raises(FedrotError, match="'nowhere'"):
        checked_device("nowhere")
    if not torch.cuda.is_available():
        with pytest.raises(FedrotError, match="'cuda'"):
            checked_device("cuda")
    with Pretend():
        assert checked_device("cuda") == torch.device("cuda")
