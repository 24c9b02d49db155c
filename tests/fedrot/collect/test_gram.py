"""Gram matrices and Fisher information of real models against hooks, loops and brute force."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

import fedrot
from tests.fedrot.oracles import Array, seeded
from tests.models import (
    CASES,
    DIM,
    HEADS,
    LAYERS,
    NEURONS,
    VOCABULARY,
    WIDTH,
    fresh_model,
    inputs,
    randomise,
    symmetry_for,
)

Batch = Mapping[str, Tensor]

#: Settings of models of one layer, or of one layer that is run often.
_TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
}


def _batch(seed: int, rows: int = 3, length: int = 8, padding: int = 3) -> dict[str, Tensor]:
    """Return token sequences, the first one padded."""
    ids = torch.randint(4, VOCABULARY, (rows, length), generator=seeded(seed))
    mask = torch.ones_like(ids)
    mask[0, length - padding :] = 0
    return {"input_ids": ids, "attention_mask": mask}


# Gram matrices


def _rows(model: nn.Module, batches: Sequence[Batch], kinds: Sequence[str]) -> dict[str, list[Array]]:
    """Return what every module of these class names reads, token by token, without padding."""
    found: dict[str, list[Array]] = {}
    mask: list[Tensor] = []

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def keep(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            values = args[0].double().numpy()
            for row in range(len(values)):
                if values.ndim == 2:
                    found.setdefault(name, []).append(values[row])
                    continue
                for token in range(values.shape[1]):
                    if bool(mask[-1][row, token]):
                        found.setdefault(name, []).append(values[row, token])

        return keep

    model = model.eval()
    handles = [
        module.register_forward_pre_hook(hook(name))
        for name, module in model.named_modules()
        if type(module).__name__ in kinds
    ]
    with torch.no_grad():
        for batch in batches:
            mask.append(batch["attention_mask"])
            model(**batch)
    for handle in handles:
        handle.remove()
    return found


def _oracle(rows: Sequence[Array]) -> Array:
    total = np.zeros((len(rows[0]), len(rows[0])))
    for row in rows:
        total += np.outer(row, row)
    return np.asarray(total / len(rows))


def _close(found: Tensor, expected: Array, tolerance: float = 1e-5) -> None:
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert np.abs(found.double().numpy() - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("name", [*CASES, "bert-mlm-untied", "roberta-tokens"])
def test_gram_matrices_equal_sums_over_tokens(name: str) -> None:
    model = fresh_model(name)
    batches = [_batch(1), _batch(2, rows=2, length=5, padding=1)]
    found = fedrot.collect_gram(model, batches)
    assert found.keys() == {"gram"}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    expected = {
        key: rows
        for key, rows in _rows(model, batches, ["Linear"]).items()
        if id(model.get_submodule(key).weight) not in embeddings
    }
    assert found["gram"].keys() == {f"{key}.weight" for key in expected}
    names = CASES[name].names if name in CASES else None
    assert names is None or f"{names.of(1, 'down')}.weight" in found["gram"]
    for key, rows in expected.items():
        _close(found["gram"][f"{key}.weight"], _oracle(rows))


def test_padding_is_as_if_it_were_not_there() -> None:
    """Two sequences of 9 and 6 tokens in one batch, against each one alone and uncut."""
    model = fresh_model("bert-classifier")
    batch = inputs()
    together = fedrot.collect_gram(model, [batch])["gram"]
    whole = {"input_ids": batch["input_ids"][:1]}
    cut = {"input_ids": batch["input_ids"][1:, :6]}
    alone, short = (fedrot.collect_gram(model, [b])["gram"] for b in (whole, cut))
    for key, gram in together.items():
        per_sequence = key in ("bert.pooler.dense.weight", "classifier.weight")
        one, other = (1, 1) if per_sequence else (9, 6)
        expected = (one * alone[key] + other * short[key]) / (one + other)
        _close(gram, expected.double().numpy())
    in_turn = fedrot.collect_gram(model, [whole, cut])["gram"]
    assert all((in_turn[k] - g).abs().max() <= 1e-5 * g.abs().max() for k, g in together.items())


def test_no_token_to_read_gives_zeros() -> None:
    batch = _batch(1)
    batch["attention_mask"] = torch.zeros_like(batch["attention_mask"])
    key = f"{CASES['bert-classifier'].names.of(0, 'query')}.weight"
    gram = fedrot.collect_gram(fresh_model("bert-classifier"), [batch])["gram"][key]
    assert torch.equal(gram, torch.zeros(WIDTH, WIDTH))


def test_choices_of_a_question_are_sequences_like_any_other() -> None:
    model = fresh_model("bert-choice")
    batch = {key: value[None] for key, value in _batch(1).items()}
    flat = {key: value[0] for key, value in batch.items()}
    found = fedrot.collect_gram(model, [batch])["gram"]
    expected = fedrot.collect_gram(model.bert, [flat])["gram"]
    assert found.keys() == {"classifier.weight"} | {f"bert.{key}" for key in expected}
    for key, gram in expected.items():
        assert torch.equal(found[f"bert.{key}"], gram)


def test_query_key_and_value_hold_one_matrix() -> None:
    name = "distilbert-classifier"
    found = fedrot.collect_gram(fresh_model(name), [_batch(1), _batch(2)])["gram"]
    names = CASES[name].names
    for layer in range(LAYERS):
        query, key, value = (
            found[f"{names.of(layer, module)}.weight"] for module in ("query", "key", "value")
        )
        assert query is key is value
    assert len({id(gram) for gram in found.values()}) == len(found) - 2 * LAYERS


def test_tied_output_embeddings_have_none() -> None:
    tied = fedrot.collect_gram(fresh_model("bert-mlm"), [_batch(1)])["gram"]
    apart = fedrot.collect_gram(fresh_model("bert-mlm-untied"), [_batch(1)])["gram"]
    assert apart.keys() - tied.keys() == {"cls.predictions.decoder.weight"}
    assert "cls.predictions.transform.dense.weight" in tied


def test_shared_layers_gather_the_inputs_of_all_their_calls() -> None:
    """ALBERT runs one layer three times: its matrices are over all three inputs."""
    settings: dict[str, Any] = {**_TINY, "num_hidden_layers": 3, "embedding_size": 6, "num_labels": 3}
    config = transformers.AlbertConfig(**settings)
    model = randomise(transformers.AlbertForSequenceClassification(config).double()).eval()
    batches = [_batch(1), _batch(2)]
    found = fedrot.collect_gram(model, batches)["gram"]
    rows = _rows(model, batches, ["Linear"])
    assert found.keys() == {f"{key}.weight" for key in rows}
    for key, values in rows.items():
        _close(found[f"{key}.weight"], _oracle(values))
    layer = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    query = f"{layer}.attention.query"
    assert len(rows[query]) == 3 * int(sum(int(b["attention_mask"].sum()) for b in batches))
    assert found[f"{query}.weight"] is found[f"{layer}.attention.value.weight"]
    assert found[f"{query}.weight"] is not found[f"{layer}.ffn.weight"]


def test_conv1d_has_a_kind_of_its_own() -> None:
    sizes: dict[str, Any] = {"n_embd": 8, "n_head": 2, "n_layer": 2, "n_positions": 16, "num_labels": 3}
    tokens: dict[str, Any] = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    config = transformers.GPT2Config(**sizes, **tokens)
    model = randomise(transformers.GPT2ForSequenceClassification(config).double()).eval()
    batches = [_batch(1), _batch(2)]
    found = fedrot.collect_gram(model, batches)
    assert found.keys() == {"gram", "gram_conv1d"}
    assert found["gram"].keys() == {"score.weight"}
    rows = _rows(model, batches, ["Conv1D"])
    assert found["gram_conv1d"].keys() == {f"{key}.weight" for key in rows}
    for key, values in rows.items():
        weight = model.get_parameter(f"{key}.weight")
        gram = found["gram_conv1d"][f"{key}.weight"]
        assert len(gram) == weight.shape[0]
        _close(gram, _oracle(values))


def test_the_model_is_left_as_it_was() -> None:
    """Dropout is off while statistics are collected, and every module gets its own mode back."""
    model = fresh_model("bert-classifier").train()
    model.bert.encoder.layer[1].eval()
    model.bert.encoder.layer[0].attention.requires_grad_(False)
    modes = {name: module.training for name, module in model.named_modules()}
    assert len(set(modes.values())) == 2
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    first, second = (fedrot.collect_gram(model, [_batch(1)])["gram"] for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(p, weights[n]) and p.grad is None for n, p in model.named_parameters())
    assert not model.bert.encoder.layer[0].attention.output.dense.weight.requires_grad
    assert model.classifier.weight.requires_grad
    assert not any(gram.requires_grad for gram in first.values())
    assert torch.is_grad_enabled()


class _Forks(nn.Module):
    """Two layers, on one input or on two, that fail on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.unused = nn.Linear(4, 2), nn.Linear(4, 3), nn.Linear(5, 5)
        self.dropout = nn.Dropout(0.5)

    def forward(
        self, x: Tensor, apart: bool = False, by_name: bool = False, fail: bool = False
    ) -> Tensor:
        y = self.right(x + 1 if apart else x)
        if fail:
            raise ValueError("out of luck")
        return torch.cat([self.left(input=x) if by_name else self.left(x), y], -1)


