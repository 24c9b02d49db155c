"""Rounds of pre-norm models in other bases, whose residual stream is rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

import fedrot
from fedrot.aggregation import Mean, RegMean
from fedrot.strategies import (
    FedRot,
    Guard,
    Matching,
    OtherBasis,
    Server,
    match_at_client,
)
from tests.families import config_of, model_of, state_of, symmetry_for
from tests.fedrot.pairs import with_other_gains
from tests.models import State, near, with_separate_tables
from tests.strategies.aggregating import Client as ClientWithStatistics
from tests.strategies.aggregating import play as play_with_statistics
from tests.strategies.fakes import Client, FakeGrid, play, tensors_of

STREAM = fedrot.AlignmentOptions(fedrot.WHOLE_MODEL, canonical=True)
DETERMINISTIC = Server(deterministic=True)
NAMES = ["llama", "gpt2-classifier"]


def states(name: str) -> tuple[State, list[State]]:
    """Return a broadcast model, and the same function in three bases, one of them the broadcast's."""
    symmetry, base = symmetry_for(name), float32(state_of(name))
    folded = fedrot.canonical(state_of(name), symmetry)
    others = [fedrot.random_equivalent(folded, symmetry.rotated, s, fedrot.WHOLE_MODEL) for s in (1, 2)]
    return base, [base, *map(float32, others)]


def float32(tensors: State) -> State:
    return {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}


def built(name: str) -> nn.Module:
    """Return a float32 model whose tables are separate tensors."""
    model: nn.Module = with_separate_tables(model_of(name).float())
    return model


def answers(name: str, tensors: State) -> torch.Tensor:
    """Return the outputs of a model with these tensors on a few rows, float32."""
    model = built(name)
    model.load_state_dict(tensors)
    ids = torch.arange(1, 19).reshape(2, 9)
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=ids).logits
    return found


def silent(message: Any) -> Any:
    raise AssertionError("nobody is to be asked")


def matching(name: str) -> Client:
    """Return a node that matches on rows of its own."""
    app = ClientApp()

    def batches() -> Any:
        generator = torch.Generator().manual_seed(5)
        return [{"input_ids": torch.randint(1, 39, (8, 9), generator=generator)} for _ in range(3)]

    match_at_client(app, lambda *_: Matching(lambda: built(name), batches, STREAM))
    context = Context(1, 1, {}, RecordDict(), {})
    return lambda message: app(message, context)


@pytest.mark.parametrize("where", ["server", "probe", "clients"])
@pytest.mark.parametrize("name", NAMES)
def test_models_in_rotated_bases_are_averaged_to_the_function_that_all_of_them_have(
    name: str, where: str
) -> None:
    base, sent = states(name)
    others = OtherBasis(
        model=(lambda: built(name)) if where == "probe" else None,
        options=STREAM,
        at_clients=where == "clients",
    )
    nodes = [matching(name) if where == "clients" else silent] * 3
    strategy = FedRot(config_of(name), other_basis=others)
    arrays, metrics = play(strategy, base, sent, nodes)
    result = tensors_of(arrays)
    assert metrics["fedrot-replies-accepted"] == 3
    expected = answers(name, base)
    assert (answers(name, result) - expected).abs().max() <= 5e-3 * expected.abs().max()
    for fold in symmetry_for(name).folds:
        assert bool((result[fold.gain] == 1).all()), "the new model is canonical"
    # Permutations of the stream do not find the function.
    permuted = OtherBasis(options=fedrot.AlignmentOptions(fedrot.WHOLE_MODEL, canonical=False))
    lost, _ = play(FedRot(config_of(name), other_basis=permuted), base, sent, [silent] * 3)
    assert (answers(name, tensors_of(lost)) - expected).abs().max() > 0.1 * expected.abs().max()


def test_replies_in_the_broadcast_basis_become_canonical_beside_one_from_another() -> None:
    """A mean of canonical and of other tensors would be neither."""
    name = "llama"
    symmetry, base = symmetry_for(name), float32(state_of(name))
    folded = fedrot.canonical(base, symmetry)
    late = fedrot.random_equivalent(folded, symmetry.rotated, 3, fedrot.WHOLE_MODEL)
    near_by = [float32(near(base, 1e-3, seed)) for seed in (1, 2)]
    strategy = FedRot(config_of(name), other_basis=OtherBasis(options=STREAM))
    arrays, _ = play(strategy, base, [*near_by, late], [silent] * 3)
    result = tensors_of(arrays)
    own = [*(fedrot.canonical(update, symmetry) for update in near_by), folded]
    for key, found in result.items():
        expected = (10 * own[0][key] + 11 * own[1][key] + 12 * own[2][key]) / 33
        assert torch.allclose(found, expected, atol=1e-2), key
    assert all(bool((result[fold.gain] == 1).all()) for fold in symmetry.folds)


