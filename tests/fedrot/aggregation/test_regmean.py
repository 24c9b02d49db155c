"""RegMean against least squares in NumPy, and with alignment in front of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedrot
from fedrot.aggregation import RegMean
from fedrot.collect.statistics import brings
from tests.fedrot.oracles import Array, seeded
from tests.fedrot.pairs import scrambled
from tests.models import (
    CASES,
    LAYERS,
    VOCABULARY,
    State,
    fresh_model,
    largest_difference,
    near,
    randomise,
    state_of,
    symmetry_for,
)

Statistics = Mapping[str, Mapping[str, Tensor]]
Client = tuple[dict[str, Tensor], float, Statistics]

OUT, IN = 3, 6


def _merged(clients: Sequence[Client], alpha: float = 1.0, beta: float = 0.0) -> State:
    regmean = RegMean(alpha, beta)
    for update, weight, statistics in clients:
        regmean.add(update, weight, statistics)
    return regmean.result()


def _data(rng: np.random.Generator, rows: int, rank: int = IN) -> Array:
    return np.asarray(rng.normal(size=(rows, rank)) @ rng.normal(size=(rank, IN)))


def _client(
    weight: Array, gram: Array, share: float, bias: Array | None = None, kind: str = "gram"
) -> Client:
    update = {"layer.weight": torch.tensor(weight if kind == "gram" else weight.T.copy())}
    update["layer.bias"] = torch.tensor(bias if bias is not None else np.zeros(len(weight)))
    return update, share, {kind: {"layer.weight": torch.tensor(gram)}}


def _mean(values: Sequence[Array], shares: Sequence[float]) -> Array:
    return np.asarray(sum(s * v for s, v in zip(shares, values, strict=True)) / sum(shares))


# The formula


@pytest.mark.parametrize("gamma", [0.0, 1 / 9, 1.0, 9.0])
def test_alpha_is_the_ridge_of_appendix_a(gamma: float) -> None:
    """``sum |X_i W - X_i W_i|^2 + tr((W - W_i)^T L_i (W - W_i))``, ``L_i = gamma diag(X_i^T X_i)``.

    Clients with fewer rows than inputs are singular alone, not together.
    """
    rng = np.random.default_rng(0)
    rows = [4, 9, 5]
    data = [_data(rng, n) for n in rows]
    weights = [rng.normal(size=(OUT, IN)) for _ in rows]
    left, right = [], []
    for x, w in zip(data, weights, strict=True):
        ridge = np.diag(np.sqrt(gamma * np.diag(x.T @ x)))
        left += [x, ridge]
        right += [x @ w.T, ridge @ w.T]
    expected = np.linalg.lstsq(np.concatenate(left), np.concatenate(right), rcond=None)[0].T
    clients = [_client(w, x.T @ x / n, float(n)) for w, x, n in zip(weights, data, rows, strict=True)]
    merged = _merged(clients, alpha=1 / (1 + gamma))["layer.weight"].numpy()
    assert np.abs(merged - expected).max() <= 1e-8


# Inputs that nobody has seen


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    ranks=st.lists(st.integers(0, 2), min_size=1, max_size=3),
    size=st.sampled_from([1e-6, 1.0, 1e6]),
)
def test_unseen_directions_keep_the_mean_and_seen_ones_are_solved(
    seed: int, ranks: list[int], size: float
) -> None:
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(IN, IN)))[0]
    data = [size * rng.normal(size=(25, r)) @ basis[:, :r].T if r else np.zeros((25, IN)) for r in ranks]
    weights = [rng.normal(size=(OUT, IN)) for _ in ranks]
    shares = [float(i + 1) for i in range(len(ranks))]
    regmean = RegMean(1.0)
    for w, x, s in zip(weights, data, shares, strict=True):
        regmean.add(*_client(w, x.T @ x / 25, s))
    merged = regmean.result()["layer.weight"].numpy()
    rank = max(ranks)
    assert np.abs((merged - _mean(weights, shares)) @ basis[:, rank:]).max() <= 1e-8
    if rank:
        # The normal equations hold, and in the seen directions they have one solution.
        total = sum(s * x.T @ x for x, s in zip(data, shares, strict=True)) / size**2
        products = sum(s * w @ x.T @ x for w, x, s in zip(weights, data, shares, strict=True)) / size**2
        assert np.abs(merged @ total - products).max() <= 1e-8 * np.abs(products).max()
    assert regmean.notes.keys() == {"layer.weight"}
    assert f"{IN - rank} of {IN} directions" in regmean.notes["layer.weight"]


def test_notes_are_those_of_the_last_result() -> None:
    rng = np.random.default_rng(9)
    x = _data(rng, 20)
    regmean = RegMean(1.0)
    regmean.add(*_client(rng.normal(size=(OUT, IN)), np.zeros((IN, IN)), 1.0))
    assert regmean.notes == {}
    regmean.result()
    assert regmean.notes.keys() == {"layer.weight"}
    regmean.add(*_client(rng.normal(size=(OUT, IN)), x.T @ x, 1.0))
    regmean.result()
    assert regmean.notes == {}


@pytest.mark.parametrize("seed", range(4))
def test_unseen_directions_keep_the_mean_when_gram_matrices_are_rounded(seed: int) -> None:
    """``collect_gram`` returns float32: rounding alone is no input."""
    rng = np.random.default_rng(seed)
    width, rank = 24, 8
    basis = np.linalg.qr(rng.normal(size=(width, width)))[0]
    weights = [rng.normal(size=(OUT, width)) for _ in range(3)]
    clients = []
    for w in weights:
        x = rng.normal(size=(60, rank)) @ basis[:, :rank].T
        gram = torch.tensor(x.T @ x / 60).float()
        clients.append(({"layer.weight": torch.tensor(w)}, 1.0, {"gram": {"layer.weight": gram}}))
    merged = _merged(clients)["layer.weight"].numpy()
    unseen = basis[:, rank:]
    assert np.abs((merged - _mean(weights, [1.0] * 3)) @ unseen).max() <= 1e-3


@pytest.mark.parametrize("rounded_first", [True, False])
def test_the_coarsest_gram_matrix_says_what_rounding_is(rounded_first: bool) -> None:
    """One client sends float32, another exact float64: their sum is as coarse as float32."""
    rng = np.random.default_rng(1)
    width, rank = 24, 8
    basis = np.linalg.qr(rng.normal(size=(width, width)))[0]
    weights = [rng.normal(size=(OUT, width)) for _ in range(2)]
    dtypes = [torch.float32, torch.float64] if rounded_first else [torch.float64, torch.float32]
    regmean = RegMean(1.0)
    for w, dtype in zip(weights, dtypes, strict=True):
        x = rng.normal(size=(60, rank)) @ basis[:, :rank].T
        gram = torch.tensor(x.T @ x / 60).to(dtype)
        regmean.add({"layer.weight": torch.tensor(w)}, 1.0, {"gram": {"layer.weight": gram}})
    merged = regmean.result()["layer.weight"].numpy()
    assert f"{width - rank} of {width} directions" in regmean.notes["layer.weight"]
    assert np.abs((merged - _mean(weights, [1.0] * 2)) @ basis[:, rank:]).max() <= 1e-3


def test_fewer_tokens_than_inputs_do_no_harm_to_a_real_model() -> None:
    """With ``alpha = 1`` most directions of the inputs are unseen: no weight may run away."""
    name = "bert-classifier"
    states = [near(state_of(name), 0.05, seed) for seed in (1, 2)]
    regmean = RegMean(1.0)
    for seed, state in enumerate(states):
        model = fresh_model(name)
        model.load_state_dict(state)
        regmean.add(state, 1.0, fedrot.collect_gram(model, [_batch(seed, rows=1)]))
    merged = regmean.result()
    key = f"{CASES[name].names.of(0, 'down')}.weight"
    apart = (states[0][key] - states[1][key]).norm()
    assert (merged[key] - (states[0][key] + states[1][key]) / 2).norm() <= 2 * apart


# Conv1D, layers that share their input


def _gpt2(seed: int) -> Any:
    sizes: dict[str, Any] = {"n_embd": 8, "n_head": 2, "n_layer": 2, "n_positions": 16, "num_labels": 3}
    tokens: dict[str, Any] = {"vocab_size": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    config = transformers.GPT2Config(**sizes, **tokens)
    return randomise(transformers.GPT2ForSequenceClassification(config).double(), seed).eval()


def _hooked(model: Any, batch: Mapping[str, Tensor]) -> dict[str, Array]:
    """Return the inputs ``[tokens, in]`` of every module with one weight matrix that reads floats."""
    found: dict[str, Array] = {}

    def hook(key: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def keep(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            found[key] = args[0].reshape(-1, args[0].shape[-1]).numpy()

        return keep

    handles = [
        module.register_forward_pre_hook(hook(name))
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D")
    ]
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    return found


def test_conv1d_layers_of_gpt2_equal_least_squares() -> None:
    """GPT-2 computes ``x W`` with ``W`` ``[in, out]``, square for the attention's output."""
    models = [_gpt2(1), _gpt2(2)]
    regmean = RegMean(1.0)
    seen = []
    for seed, model in enumerate(models):
        ids = torch.randint(2, 20, (8, 16), generator=seeded(seed))
        seen.append(_hooked(model, {"input_ids": ids}))
        grams = {f"{k}.weight": torch.tensor(x.T @ x / len(x)) for k, x in seen[-1].items()}
        linear = {"score.weight": grams.pop("score.weight")}
        regmean.add(model.state_dict(), 128.0, {"gram_conv1d": grams, "gram": linear})
    merged = regmean.result()
    assert merged["transformer.h.0.attn.c_proj.weight"].shape == (8, 8)
    states = [model.state_dict() for model in models]
    conv = [key for key in seen[0] if key != "score"]
    assert len(conv) == 8
    for key in conv:
        targets = [x[key] @ s[f"{key}.weight"].numpy() for x, s in zip(seen, states, strict=True)]
        inputs = np.concatenate([x[key] for x in seen])
        expected = np.linalg.lstsq(inputs, np.concatenate(targets), rcond=None)[0]
        error = np.abs(merged[f"{key}.weight"].numpy() - expected).max()
        assert error <= 1e-12 * max(1e4, np.linalg.cond(inputs) ** 2)
        bias = torch.stack([s[f"{key}.bias"] for s in states]).mean(0)
        assert (merged[f"{key}.bias"] - bias).abs().max() <= 1e-14