def test_a_failing_model_is_left_as_it_was() -> None:
    model = _Forks().train()
    model.dropout.eval()
    with pytest.raises(ValueError, match="luck"):
        fedrot.collect_gram(model, [{"x": torch.ones(2, 4), "fail": True}])  # type: ignore[dict-item]
    assert (model.training, model.left.training, model.dropout.training) == (True, True, False)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("first", [False, True])
def test_inputs_that_are_shared_in_some_batches_only_are_refused(first: bool) -> None:
    batches: list[Any] = [{"x": torch.ones(2, 4), "apart": a} for a in (first, not first)]
    with pytest.raises(fedrot.FedrotError, match=r"left\.weight.*right\.weight"):
        fedrot.collect_gram(_Forks(), batches)


@pytest.mark.parametrize("apart", [False, True])
def test_any_model_of_linear_layers_will_do(apart: bool) -> None:
    x = torch.randn(6, 4, generator=seeded(1))
    batches: list[Any] = [{"x": x[:4], "apart": apart}, {"x": x[4:], "apart": apart}]
    found = fedrot.collect_gram(_Forks(), batches)["gram"]
    assert found.keys() == {"left.weight", "right.weight"}
    _close(found["left.weight"], _oracle(list(x.double().numpy())))
    _close(found["right.weight"], _oracle(list(x.double().numpy() + apart)))
    assert (found["left.weight"] is found["right.weight"]) != apart


