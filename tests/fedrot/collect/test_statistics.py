"""Statistics move with the weights: against the same statistics recomputed on the moved model."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import fedrot
from fedrot.symmetry.actions import HeadRotation
from fedrot.symmetry.moves import Move
from reproductions.learning import HeadLinear
from tests.fedrot.oracles import along, dense_on, random_moves, seeded
from tests.models import (
    CASES,
    EAGER,
    EVERYTHING,
    FEW,
    FULL,
    LAYERS,
    WIDTH,
    State,
    config_of,
    fresh_model,
    inputs,
    near,
    state_of,
    symmetry_for,
)

PARTS = [
    ("heads",),
    ("attention",),
    ("rescale",),
    ("ffn",),
    ("attention", "ffn"),
    FULL,
    ("residual",),
    ("output",),
    EVERYTHING,
]

#: The parts that move single coordinates: permutations, signs and scales.
MONOMIAL = ("residual", "output", "heads", "rescale", "ffn")

#: The readers of the residual stream in the task head, then those of its own hidden units.
READERS = {
    "bert-classifier": (["bert.pooler.dense"], ["classifier"]),
    "distilbert-mlm": (["vocab_transform", "vocab_projector"], []),
}


def _linears(name: str) -> list[str]:
    """Return the modules whose inputs move (attention output, FFN down) and some whose do not."""
    names = CASES[name].names
    modules = ("query", "value", "output", "up", "down")
    inside = [names.of(layer, module) for layer, module in product(range(LAYERS), modules)]
    return [*inside, *chain.from_iterable(READERS[name])]


def _with_moved_inputs(name: str, parts: tuple[str, ...]) -> set[str]:
    """Return the modules whose inputs lie in a space that one of the parts moves."""
    modules = {"residual": {"query", "value", "up"}, "output": set[str](), "ffn": {"down"}}
    within = set().union(*(modules.get(part, {"output"}) for part in parts))
    stream, units = READERS[name]
    heads = [*(stream if "residual" in parts else []), *(units if "output" in parts else [])]
    names = CASES[name].names
    return {names.of(layer, m) for layer, m in product(range(LAYERS), within)} | set(heads)


def _grams(name: str, state: State) -> State:
    """Recompute the Gram matrix of every linear layer's inputs with forward pre-hooks."""
    model = fresh_model(name)
    model.load_state_dict(state)
    grams: State = {}

    def hook(key: str) -> Any:
        def keep(module: Any, args: tuple[Tensor, ...]) -> None:
            rows = args[0].reshape(-1, args[0].shape[-1])
            grams[key] = rows.T @ rows

        return keep

    for module in _linears(name):
        model.get_submodule(module).register_forward_pre_hook(hook(f"{module}.weight"))
    with torch.no_grad():
        model(**inputs())
    return grams


def _fisher(name: str, state: State) -> State:
    """Recompute the diagonal Fisher: squared gradients of the loss, example by example."""
    model = fresh_model(name)
    model.load_state_dict(state)
    batch = inputs()
    total = {key: torch.zeros_like(parameter) for key, parameter in model.named_parameters()}
    for example, label in product(range(2), range(2)):
        model.zero_grad()
        logits = model(**{k: v[example : example + 1] for k, v in batch.items()}).logits
        scores = logits.reshape(-1, logits.shape[-1])[:1]
        cross_entropy(scores, torch.tensor([label])).backward()
        for key, parameter in model.named_parameters():
            if parameter.grad is not None:
                total[key] += parameter.grad.square()
    return total


def _alignment(name: str, parts: tuple[str, ...]) -> tuple[State, fedrot.Alignment]:
    """Return a client that is far from aligned, and its alignment: every part moves in it."""
    anchor = state_of(name)
    symmetry = fedrot.symmetry_of(config_of(name), anchor)
    client = fedrot.random_equivalent(near(anchor, 0.1), symmetry, 3, parts)
    alignment = fedrot.align(client, anchor, symmetry, replace(EAGER, parts=parts))
    assert {move.group.part for move in alignment.moves} == {g.part for g in symmetry.select(parts)}
    return client, alignment


