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
from fedrot.moves import Move
from tests.core.oracles import along, dense_on, random_moves, seeded
from tests.models import (
    CASES,
    EVERYTHING,
    FEW,
    FULL,
    LAYERS,
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
    alignment = fedrot.align(client, anchor, symmetry, fedrot.AlignmentOptions(parts=parts))
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
        ("residual", "output", "heads", "rescale", "ffn"),
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
    monomial = random_moves(symmetry, 3, ("residual", "output", "heads", "rescale", "ffn"))
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