def test_collected_gram_matrices_of_gpt2_fit_its_weights() -> None:
    models = [_gpt2(1), _gpt2(2)]
    batches = [{"input_ids": torch.randint(2, 20, (8, 16), generator=seeded(s))} for s in range(2)]
    regmean = RegMean(0.9)
    for model, batch in zip(models, batches, strict=True):
        regmean.add(model.state_dict(), 1.0, fedrot.collect_gram(model, [batch]))
    merged = regmean.result()
    for key in ("transformer.h.1.attn.c_proj", "transformer.h.0.mlp.c_proj"):
        data = [_hooked(m, b)[key] for m, b in zip(models, batches, strict=True)]
        grams = [0.9 * x.T @ x + 0.1 * np.diag(np.diag(x.T @ x)) for x in data]
        weights = [m.state_dict()[f"{key}.weight"].numpy() for m in models]
        products = sum(g @ w for g, w in zip(grams, weights, strict=True))
        expected = np.linalg.solve(sum(grams), products)
        assert np.abs(merged[f"{key}.weight"].numpy() - expected).max() <= 1e-4


def test_what_regmean_needs_is_what_a_model_of_conv1d_layers_can_bring() -> None:
    """The language model's head is tied to its embeddings: all of its matrices are ``gram_conv1d``."""
    config = _gpt2(0).config
    model = transformers.GPT2LMHeadModel(config)
    statistics = fedrot.collect_gram(model, [{"input_ids": torch.arange(2, 18)[None]}])
    regmean = RegMean()
    regmean.add(model.state_dict(), 1.0, statistics)
    assert set(statistics) == {"gram_conv1d", "input_mean_conv1d"}
    assert all(brings(statistics, kind) for kind in regmean.needs)