@pytest.mark.parametrize("parts", PARTS, ids="-".join)
@pytest.mark.parametrize("name", FEW)
def test_gram_matrices_follow_the_weights(name: str, parts: tuple[str, ...]) -> None:
    client, alignment = _alignment(name, parts)
    grams = _grams(name, client)
    kept = {key: gram.clone() for key, gram in grams.items()}
    transported = alignment.transport({"gram": grams})["gram"]
    recomputed = _grams(name, alignment.apply(client))
    assert transported.keys() == recomputed.keys() == {f"{m}.weight" for m in _linears(name)}
    changed = set()
    for key, expected in recomputed.items():
        assert (transported[key] - expected).abs().max() <= 1e-9 * expected.abs().max().clamp_min(1)
        assert (transported[key] - transported[key].T).abs().max() <= 1e-9 * expected.abs().max()
        if (grams[key] - expected).abs().max() > 1e-6:
            changed.add(key)
        assert torch.equal(grams[key], kept[key])
    assert changed == {f"{module}.weight" for module in _with_moved_inputs(name, parts)}


def test_gram_matrices_come_back_under_the_inverse() -> None:
    name = "bert-classifier"
    client, alignment = _alignment(name, EVERYTHING)
    grams = _grams(name, client)
    there = alignment.transport({"gram": grams})
    back = alignment.inverse().transport(there)["gram"]
    for key, gram in grams.items():
        assert (back[key] - gram).abs().max() <= 1e-9 * gram.abs().max()


@pytest.mark.parametrize(
    "parts",
    [
        ("heads",),
        ("ffn",),
        ("rescale",),
        ("heads", "rescale", "ffn"),
        ("residual",),
        ("output",),
        MONOMIAL,
    ],
    ids="-".join,
)
@pytest.mark.parametrize("name", ["bert-classifier", "distilbert-classifier"])
def test_diagonal_fisher_follows_permutations_and_scales(name: str, parts: tuple[str, ...]) -> None:
    client, alignment = _alignment(name, parts)
    fisher = _fisher(name, client)
    transported = alignment.transport({"fisher": fisher})["fisher"]
    recomputed = _fisher(name, alignment.apply(client))
    assert transported.keys() == recomputed.keys()
    moved = 0
    for key, expected in recomputed.items():
        size = float(expected.abs().max())
        assert (transported[key] - expected).abs().max() <= 1e-9 * size + 1e-20
        moved += int(float((fisher[key] - expected).abs().max()) > 1e-3 * size + 1e-20)
    assert moved >= (3 * LAYERS if parts != ("output",) else 3)


def test_diagonal_fisher_is_refused_under_a_rotation() -> None:
    name = "bert-classifier"
    client, alignment = _alignment(name, ("attention", "ffn"))
    fisher = _fisher(name, client)
    with pytest.raises(fedrot.FedrotError, match="rotation") as caught:
        alignment.transport({"fisher": fisher})
    assert "parts=('heads', 'ffn')" in str(caught.value)
    # Tensors that were not rotated can still travel.
    names = CASES[name].names
    key = f"{names.of(0, 'up')}.weight"
    neurons = {key: fisher[key], "classifier.weight": fisher["classifier.weight"]}
    transported = alignment.transport({"fisher": neurons})["fisher"]
    assert transported["classifier.weight"] is fisher["classifier.weight"]
    element = next(m.element for m in alignment.moves if m.group.part == "ffn" and m.group.layer == 0)
    assert torch.equal(transported[key], fisher[key][element])


def test_diagonal_fisher_travels_where_no_rotation_was_made() -> None:
    """Aligning a model to itself rotates nothing, so there is nothing to refuse."""
    name = "bert-classifier"
    state = state_of(name)
    alignment = fedrot.align(state, state, fedrot.symmetry_of(config_of(name), state))
    fisher = {"bert.encoder.layer.0.attention.self.query.weight": torch.ones(32, 32)}
    assert torch.equal(
        *[
            d["fisher"].popitem()[1]
            for d in (alignment.transport({"fisher": fisher}), {"fisher": fisher})
        ]
    )


