"""Statistics move with the weights: against the same statistics recomputed on the moved model."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import fedrot
from tests.models import CASES, FEW, LAYERS, State, config_of, fresh_model, inputs, near, state_of

FULL = ("heads", "attention", "rescale", "ffn")
PARTS = [("heads",), ("attention",), ("rescale",), ("ffn",), ("attention", "ffn"), FULL]


def _linears(name: str) -> list[str]:
    """Return the modules whose inputs move (attention output, FFN down) and some whose do not."""
    names = CASES[name].names
    modules = ("query", "value", "output", "up", "down")
    return [names.of(layer, module) for layer, module in product(range(LAYERS), modules)]


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
    assert {move.group.part for move in alignment.moves} == set(parts)
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
    names, changed = CASES[name].names, set()
    for key, expected in recomputed.items():
        assert (transported[key] - expected).abs().max() <= 1e-9 * expected.abs().max().clamp_min(1)
        assert (transported[key] - transported[key].T).abs().max() <= 1e-9 * expected.abs().max()
        if (grams[key] - expected).abs().max() > 1e-6:
            changed.add(key)
        assert torch.equal(grams[key], kept[key])
    modules = {"output"} if "ffn" not in parts else {"down"} if parts == ("ffn",) else {"output", "down"}
    assert changed == {f"{names.of(layer, m)}.weight" for layer in range(LAYERS) for m in modules}


def test_gram_matrices_come_back_under_the_inverse() -> None:
    name = "bert-classifier"
    client, alignment = _alignment(name, FULL)
    grams = _grams(name, client)
    there = alignment.transport({"gram": grams})
    back = alignment.inverse().transport(there)["gram"]
    for key, gram in grams.items():
        assert (back[key] - gram).abs().max() <= 1e-9 * gram.abs().max()


@pytest.mark.parametrize(
    "parts", [("heads",), ("ffn",), ("rescale",), ("heads", "rescale", "ffn")], ids="-".join
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
    assert moved >= 3 * LAYERS


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