def test_without_a_reply_from_another_basis_nothing_becomes_canonical() -> None:
    """Then the round is that of a strategy without the setting, to the last bit."""
    name = "llama"
    base = float32(state_of(name))
    sent = [float32(near(base, 1e-3, seed)) for seed in (1, 2)]
    results = []
    for others in (OtherBasis(options=STREAM), None):
        strategy = FedRot(config_of(name), other_basis=others, server=DETERMINISTIC)
        results.append(tensors_of(play(strategy, base, sent, [silent] * 2)[0]))
    assert all(torch.equal(results[0][key], results[1][key]) for key in base)


def test_by_default_the_stream_is_rotated_where_it_can_be() -> None:
    for name, rotates in (("llama", True), ("gpt2-classifier", True), ("bert", False)):
        strategy = FedRot(config_of(name), other_basis=OtherBasis(lambda name=name: built(name)))
        base = float32(state_of(name))
        strategy.configure_train(1, ArrayRecord(base), ConfigRecord(), FakeGrid({1: silent, 2: silent}))
        assert strategy.other_bases.rotates is rotates
        assert (strategy.other_bases.evidence is None) is rotates


@pytest.mark.parametrize(("aggregation", "rotates"), [("regmean", True), ("fisher", False)])
def test_the_stream_is_rotated_if_the_statistics_of_replies_can_follow(
    aggregation: str, rotates: bool
) -> None:
    """Gram matrices can be brought to canonical form; diagonal Fisher information cannot."""
    permutations = fedrot.AlignmentOptions(("heads", "ffn"))
    others = OtherBasis(options=fedrot.AlignmentOptions(("residual", "heads", "ffn")))
    strategy = FedRot(
        config_of("llama"), other_basis=others, alignment=permutations, aggregation=aggregation
    )
    base = float32(state_of("llama"))
    strategy.configure_train(1, ArrayRecord(base), ConfigRecord(), FakeGrid({1: silent, 2: silent}))
    assert strategy.other_bases.rotates is rotates


def collected(name: str, tensors: State, seed: int) -> Any:
    """Return Gram matrices and means of a client's own rows."""
    model = built(name)
    model.load_state_dict(tensors)
    ids = torch.randint(1, 39, (16, 9), generator=torch.Generator().manual_seed(seed))
    return fedrot.collect_gram(model, [{"input_ids": ids}])


def turned_clients(name: str) -> tuple[State, list[State], list[ClientWithStatistics]]:
    """Return a broadcast model, clients near it, and the clients in rotated bases with other gains."""
    symmetry, base = symmetry_for(name), state_of(name)
    clients = [near(base, 0.05, seed) for seed in (1, 2, 3)]
    sent = []
    for seed, client in enumerate(clients):
        folded = fedrot.canonical(client, symmetry)
        turned = fedrot.random_equivalent(folded, symmetry.rotated, seed, ("residual",))
        update = float32(with_other_gains(turned, symmetry, seed))
        sent.append(ClientWithStatistics(update, 1.0 + seed, collected(name, update, seed)))
    return float32(base), list(map(float32, clients)), sent


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_regmean_of_rotated_clients_is_that_of_the_clients_as_they_were(name: str, others: bool) -> None:
    symmetry, (base, clients, sent) = symmetry_for(name), turned_clients(name)
    options = fedrot.AlignmentOptions(("residual",), anchor="global")
    how: dict[str, Any] = {"alignment": options}
    if others:
        how = {"alignment": replace(options, parts=()), "other_basis": OtherBasis(options=options)}
    strategy = FedRot(config_of(name), aggregation="regmean", **how)
    arrays, metrics = play_with_statistics(strategy, sent, base=base)
    assert metrics["fedrot-replies-accepted"] == 3
    result = tensors_of(arrays)
    assert all(bool((result[fold.gain] == 1).all()) for fold in symmetry.folds)
    # The clients were not rotated here, and their statistics are those of the aligned models. If all
    # replies come from other bases, the round is in the coordinates of the one with the largest weight.
    anchor = sent[-1].update if others else base
    regmean, mean = RegMean(), Mean()
    for seed, (client, own) in enumerate(zip(clients, sent, strict=True)):
        aligned = fedrot.align(client, anchor, symmetry, options).apply(client)
        regmean.add(aligned, own.weight, collected(name, aligned, seed))
        mean.add(aligned, own.weight)
    expected, averaged = (answers(name, found.result()) for found in (regmean, mean))
    found = answers(name, result)
    assert (found - expected).abs().max() <= 1e-3 * expected.abs().max()
    assert (averaged - expected).abs().max() > 1e-2 * expected.abs().max()