def test_layers_that_share_a_matrix_are_factorised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(10)
    names = ["query.weight", "key.weight", "value.weight", "other.weight"]
    shared, apart = [], []
    for _ in range(2):
        update = {name: torch.tensor(rng.normal(size=(OUT, IN))) for name in names}
        grams = [torch.tensor(x.T @ x) for x in (_data(rng, 20), _data(rng, 20))]
        held = dict(zip(names, [grams[0]] * 3 + [grams[1]], strict=True))
        shared.append((update, 1.0, {"gram": held}))
        apart.append((update, 1.0, {"gram": {k: g.clone() for k, g in held.items()}}))
    calls: list[Tensor] = []
    real = torch.linalg.cholesky_ex

    def counted(matrix: Tensor) -> Any:
        calls.append(matrix)
        return real(matrix)

    for clients, expected in ((shared, 2), (apart, 4)):
        regmean = RegMean(0.9)
        for client in clients:
            regmean.add(*client)
        calls.clear()
        monkeypatch.setattr(torch.linalg, "cholesky_ex", counted)
        merged = regmean.result()
        monkeypatch.undo()
        assert len(calls) == expected
        assert largest_difference(merged, _merged(apart, 0.9)) <= 1e-12


# Errors


@pytest.mark.parametrize(
    ("alpha", "beta"), [(-0.1, 0), (1.1, 0), (float("nan"), 0), (0.9, -1), (0.9, float("inf"))]
)
def test_a_shrinkage_out_of_range_is_refused(alpha: float, beta: float) -> None:
    with pytest.raises(fedrot.FedrotError, match="alpha"):
        RegMean(alpha, beta)