def test_a_layer_may_be_called_by_keyword() -> None:
    x = torch.randn(6, 4, generator=seeded(1))
    batches: list[Any] = [{"x": x, "by_name": True}]
    found = fedrot.collect_gram(_Forks(), batches)["gram"]
    _close(found["left.weight"], _oracle(list(x.double().numpy())))


def test_labels_are_not_passed_on() -> None:
    """Labels of the wrong shape would fail in the loss."""
    model = fresh_model("bert-classifier")
    plain = fedrot.collect_gram(model, [_batch(1)])["gram"]
    odd = fedrot.collect_gram(model, [{**_batch(1), "labels": torch.ones(99)}])["gram"]
    assert all(torch.equal(plain[key], odd[key]) for key in plain)


@pytest.mark.parametrize("most", [1, 2])
def test_no_more_batches_are_read_than_asked_for(most: int) -> None:
    taken = []

    def batches() -> Iterator[Batch]:
        for seed in range(5):
            taken.append(seed)
            yield _batch(seed)

    model = fresh_model("bert-classifier")
    found = fedrot.collect_gram(model, batches(), max_batches=most)["gram"]
    assert taken == list(range(most))
    expected = fedrot.collect_gram(model, [_batch(seed) for seed in range(most)])["gram"]
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_half_precision_models_give_float32() -> None:
    model = fresh_model("bert-classifier").to(torch.bfloat16)
    exact = fedrot.collect_gram(fresh_model("bert-classifier"), [_batch(1)])["gram"]
    found = fedrot.collect_gram(model, [_batch(1)])["gram"]
    assert found.keys() == exact.keys()
    for key, gram in found.items():
        assert gram.dtype == torch.float32
        assert (gram - exact[key]).abs().max() <= 0.1 * exact[key].abs().max()