@pytest.mark.parametrize("keeps", ["plain", "merged"])
def test_a_guard_compares_with_the_mean_of_what_was_sent(keeps: str) -> None:
    name = "gpt2-classifier"
    base, _, sent = turned_clients(name)
    options = fedrot.AlignmentOptions(("residual",))
    gain = symmetry_for(name).folds[0].gain

    def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
        canonical = bool((tensors_of(arrays)[gain] == 1).all())
        return MetricRecord({"loss": float(canonical == (keeps == "plain"))})

    guard = Guard("loss", evaluate=evaluate)
    shared: dict[str, Any] = {"aggregation": "regmean", "alignment": options, "server": DETERMINISTIC}
    guarded = FedRot(config_of(name), **shared, guard=guard)
    found = tensors_of(play_with_statistics(guarded, sent, base=base)[0])
    if keeps == "merged":
        alone = FedRot(config_of(name), **shared)
        expected = tensors_of(play_with_statistics(alone, sent, base=base)[0])
    else:
        mean = Mean()
        for client in sent:
            mean.add(client.update, client.weight)
        expected = mean.result()
    assert all(torch.allclose(found[key], expected[key], atol=1e-5) for key in base)


def test_a_reply_without_means_is_dropped_with_the_name_of_what_is_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = "gpt2-classifier"
    base, _, sent = turned_clients(name)
    grams = {kind: v for kind, v in sent[0].statistics.items() if kind.startswith("gram")}
    strategy = FedRot(
        config_of(name),
        aggregation="regmean",
        alignment=fedrot.AlignmentOptions(("residual",)),
    )
    _, metrics = play_with_statistics(
        strategy, [replace(sent[0], statistics=grams), *sent[1:]], base=base
    )
    assert metrics["fedrot-replies-accepted"] == 2
    assert "input_mean" in caplog.text


def test_models_with_tied_tables_are_refused_before_clients_train() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=12, n_layer=1, n_head=2, n_embd=8, n_positions=4))
    strategy = FedRot(model.config, other_basis=OtherBasis(options=STREAM))
    grid = FakeGrid({1: silent, 2: silent})
    strategy.symmetry = fedrot.symmetry_of(model.config, model.state_dict())
    with pytest.raises(fedrot.SymmetryError, match="tie_word_embeddings=False"):
        strategy.configure_train(1, ArrayRecord(model.state_dict()), ConfigRecord(), grid)


def test_tied_tables_keep_permutations_by_default() -> None:
    """They are found in the model, and without one in arrays, where tied tables are two equal ones."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=12, n_layer=1, n_head=2, n_embd=8, n_positions=4, pad_token_id=0)
    tied = GPT2LMHeadModel(config)
    copied = {name: value.clone() for name, value in tied.state_dict().items()}
    separate = {**copied, "lm_head.weight": torch.randn(12, 8)}
    options = fedrot.AlignmentOptions(fedrot.WHOLE_MODEL)
    for others, base, rotates in (
        (OtherBasis(lambda: tied), copied, False),
        (OtherBasis(lambda: tied), separate, False),
        (OtherBasis(options=options), copied, False),
        (OtherBasis(options=options), separate, True),
        (OtherBasis(lambda: with_separate_tables(GPT2LMHeadModel(config))), separate, True),
    ):
        strategy = FedRot(config, other_basis=others)
        strategy.configure_train(1, ArrayRecord(base), ConfigRecord(), FakeGrid({1: silent, 2: silent}))
        assert strategy.other_bases.rotates is rotates


def test_post_norm_models_are_refused_before_clients_train() -> None:
    base = float32(state_of("bert"))
    strategy = FedRot(config_of("bert"), other_basis=OtherBasis(options=STREAM))
    with pytest.raises(fedrot.SymmetryError, match="cannot be rotated"):
        strategy.configure_train(1, ArrayRecord(base), ConfigRecord(), FakeGrid({1: silent, 2: silent}))