def test_several_kinds_travel_together_and_dtypes_stay() -> None:
    name = "bert-classifier"
    client, alignment = _alignment(name, ("heads", "ffn"))
    grams = {key: gram.float() for key, gram in _grams(name, client).items()}
    fisher = {key: value.to(torch.bfloat16) for key, value in _fisher(name, client).items()}
    out = alignment.transport({"gram": grams, "fisher": fisher})
    assert {tensor.dtype for tensor in out["gram"].values()} == {torch.float32}
    assert {tensor.dtype for tensor in out["fisher"].values()} == {torch.bfloat16}


def test_unknown_statistics_are_refused() -> None:
    name = "bert-classifier"
    _, alignment = _alignment(name, ("ffn",))
    with pytest.raises(fedrot.FedrotError, match="hessian"):
        alignment.transport({"hessian": {}})
    with pytest.raises(fedrot.FedrotError, match=r"nowhere\.weight"):
        alignment.transport({"gram": {"nowhere.weight": torch.eye(3)}})


# Against dense matrices: every tensor of a model, every kind of element


def _gram_oracle(weight: Tensor, gram: Tensor, name: str, moves: tuple[Move, ...]) -> Tensor:
    """``G -> T^-T G T^-1`` for every move that acts on the weight's columns by ``T``."""
    for move in moves:
        for slot in move.group.slots:
            if (slot.tensor, slot.axis) == (name, 1):
                other = torch.linalg.inv(dense_on(move, slot, weight.shape[1])).T
                gram = other @ gram @ other.T
    return gram


def _fisher_oracle(fisher: Tensor, name: str, moves: tuple[Move, ...]) -> Tensor:
    for move in moves:
        for slot in move.group.slots:
            if slot.tensor == name:
                other = torch.linalg.inv(dense_on(move, slot, fisher.shape[slot.axis])).T
                fisher = along(other.square(), fisher, slot.axis)
    return fisher


@pytest.mark.parametrize(
    "name", ["bert-pretraining", "roberta-classifier", "electra-mlm", "distilbert-qa"]
)
def test_statistics_of_every_tensor_follow_dense_matrices(name: str) -> None:
    state, symmetry = state_of(name), symmetry_for(name)
    rng = seeded(1)
    report = fedrot.align(state, state, symmetry).report
    weights = {key: tensor for key, tensor in state.items() if tensor.ndim == 2}
    roots = {key: torch.randn(t.shape[1], 3, generator=rng).double() for key, t in weights.items()}
    grams = {key: root @ root.T for key, root in roots.items()}
    moves = random_moves(symmetry, 2, EVERYTHING)
    alignment = fedrot.Alignment(symmetry, moves, report)
    moved = alignment.transport({"gram": grams})["gram"]
    for key, weight in weights.items():
        expected = _gram_oracle(weight, grams[key], key, moves)
        assert (moved[key] - expected).abs().max() <= 1e-10
    # What a layer computes from its inputs has the same second moment, up to its outputs' own space.
    inner = _on_axis(symmetry, moves, 1)
    for key, weight in inner.apply(state).items():
        if weight.ndim == 2:
            before = state[key] @ grams[key] @ state[key].T
            assert (weight @ moved[key] @ weight.T - before).abs().max() <= 1e-9
    fisher = {key: torch.rand(t.shape, generator=rng).double() for key, t in state.items()}
    monomial = random_moves(symmetry, 3, MONOMIAL)
    moved = fedrot.Alignment(symmetry, monomial, report).transport({"fisher": fisher})["fisher"]
    for key in state:
        expected = _fisher_oracle(fisher[key], key, monomial)
        assert (moved[key] - expected).abs().max() <= 1e-12 * expected.abs().max()
        assert bool((moved[key] >= 0).all())


def _on_axis(symmetry: fedrot.Symmetry, moves: tuple[Move, ...], axis: int) -> fedrot.Alignment:
    """Return the alignment that moves only that axis of every tensor."""
    cut = [
        Move(replace(m.group, slots=tuple(s for s in m.group.slots if s.axis == axis)), m.element)
        for m in moves
    ]
    report = fedrot.AlignmentReport((), 0, 0, 0)
    return fedrot.Alignment(symmetry, tuple(cut), report)


# Orientation, other groups, shared matrices


def _same(one: State, other: State, tolerance: float = 1e-9) -> None:
    assert one.keys() == other.keys()
    for key, expected in other.items():
        assert one[key].shape == expected.shape
        assert (one[key] - expected).abs().max() <= tolerance * expected.abs().max().clamp_min(1)