def test_nothing_to_read_is_refused() -> None:
    model = fresh_model("bert-classifier")
    with pytest.raises(fedrot.FedrotError, match="batch"):
        fedrot.collect_gram(model, [])
    with pytest.raises(fedrot.FedrotError, match="batch"):
        fedrot.collect_gram(model, [_batch(1)], max_batches=0)

    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(fedrot.FedrotError, match="Linear"):
        fedrot.collect_gram(Norm(), [{"x": torch.ones(1, 2)}])


def test_a_wrong_form_is_refused_before_the_model_runs() -> None:
    ran = []
    model = fresh_model("bert-classifier")
    model.register_forward_hook(lambda *_: ran.append(1))
    with pytest.raises(fedrot.FedrotError, match=r"'rows'.*full, heads, diagonal"):
        fedrot.collect_gram(model, [_batch(1)], form="rows")  # type: ignore[arg-type]
    with pytest.raises(fedrot.FedrotError, match="symmetry"):
        fedrot.collect_gram(model, [_batch(1)], form="heads")
    assert not ran


# Cheaper forms


@pytest.mark.parametrize("name", ["bert-classifier", "distilbert-mlm", "electra-discriminator"])
def test_forms_are_blocks_and_diagonals(name: str) -> None:
    symmetry, model = symmetry_for(name), fresh_model(name)
    full = fedrot.collect_gram(model, [_batch(1)])["gram"]
    heads = fedrot.collect_gram(model, [_batch(1)], form="heads", symmetry=symmetry)["gram"]
    diagonal = fedrot.collect_gram(model, [_batch(1)], form="diagonal")["gram"]
    assert full.keys() == heads.keys() == diagonal.keys()
    outputs = {f"{CASES[name].names.of(layer, 'output')}.weight" for layer in range(LAYERS)}
    for key, gram in full.items():
        flat = torch.stack([gram[i, i] for i in range(len(gram))])
        assert torch.equal(diagonal[key], flat)
        if key not in outputs:
            assert torch.equal(heads[key], flat)
            continue
        assert heads[key].shape == (HEADS, DIM, DIM)
        for head, i, j in itertools.product(range(HEADS), range(DIM), range(DIM)):
            assert heads[key][head, i, j] == gram[head * DIM + i, head * DIM + j]
    for cheap in (heads, diagonal):
        for one, other in itertools.product(full, full):
            assert (full[one] is full[other]) == (cheap[one] is cheap[other])
        cheap[f"{CASES[name].names.of(0, 'down')}.weight"].zero_()
    assert full[f"{CASES[name].names.of(0, 'down')}.weight"].diagonal().sum() > 0


@pytest.mark.parametrize("form", ["full", "heads", "diagonal"])
def test_other_statistics_keep_their_form(form: Any) -> None:
    name = "bert-classifier"
    key = f"{CASES[name].names.of(0, 'down')}.weight"
    statistics = {
        "gram": {key: torch.eye(NEURONS)},
        "gram_conv1d": {key: torch.eye(WIDTH)},
        "fisher": {key: torch.ones(WIDTH, NEURONS)},
        "trained": {key: torch.tensor(True)},
    }
    found = fedrot.collect.gram.compressed(statistics, form, symmetry_for(name))
    assert found.keys() == statistics.keys()
    assert found["fisher"][key] is statistics["fisher"][key]
    assert found["trained"][key] is statistics["trained"][key]
    size = (NEURONS, NEURONS) if form == "full" else (NEURONS,)
    assert found["gram"][key].shape == size
    assert found["gram_conv1d"][key].shape == ((WIDTH, WIDTH) if form == "full" else (WIDTH,))
    found["fisher"].clear()
    assert key in statistics["fisher"]