def test_copies_of_a_shared_matrix_count_like_the_matrix() -> None:
    rng = np.random.default_rng(13)
    names = ["query.weight", "key.weight"]
    updates = [{name: torch.tensor(rng.normal(size=(OUT, IN))) for name in names} for _ in range(3)]
    grams = [torch.tensor(x.T @ x) for x in rng.normal(size=(3, 9, IN))]
    results = []
    for copied in (set(), {0}, {1}, {0, 1, 2}):
        regmean = RegMean()
        for index, (update, gram) in enumerate(zip(updates, grams, strict=True)):
            own = {
                name: gram.clone() if index in copied else gram for name in names[:: 1 - 2 * index % 4]
            }
            regmean.add(update, 1.0 + index, {"gram": own})
        results.append(regmean.result())
    assert all(largest_difference(results[0], other) <= 1e-12 for other in results[1:])


# With alignment


def _batch(seed: int, rows: int = 8) -> dict[str, Tensor]:
    ids = torch.randint(4, VOCABULARY, (rows, 12), generator=seeded(100 + seed))
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _loaded(name: str, state: State) -> Any:
    model = fresh_model(name)
    model.load_state_dict(state)
    return model


def _grams(name: str, state: State, seed: int) -> dict[str, Tensor]:
    """Return float64 Gram matrices of every linear layer whose weight is no embedding's."""
    model, batch = _loaded(name, state), _batch(seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    tied = {n for n, m in model.named_modules() if id(getattr(m, "weight", None)) in embeddings}
    seen = _hooked(model, batch)
    return {
        f"{key}.weight": torch.tensor(x.T @ x / len(x)) for key, x in seen.items() if key not in tied
    }


def _pairs(name: str, parts: tuple[str, ...]) -> list[tuple[State, State, fedrot.Alignment]]:
    return scrambled(state_of(name), symmetry_for(name), parts)


@pytest.mark.parametrize("parts", [("attention", "ffn"), fedrot.WHOLE_MODEL], ids="-".join)
@pytest.mark.parametrize("name", CASES)
def test_scrambled_clients_give_the_same_regmean_with_transport_only(
    name: str, parts: tuple[str, ...]
) -> None:
    plain, transported, raw = RegMean(0.9), RegMean(0.9), RegMean(0.9)
    for seed, (client, moved, alignment) in enumerate(_pairs(name, parts)):
        weight = 1.0 + seed
        plain.add(client, weight, {"gram": _grams(name, client, seed)})
        statistics = {"gram": _grams(name, moved, seed)}
        aligned = alignment.apply(moved)
        transported.add(aligned, weight, alignment.transport(statistics))
        raw.add(aligned, weight, statistics)
    expected = plain.result()
    assert largest_difference(transported.result(), expected) <= 1e-8
    without = raw.result()
    off = {key for key in expected if float((without[key] - expected[key]).abs().max()) > 1e-3}
    names = CASES[name].names
    inside = {f"{names.of(i, m)}.weight" for i in range(LAYERS) for m in ("output", "down")}
    assert inside <= off
    if parts == ("attention", "ffn"):
        assert off == inside


@pytest.mark.parametrize("parts", [("attention", "ffn"), fedrot.WHOLE_MODEL], ids="-".join)
@pytest.mark.parametrize("name", ["bert-classifier", "distilbert-mlm"])
def test_collected_gram_matrices_give_the_same_regmean(name: str, parts: tuple[str, ...]) -> None:
    plain, transported = RegMean(0.9), RegMean(0.9)
    for seed, (client, moved, alignment) in enumerate(_pairs(name, parts)):
        before, after = (
            fedrot.collect_gram(_loaded(name, state), [_batch(seed)]) for state in (client, moved)
        )
        plain.add(client, 1.0, before)
        transported.add(alignment.apply(moved), 1.0, alignment.transport(after))
    assert largest_difference(transported.result(), plain.result()) <= 1e-5