def test_the_orientation_of_conv1d_is_that_of_linear_transposed() -> None:
    """No family with Conv1D is described: the same groups, with the axes of every matrix exchanged."""
    name = "bert-classifier"
    symmetry = symmetry_for(name)
    moves = random_moves(symmetry, 4, EVERYTHING)
    grams = _grams(name, state_of(name))
    matrices = {key for key, shape in symmetry.shapes.items() if len(shape) == 2}
    turned = tuple(
        Move(
            replace(
                m.group,
                slots=tuple(
                    replace(s, axis=1 - s.axis) if s.tensor in matrices else s for s in m.group.slots
                ),
            ),
            m.element,
        )
        for m in moves
    )
    report = fedrot.AlignmentReport((), 0, 0, 0)
    linear = fedrot.Alignment(symmetry, moves, report).transport({"gram": grams})["gram"]
    conv1d = fedrot.Alignment(symmetry, turned, report).transport({"gram_conv1d": grams})
    _same(conv1d["gram_conv1d"], linear, 0)


@pytest.mark.parametrize("name", FEW)
def test_gram_matrices_follow_general_linear_elements(name: str) -> None:
    client = state_of(name)
    alignment = _in_general(name)
    found = alignment.transport({"gram": _grams(name, client)})["gram"]
    _same(found, _grams(name, alignment.apply(client)))


def _in_general(name: str) -> fedrot.Alignment:
    """Return random general linear elements of all heads, next to everything else."""
    symmetry, rng = symmetry_for(name), seeded(6)
    moves = []
    for group in symmetry.select(EVERYTHING):
        if isinstance(group.kind, HeadRotation):
            group = replace(group, kind=HeadLinear(group.kind.heads, group.kind.dim))
        moves.append(Move(group, group.kind.random(rng)))
    assert sum(isinstance(move.group.kind, HeadLinear) for move in moves) == 2 * LAYERS
    return fedrot.Alignment(symmetry, tuple(moves), fedrot.AlignmentReport((), 0, 0, 0))


@pytest.mark.parametrize("parts", [("attention", "ffn"), EVERYTHING], ids="-".join)
def test_shared_matrices_stay_shared(parts: tuple[str, ...]) -> None:
    name = "bert-classifier"
    client, alignment = _alignment(name, parts)
    model = fresh_model(name)
    model.load_state_dict(client)
    grams = fedrot.collect_gram(model, [inputs()])["gram"]
    moved = alignment.transport({"gram": grams})["gram"]
    distinct = {id(gram) for gram in grams.values()}
    assert len(distinct) == len(grams) - 2 * LAYERS
    for one, other in product(grams, grams):
        assert (grams[one] is grams[other]) == (moved[one] is moved[other])


@pytest.mark.parametrize("kind", ["gram", "gram_conv1d"])
def test_one_object_under_two_names_moves_as_each_name_does(kind: str) -> None:
    """The caller may pass one object for layers whose inputs do not move alike."""
    name = "bert-classifier"
    names = CASES[name].names
    keys = [f"{names.of(layer, module)}.weight" for layer in (0, 1) for module in ("query", "output")]
    gram = torch.randn(WIDTH, WIDTH, generator=seeded(1), dtype=torch.float64)
    gram = gram @ gram.T
    alignment = _in_general(name)
    together = alignment.transport({kind: dict.fromkeys(keys, gram)})[kind]
    apart = alignment.transport({kind: {key: gram.clone() for key in keys}})[kind]
    _same(together, apart, 0)
    if kind == "gram":
        assert torch.equal(together[keys[0]], together[keys[2]])
        assert not torch.equal(together[keys[1]], together[keys[3]])


# Moments of Adam