# Fisher information: the brute force


Likelihoods = Callable[[Tensor], list[tuple[float, Tensor]]]


def _squares(model: Any, row: Batch, likelihoods: Likelihoods) -> dict[str, Tensor]:
    """Return ``sum p (grad log p)^2``, one backward pass per term on a graph of its own."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for term in range(len(likelihoods(model(**row).logits.detach()))):
        model.zero_grad()
        share, likelihood = likelihoods(model(**row).logits)[term]
        likelihood.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                total[name] += share * parameter.grad.square()
    model.zero_grad()
    return total


def _expected(model: Any, batch: Batch, likelihoods: Likelihoods) -> dict[str, Tensor]:
    """Return the mean over rows."""
    rows = len(batch["input_ids"])
    total: dict[str, Tensor] = {}
    for i in range(rows):
        row = {name: value[i : i + 1] for name, value in batch.items()}
        for name, value in _squares(model, row, likelihoods).items():
            total[name] = total.get(name, 0) + value / rows
    return total


def _matches(found: Mapping[str, Mapping[str, Tensor]], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == {"fisher"}
    # Tied parameters are listed under every name.
    values = {id(value) for value in found["fisher"].values()}
    assert found["fisher"].keys() >= expected.keys()
    assert len(values) == len(expected)
    largest = max(float(value.max()) for value in expected.values())
    assert largest > 0
    for name, value in expected.items():
        computed = found["fisher"][name]
        assert (computed.dtype, computed.shape) == (value.dtype, value.shape)
        assert bool((computed >= 0).all())
        bound = 1e-4 * float(value.max()) + 1e-10 * largest
        assert (computed - value).abs().max() <= bound, name


def _single(logits: Tensor) -> list[tuple[float, Tensor]]:
    z = logits[0]
    log_p = [z[y] - z.exp().sum().log() for y in range(len(z))]
    return [(float(value.detach().exp()), value) for value in log_p]


def _several(logits: Tensor) -> list[tuple[float, Tensor]]:
    """Every set of labels, each label on or off."""
    terms = []
    for labels in itertools.product((0, 1), repeat=logits.shape[1]):
        value = sum((logsigmoid(z if y else -z) for y, z in zip(labels, logits[0], strict=True)))
        assert isinstance(value, Tensor)
        terms.append((float(value.detach().exp()), value))
    return terms


def _scores(logits: Tensor) -> list[tuple[float, Tensor]]:
    """Gauss-Hermite quadrature of ``y ~ N(z, 1)``, exact for polynomials of degree 5."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(3)
    weights = weights / weights.sum()
    terms = []
    for chosen in itertools.product(range(3), repeat=logits.shape[1]):
        y = logits[0].detach() + torch.tensor(nodes[list(chosen)])
        terms.append((float(np.prod(weights[list(chosen)])), -((y - logits[0]) ** 2).sum() / 2))
    return terms


def _classifier(labels: int, problem: str | None = None, seed: int = 0) -> Any:
    """Return a one-layer classifier of its own."""
    settings: dict[str, Any] = {**_TINY, "num_labels": labels, "problem_type": problem}
    config = transformers.BertConfig(**settings)
    return randomise(transformers.BertForSequenceClassification(config).double(), seed).eval()


@pytest.mark.parametrize(
    ("labels", "problem", "likelihoods"),
    [
        (2, None, _single),
        (3, None, _single),
        (8, "single_label_classification", _single),
        (3, "multi_label_classification", _several),
        (1, "multi_label_classification", _several),
        (1, None, _scores),
        (1, "regression", _scores),
        (2, "regression", _scores),
    ],
)
def test_fisher_is_the_expectation_over_the_models_own_labels(
    labels: int, problem: str | None, likelihoods: Likelihoods
) -> None:
    model, batch = _classifier(labels, problem), _batch(1)
    expected = _expected(model, batch, likelihoods)
    _matches(fedrot.collect_fisher(model, [batch]), expected)
    split = [{k: v[i : i + 2] for k, v in batch.items()} for i in (0, 2)]
    # The data's labels are not looked at, and seeds decide nothing where nothing is sampled.
    split[0]["labels"] = torch.tensor([-7, 99])
    _matches(fedrot.collect_fisher(model, split, seed=5), expected)


@pytest.mark.parametrize("name", ["bert-classifier", "roberta-classifier", "distilbert-classifier"])
def test_fisher_of_every_family_of_classifiers(name: str) -> None:
    model = fresh_model(name)
    _matches(fedrot.collect_fisher(model, [inputs()]), _expected(model, inputs(), _single))


def test_choices_of_a_question_are_its_labels() -> None:
    model = fresh_model("bert-choice")
    batch = {key: torch.stack([v[:2], v[1:3]]) for key, v in _batch(1).items()}
    _matches(fedrot.collect_fisher(model, [batch]), _expected(model, batch, _single))


def _own_loss(model: Any, batch: Batch, factor: Callable[[Batch], float]) -> dict[str, Tensor]:
    """Return the mean over rows of the squared gradient of the model's own loss times a factor."""
    rows = len(batch["input_ids"])
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(rows):
        row = {name: value[i : i + 1] for name, value in batch.items()}
        model.zero_grad()
        (model(**row).loss * factor(row)).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                total[name] += parameter.grad.square() / rows
    model.zero_grad()
    return total


@pytest.mark.parametrize(
    ("labels", "problem", "targets", "factor"),
    [
        (3, "single_label_classification", [2, 0, 1], 1.0),
        (12, "single_label_classification", [2, 11, 1], 1.0),
        (3, "multi_label_classification", [[0.0, 1, 1], [1, 0, 0], [0, 0, 0]], 3.0),
        (1, "regression", [0.5, -1.0, 2.0], 0.5),
    ],
)
def test_the_empirical_fisher_squares_the_gradients_of_the_models_own_loss(
    labels: int, problem: str, targets: list[Any], factor: float
) -> None:
    """The loss of transformers is a mean over labels, and a squared error without the half."""
    model = _classifier(labels, problem)
    batch = {**_batch(1), "labels": torch.tensor(targets)}
    if problem != "single_label_classification":
        batch["labels"] = batch["labels"].double()
    expected = _own_loss(model, batch, lambda _: factor)
    _matches(fedrot.collect_fisher(model, [batch], labels="data"), expected)


def test_the_kind_of_label_is_guessed_as_transformers_guesses_it() -> None:
    """Without a ``problem_type``, labels that are not integers are several labels at once."""
    batch = {**_batch(1), "labels": torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 0]]).double()}
    expected = _own_loss(_classifier(3), batch, lambda _: 3.0)
    _matches(fedrot.collect_fisher(_classifier(3), [batch], labels="data"), expected)


@pytest.mark.parametrize("name", ["bert-mlm", "bert-tokens"])
def test_the_empirical_fisher_of_tokens_counts_the_labelled_positions(name: str) -> None:
    model, batch = fresh_model(name), inputs()
    labels = torch.full_like(batch["input_ids"], -100)
    labels[0, 2], labels[0, 5], labels[1, 1] = 1, 0, 2
    batch["labels"] = labels
    expected = _own_loss(model, batch, lambda row: float((row["labels"] >= 0).sum()))
    _matches(fedrot.collect_fisher(model, [batch], labels="data"), expected)