def _gradients(name: str, state: State) -> State:
    """Return the gradients of one loss by autograd; every parameter that the loss sees is moved."""
    model = fresh_model(name)
    model.load_state_dict(state)
    logits = model(**inputs()).logits
    target = torch.randn(logits.shape, generator=seeded(9), dtype=torch.float64)
    mask = inputs()["attention_mask"].bool() if logits.ndim == 3 else slice(None)
    ((logits - target).square() + logits.exp() / 10)[mask].sum().backward()
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "parts", [("heads",), ("rescale",), ("ffn",), ("residual",), ("output",), MONOMIAL], ids="-".join
)
@pytest.mark.parametrize("name", FEW)
def test_squares_of_gradients_follow_permutations_signs_and_scales(
    name: str, parts: tuple[str, ...]
) -> None:
    client, alignment = _alignment(name, parts)
    before = {key: value.square() for key, value in _gradients(name, client).items()}
    expected = {k: v.square() for k, v in _gradients(name, alignment.apply(client)).items()}
    moved = alignment.transport({"fisher": before})["fisher"]
    assert moved.keys() == expected.keys()
    scale = max(float(value.max()) for value in expected.values())
    for key, value in expected.items():
        assert (moved[key] - value).abs().max() <= 1e-9 * max(float(value.max()), 1e-6 * scale)


def test_squares_are_refused_under_rotations() -> None:
    name = "bert-classifier"
    client, alignment = _alignment(name, ("attention",))
    squares = {key: value.square() for key, value in _gradients(name, client).items()}
    for module in ("query", "key", "value", "output"):
        key = f"{CASES[name].names.of(1, module)}.weight"
        with pytest.raises(fedrot.FedrotError, match="rotation"):
            alignment.transport({"fisher": {key: squares[key]}})
    with pytest.raises(fedrot.FedrotError, match="rotation"):
        _in_general(name).transport({"fisher": {key: squares[key]}})


# Masks of trained rows


def _random_masks(name: str, seed: int) -> dict[str, Tensor]:
    rng = seeded(seed)
    shapes = symmetry_for(name).shapes
    return {
        key: torch.rand(shape[0], generator=rng) < 0.5 if i % 5 else torch.tensor(bool(i % 2))
        for i, (key, shape) in enumerate(shapes.items())
    }


@pytest.mark.parametrize(
    "parts", [("heads",), ("rescale",), ("ffn",), ("residual",), ("output",), MONOMIAL], ids="-".join
)
@pytest.mark.parametrize("name", FEW)
def test_masks_follow_the_rows_they_mark(name: str, parts: tuple[str, ...]) -> None:
    """Rows set to zero where nothing was trained are zero in the moved model where its mask says so."""
    client, alignment = _alignment(name, parts)
    masks = _random_masks(name, 1)
    kept = {key: mask.clone() for key, mask in masks.items()}
    full = {key: mask.expand(client[key].shape[0]) for key, mask in masks.items()}
    marked = {
        key: (1 + value.abs()) * full[key].to(value).reshape(-1, *[1] * (value.ndim - 1))
        for key, value in client.items()
    }
    moved = alignment.transport({"trained": masks})["trained"]
    after = alignment.apply(marked)
    assert moved.keys() == masks.keys()
    changed = 0
    for key, mask in moved.items():
        assert mask.dtype == torch.bool
        assert mask.shape == masks[key].shape
        expected = after[key].abs().flatten(1).sum(1) if after[key].ndim > 1 else after[key].abs()
        assert torch.equal(mask.expand(len(expected)), expected > 0)
        changed += int(not torch.equal(mask, masks[key]))
        assert torch.equal(masks[key], kept[key])
    assert (changed == 0) == (parts == ("rescale",) or not alignment.moves)


def test_masks_of_all_rows_or_none_pass_a_rotation_and_others_do_not() -> None:
    name = "bert-classifier"
    _, alignment = _alignment(name, EVERYTHING)
    key = f"{CASES[name].names.of(0, 'query')}.weight"
    for mask in (
        torch.tensor(True),
        torch.tensor(False),
        torch.ones(WIDTH, dtype=torch.bool),
        torch.zeros(WIDTH, dtype=torch.bool),
    ):
        assert torch.equal(alignment.transport({"trained": {key: mask}})["trained"][key], mask)
    some = torch.arange(WIDTH) < 5
    with pytest.raises(fedrot.FedrotError, match=r"The rotation.*mask.*all of its rows or none"):
        alignment.transport({"trained": {key: some}})
    # Rows of the output projection are places in the residual stream, which no rotation moves.
    output = f"{CASES[name].names.of(0, 'output')}.weight"
    _, rotation = _alignment(name, ("attention",))
    assert torch.equal(rotation.transport({"trained": {output: some}})["trained"][output], some)