def test_the_empirical_fisher_of_a_causal_model_is_of_the_next_token() -> None:
    model, batch = fresh_model("bert-causal"), {"input_ids": inputs()["input_ids"]}
    batch["labels"] = batch["input_ids"].clone()
    expected = _own_loss(model, batch, lambda row: float(row["labels"].shape[1] - 1))
    _matches(fedrot.collect_fisher(model, [batch], labels="data"), expected)


def test_a_discriminator_labels_every_token() -> None:
    """ELECTRA's discriminator gives one logit per token: real or replaced."""
    model, batch = fresh_model("electra-discriminator"), {"input_ids": inputs()["input_ids"][:, :4]}
    _matches(fedrot.collect_fisher(model, [batch]), _expected(model, batch, _several))


# Sampled labels


def _outcomes(model: Any, row: Batch, seeds: int, key: str, every: list[Tensor]) -> np.ndarray:
    """Return how often each possible outcome was drawn; all are told apart by one parameter."""
    counts = np.zeros(len(every))
    for seed in range(seeds):
        found = fedrot.collect_fisher(model, [row], seed=seed)["fisher"][key]
        errors = torch.stack([(found - value).abs().max() / value.max() for value in every])
        assert errors.min() <= 1e-5
        assert errors.sort().values[1] > 1e-3
        counts[int(errors.argmin())] += 1
    return counts


def _follows(counts: np.ndarray, shares: Array) -> None:
    """Chi-squared far from its tail; the seeds are fixed, so this passes always or never."""
    expected = shares / shares.sum() * counts.sum()
    common = expected >= 5
    assert common.sum() >= 3
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    assert statistic <= common.sum() + 4 * np.sqrt(2 * common.sum())
    assert counts[~common].sum() <= 3 * expected[~common].sum() + 5


def test_many_labels_are_sampled_from_the_model() -> None:
    """Each seed gives the squared gradient of one label, as often as the model gives that label."""
    model, batch = _classifier(9), _batch(1, rows=1)
    terms = _single(model(**batch).logits)
    every = []
    for y in range(9):

        def likelihood(z: Tensor, y: int = y) -> list[tuple[float, Tensor]]:
            return [(1.0, _single(z)[y][1])]

        every.append(_squares(model, batch, likelihood)["classifier.bias"])
    counts = _outcomes(model, batch, 300, "classifier.bias", every)
    _follows(counts, np.array([share for share, _ in terms]))
    assert counts.sum() == 300


def _tokens(labels: int) -> Any:
    settings: dict[str, Any] = {**_TINY, "num_labels": labels}
    config = transformers.BertConfig(**settings)
    return randomise(transformers.BertForTokenClassification(config).double()).eval()


def test_tokens_are_labelled_by_samples_of_the_model_except_for_padding() -> None:
    model = _tokens(2)
    row = {"input_ids": torch.tensor([[5, 9, 23, 11]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])}
    log_p = model(**row).logits.detach()[0, :3].log_softmax(-1)
    every, shares = [], []
    for labels in itertools.product((0, 1), repeat=3):

        def likelihood(z: Tensor, labels: tuple[int, ...] = labels) -> list[tuple[float, Tensor]]:
            picked = [z[0, t].log_softmax(-1)[y] for t, y in enumerate(labels)]
            return [(1.0, picked[0] + picked[1] + picked[2])]

        every.append(_squares(model, row, likelihood)["classifier.weight"])
        shares.append(float(sum(log_p[t, y] for t, y in enumerate(labels)).exp()))
    counts = _outcomes(model, row, 200, "classifier.weight", every)
    _follows(counts, np.array(shares))


def test_samples_depend_on_the_seed_alone() -> None:
    model, batch = _classifier(9), _batch(1)
    state = torch.get_rng_state()
    first, again, other = (
        fedrot.collect_fisher(model, [batch], seed=seed)["fisher"] for seed in (3, 3, 4)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


# What else collect_fisher promises


def test_fisher_leaves_the_model_as_it_was() -> None:
    model = _classifier(3).train()
    model.bert.encoder.eval()
    model.bert.embeddings.requires_grad_(False)
    model.classifier.weight.grad = torch.ones_like(model.classifier.weight)
    modes = {name: module.training for name, module in model.named_modules()}
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        first, second = (fedrot.collect_fisher(model, [_batch(1)])["fisher"] for _ in range(2))
        assert not torch.is_grad_enabled()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert {name: module.training for name, module in model.named_modules()} == modes
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])
        assert (parameter.grad is None) == (name != "classifier.weight")
    assert torch.equal(model.classifier.weight.grad, torch.ones_like(model.classifier.weight))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert first.keys() == trained
    assert not any(key.startswith("bert.embeddings") for key in trained)
    assert not any(value.requires_grad for value in first.values())


def test_parameters_that_the_output_does_not_depend_on_have_no_information() -> None:
    model = _tokens(2)
    model.spare = nn.Linear(2, 2).double()
    found = fedrot.collect_fisher(model, [_batch(1)])["fisher"]
    assert found["spare.weight"].tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("most", [1, 2, 4])
def test_no_more_rows_are_used_than_asked_for(most: int) -> None:
    model = _classifier(3)
    taken = []

    def batches() -> Iterator[Batch]:
        for seed in range(3):
            taken.append(seed)
            yield _batch(seed)

    found = fedrot.collect_fisher(model, batches(), max_rows=most)
    assert len(taken) == (most + 2) // 3
    joined = {key: torch.cat([_batch(seed)[key] for seed in range(3)])[:most] for key in _batch(0)}
    _matches(found, _expected(model, joined, _single))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fisher_of_other_precisions(dtype: torch.dtype) -> None:
    model = _classifier(3).to(dtype)
    found = fedrot.collect_fisher(model, [_batch(1)])["fisher"]
    assert {value.dtype for value in found.values()} <= {dtype, torch.float32}
    exact = _expected(_classifier(3), _batch(1), _single)["classifier.bias"]
    assert (found["classifier.bias"] - exact).abs().max() <= 0.1 * exact.max()


def test_small_information_survives_half_precision() -> None:
    """float16 holds nothing below 6e-8: squares of small gradients must not all become zero."""
    model = _classifier(3)
    with torch.no_grad():
        model.classifier.weight.mul_(1e-3)
    exact = _expected(model, _batch(1), _single)
    found = fedrot.collect_fisher(model.half(), [_batch(1)])["fisher"]
    lost = [key for key, value in exact.items() if value.max() > 1e-12 and not found[key].any()]
    assert lost == []


def test_what_cannot_be_computed_is_refused() -> None:
    model = _classifier(3)
    with pytest.raises(fedrot.FedrotError, match="rows"):
        fedrot.collect_fisher(model, [])
    with pytest.raises(fedrot.FedrotError, match="rows"):
        fedrot.collect_fisher(model, [_batch(1)], max_rows=0)
    with pytest.raises(fedrot.FedrotError, match="labels"):
        fedrot.collect_fisher(model, [_batch(1)], labels="data")


def test_an_unknown_source_of_labels_is_refused() -> None:
    with pytest.raises(fedrot.FedrotError, match="labels"):
        fedrot.collect_fisher(_classifier(3), [_batch(1)], labels="dat")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["bert-qa", "bert-pretraining"])
def test_models_without_logits_are_refused(name: str) -> None:
    with pytest.raises(fedrot.FedrotError, match="logits"):
        fedrot.collect_fisher(fresh_model(name), [inputs()])


def test_a_failing_model_gets_its_mode_back() -> None:
    class Broken(nn.Module):
        config = SimpleNamespace()

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2).eval()

        def forward(self, x: Tensor) -> Any:
            raise ValueError("out of luck")

    model = Broken()
    with pytest.raises(ValueError, match="luck"):
        fedrot.collect_fisher(model, [{"x": torch.ones(1, 2)}])
    assert (model.training, model.inner.training) == (True, False)
