"""RegMean from sums: the same model as from single Gram matrices, and under secure aggregation."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import FitIns, FitRes, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.common import recorddict_compat as compat
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_PARAMS_RECORD
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
)

import fedrot
from fedrot.aggregation import Mean, RegMean
from fedrot.errors import FedrotError, UpdateError
from fedrot.strategies import SecureRegMean, align_mod, regmean_mod
from fedrot.strategies.sums.client_sums import ASKED
from fedrot.strategies.sums.secure_regmean import _inverse
from tests.models import State, largest_difference, near
from tests.strategies.fakes import failure
from tests.strategies.test_secagg import SecureGrid

WEIGHTS = (10, 20, 30)
VOCABULARY, LENGTH = 96, 12

Statistics = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Case:
    """A small model of a family, and three clients' updates of it."""

    name: str

    def build(self) -> Any:
        sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "num_labels": 3, "pad_token_id": 0}
        torch.manual_seed(1)
        if self.name == "bert":
            model: nn.Module = BertForSequenceClassification(
                BertConfig(
                    **sizes,
                    hidden_size=32,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    intermediate_size=64,
                    initializer_range=0.2,
                )
            )
        else:
            config = GPT2Config(**sizes, n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH)
            model = GPT2ForSequenceClassification(config)
        return model.eval()

    def loaded(self, tensors: Mapping[str, Tensor]) -> Any:
        model = self.build().to(next(iter(tensors.values())).dtype)
        model.load_state_dict(dict(tensors))
        return model

    @property
    def start(self) -> State:
        return dict(self.build().state_dict())

    @property
    def updates(self) -> list[State]:
        return [near(self.start, 0.2, seed) for seed in range(len(WEIGHTS))]

    def grams(self, tensors: Mapping[str, Tensor], client: int) -> Statistics:
        return fedrot.collect_gram(self.loaded(tensors), rows(client))

    def symmetry(self) -> fedrot.Symmetry:
        model = self.build()
        return fedrot.symmetry_of(model.config, model.state_dict())


def rows(client: int, count: int = 64) -> list[dict[str, Tensor]]:
    """Return a client's texts; every client has words of its own."""
    generator = torch.Generator().manual_seed(client)
    ids = torch.randint(1 + 20 * client, 50 + 20 * client, (count, LENGTH), generator=generator)
    return [{"input_ids": ids % (VOCABULARY - 1) + 1, "attention_mask": torch.ones_like(ids)}]


BERT, GPT2 = Case("bert"), Case("gpt2")
CASES = pytest.mark.parametrize("case", [BERT, GPT2], ids=lambda case: case.name)


def merged(aggregator: Any, case: Case, updates: list[State] | None = None) -> State:
    """Return what an aggregation makes of the updates, which it sees one by one."""
    for client, update in enumerate(updates or case.updates):
        aggregator.add(update, WEIGHTS[client], case.grams(update, client))
    result: State = aggregator.result()
    return result


class Node(NumPyClient):
    def __init__(self, update: Mapping[str, Tensor], weight: int) -> None:
        self.update, self.weight = update, weight

    def fit(
        self, parameters: list[Any], config: dict[str, Any]
    ) -> tuple[list[Any], int, dict[str, Any]]:
        return [tensor.numpy() for tensor in self.update.values()], self.weight, {}


def partition(context: Context) -> int:
    return int(context.node_config["partition-id"])


def app_of(
    case: Case,
    updates: list[State] | None = None,
    statistics: Callable[[State, int], Statistics] | None = None,
    mods: Callable[[Any], list[Any]] = lambda mod: [mod],
) -> ClientApp:
    """Return clients that send these updates, with what ``statistics`` collects."""
    sent, collect = updates or case.updates, statistics or case.grams

    def collector(message: Message, context: Context, tensors: Mapping[str, Tensor]) -> Statistics:
        return collect(dict(tensors), partition(context))

    def client(context: Context) -> Any:
        return Node(sent[partition(context)], WEIGHTS[partition(context)]).to_client()

    return ClientApp(client_fn=client, mods=mods(regmean_mod(case.start, collector)))


def secured(mod: Any) -> list[Any]:
    return [secaggplus_mod, mod]


def strategy_of(case: Case, **given: Any) -> Any:
    three: dict[str, Any] = {"min_fit_clients": 3, "min_available_clients": 3, "fraction_evaluate": 0.0}
    return SecureRegMean(case.build(), **{**three, **given})


def run(
    app: ClientApp, strategy: FedAvg, case: Case, rounds: int = 1, secure: dict[str, Any] | None = None
) -> State:
    """Return the new model; with ``secure``, arguments of the workflow, its sums are masked."""

    def node(client: int) -> Callable[[Message], Message]:
        context = Context(1, 100 + client, {"partition-id": client}, RecordDict(), {})

        def answer(message: Message) -> Message:
            try:
                return app(copy.deepcopy(message), context)
            except UpdateError as error:
                logging.getLogger("flwr").warning("Client %d: %s", client, error)
                return failure(message)

        return answer

    grid = SecureGrid({100 + client: node(client) for client in range(len(WEIGHTS))})
    context = LegacyContext(
        Context(1, 1, {}, RecordDict(), {}), ServerConfig(num_rounds=rounds), strategy
    )
    fit: dict[str, Any] = {}
    if secure is not None:
        given: dict[str, Any] = {"max_weight": max(WEIGHTS), "timeout": 60, **secure}
        fit["fit_workflow"] = SecAggPlusWorkflow(3, 2, **given)
    DefaultWorkflow(**fit)(grid, context)
    arrays = context.state.array_records[MAIN_PARAMS_RECORD].to_numpy_ndarrays()
    return dict(zip(case.start, map(torch.from_numpy, arrays), strict=True))


def doubled(tensors: Mapping[str, Tensor]) -> State:
    return {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}


def apart(found: State, expected: State, start: State) -> float:
    """Return the largest error of a tensor, as a share of its change."""
    shares = []
    for name, tensor in expected.items():
        change = float((tensor.double() - start[name].double()).norm())
        if change:
            shares.append(float((found[name].double() - tensor.double()).norm()) / change)
    return max(shares)


# --- the same model ----------------------------------------------------------------------------------


@CASES
@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9])
def test_sums_give_the_model_of_regmean(case: Case, alpha: float) -> None:
    """In float64, and with weights that are not in proportion to rows."""
    updates = [doubled(update) for update in case.updates]
    start = ndarrays_to_parameters([tensor.numpy() for tensor in doubled(case.start).values()])
    strategy = strategy_of(case, alpha=alpha, initial_parameters=start)
    found = run(app_of(case, updates), strategy, case)
    expected = merged(RegMean(alpha), case, updates)
    assert largest_difference(found, expected) <= 1e-10
    assert strategy.notes == {}
    assert largest_difference(expected, merged(Mean(), case, updates)) > 3e-3


@CASES
def test_float32_models_come_back_in_float32(case: Case) -> None:
    found = run(app_of(case), strategy_of(case), case)
    assert largest_difference(found, merged(RegMean(), case)) <= 1e-6
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
        name: (t.dtype, t.shape) for name, t in case.start.items()
    }


def test_scales_change_nothing_but_rounding() -> None:
    expected = merged(RegMean(), BERT)
    for given in ({"headroom": 0.01}, {"headroom": 1e4}, {"batches": rows(2)}):
        found = run(app_of(BERT), strategy_of(BERT, **given), BERT)
        assert largest_difference(found, expected) <= 1e-6


def test_only_the_named_weights_are_regressed() -> None:
    name = "bert.encoder.layer.1.output.dense.weight"
    found = run(app_of(BERT), strategy_of(BERT, names=[name]), BERT)
    mean, regressed = merged(Mean(), BERT), merged(RegMean(), BERT)
    assert largest_difference(found, {**mean, name: regressed[name]}) <= 1e-6


# --- under secure aggregation ------------------------------------------------------------------------


#: Largest errors by number of rounds and bits, as a share of how far RegMean moves a weight. Measured:
#: .0033 and .0035, .0002 and .0002; .039 and .0007, .0025 and .00008. GPT-2's weights are small at its
#: start, and the gains of the first round expect larger changes; the second round knows the sums.
ERRORS = {
    "bert": {(1, 22): 5e-3, (2, 22): 5e-3, (1, 26): 4e-4, (2, 26): 4e-4},
    "gpt2": {(1, 22): 6e-2, (2, 22): 1.2e-3, (1, 26): 4e-3, (2, 26): 2e-4},
}


@CASES
@pytest.mark.parametrize("bits", [22, 26])
@pytest.mark.parametrize("rounds", [1, 2])
def test_the_masked_sums_give_the_model_up_to_rounding(case: Case, bits: int, rounds: int) -> None:
    """Flower's default are steps of 16 / 2^22; 26 bits have room for the sum of 64 clients."""
    expected, secure = merged(RegMean(), case), {"quantization_range": 2**bits}
    found = run(app_of(case, mods=secured), strategy_of(case), case, rounds, secure)
    assert apart(found, expected, case.start) <= ERRORS[case.name][rounds, bits]
    assert apart(merged(Mean(), case), expected, case.start) > 0.8


def test_clients_align_before_they_sum() -> None:
    """Scrambled clients and honest ones give the same model, from Gram matrices of aligned models."""
    symmetry, align = BERT.symmetry(), fedrot.AlignmentOptions(chance=0)
    honest = BERT.updates
    sent = [fedrot.random_equivalent(u, symmetry, 5 + i) for i, u in enumerate(honest)]
    aligned = [fedrot.align(u, BERT.start, symmetry, align).apply(u) for u in honest]
    expected = merged(RegMean(), BERT, aligned)

    def mods(mod: Any) -> list[Any]:
        return [secaggplus_mod, mod, align_mod(symmetry, align)]

    secure = {"quantization_range": 2**26}
    found = run(app_of(BERT, sent, mods=mods), strategy_of(BERT), BERT, secure=secure)
    assert apart(found, expected, BERT.start) <= 2e-3
    lost = run(app_of(BERT, sent, mods=secured), strategy_of(BERT), BERT, secure=secure)
    assert apart(lost, expected, BERT.start) > 0.5


def test_later_rounds_take_their_scales_from_the_sums() -> None:
    """The server's own batches are far off, and the second round no longer depends on them."""
    quiet = [{"inputs_embeds": 1e-3 * torch.ones(1, LENGTH, 32)}]
    strategy = strategy_of(BERT, batches=quiet)
    run(app_of(BERT), strategy, BERT)
    name = "bert.encoder.layer.1.output.dense.weight"
    (key,) = (key for key in strategy._squares if name in key)
    summed = sum(
        weight * BERT.grams(update, client)["gram"][name].diagonal().double()
        for client, (weight, update) in enumerate(zip(WEIGHTS, BERT.updates, strict=True))
    ) / sum(WEIGHTS)
    torch.testing.assert_close(strategy._squares[key], summed, rtol=1e-6, atol=1e-9)
    strategy._rescale()
    scaled = strategy._scales[key].double() ** 2 * summed
    assert float(scaled.max()) == pytest.approx(1 / strategy.headroom, rel=1e-5)


def test_a_client_that_would_be_clipped_counts_less(caplog: pytest.LogCaptureFixture) -> None:
    """One layer's inputs are a hundred times what the server expects, at one client."""
    logging.getLogger("flwr").propagate = True
    name = "bert.pooler.dense.weight"

    def loud(tensors: State, client: int) -> Statistics:
        found = {kind: dict(by_name) for kind, by_name in BERT.grams(tensors, client).items()}
        if client == 1:
            found["gram"][name] = 1e4 * found["gram"][name]
        return found

    secure = {"quantization_range": 2**26}
    found = run(app_of(BERT, statistics=loud, mods=secured), strategy_of(BERT), BERT, secure=secure)
    assert caplog.text.count("this client counts less in this layer") == 1
    assert f"The sums of '{name}' reach" in caplog.text
    others = {n: t for n, t in merged(RegMean(), BERT).items() if n != name}
    assert apart({n: found[n] for n in others}, others, BERT.start) <= 1e-3
    # It outweighs the others in its layer, as it would if nothing had been clipped.
    own, usual = BERT.updates[1][name], merged(RegMean(), BERT)[name]
    assert float((found[name] - own).norm()) < 0.75 * float((usual - own).norm())


def test_units_that_nobody_has_used_keep_the_received_weights(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("flwr").propagate = True
    name = "bert.encoder.layer.0.output.dense.weight"

    def dead(tensors: State, client: int) -> Statistics:
        found = {kind: dict(by_name) for kind, by_name in BERT.grams(tensors, client).items()}
        faint = torch.ones(64)
        faint[:5] = 1e-2
        found["gram"][name] = faint[:, None] * found["gram"][name] * faint
        return found

    strategy = strategy_of(BERT)
    found = run(app_of(BERT, statistics=dead, mods=secured), strategy, BERT, secure={})
    assert torch.equal(found[name][:, :5].float(), BERT.start[name][:, :5])
    assert strategy.notes == {
        name: "5 of 64 units of its input were near 0 at every client; there the weights are the "
        "received ones"
    }
    assert f"RegMean, '{name}' (1 notes in all)" in caplog.text


def test_rounding_that_makes_a_sum_singular_is_raised_to_what_alpha_leaves() -> None:
    """The exact matrix, with a diagonal of 1, has no eigenvalue below ``1 - alpha``."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 24, generator=generator, dtype=torch.float64)
    gram = rows.mT @ rows
    exact = 0.9 * gram + 0.1 * torch.diag(gram.diagonal())
    inverse, unseen = _inverse(exact, 0.9, 1e-9)
    torch.testing.assert_close(inverse @ exact, torch.eye(24, dtype=torch.float64))
    assert unseen == 0
    scale = gram.diagonal().rsqrt()
    even = scale[:, None] * exact * scale
    values, vectors = torch.linalg.eigh(even)
    for smallest in (-0.05, 0.001):
        noisy = even + (smallest - values[0]) * torch.outer(vectors[:, 0], vectors[:, 0])
        found, _ = _inverse(noisy, 0.9, 1e-9)
        assert float(torch.linalg.eigvalsh(noisy)[0]) == pytest.approx(smallest)
        assert 0 < float(torch.linalg.eigvalsh(found)[-1]) <= 12
        assert float((found - torch.linalg.inv(even)).norm() / torch.linalg.inv(even).norm()) < 0.1


def test_units_that_the_server_did_not_expect_are_summed_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logging.getLogger("flwr").propagate = True
    strategy = strategy_of(BERT)
    for squares in strategy._squares.values():
        squares[:3] = 1e-12
    strategy._rescale()
    secure = {"quantization_range": 2**26}
    found = run(app_of(BERT, mods=secured), strategy, BERT, secure=secure)
    assert apart(found, merged(RegMean(), BERT), BERT.start) <= 1e-3
    assert "counts less" not in caplog.text


def test_noise_in_a_layer_without_evidence_stays_bounded() -> None:
    """Mean squares as small as the rounding: no weight runs away."""
    faint = {
        kind: {name: 1e-3 * gram for name, gram in by_name.items()}
        for kind, by_name in BERT.grams(BERT.start, 0).items()
    }
    found = run(
        app_of(BERT, statistics=lambda *_: faint, mods=secured), strategy_of(BERT), BERT, secure={}
    )
    largest = max(float((u[n] - t).abs().max()) for u in BERT.updates for n, t in BERT.start.items())
    assert largest_difference({n: t.float() for n, t in found.items()}, BERT.start) <= 20 * largest


# --- what is refused ---------------------------------------------------------------------------------


def instruction(case: Case, strategy: Any) -> Message:
    """Return the request that the strategy sends to a client."""

    class Manager:
        def num_available(self) -> int:
            return 3

        def sample(self, **given: Any) -> list[Any]:
            return [None]

    start = ndarrays_to_parameters([tensor.numpy() for tensor in case.start.values()])
    ((_, fit),) = strategy.configure_fit(1, start, Manager())
    return Message(compat.fitins_to_recorddict(fit, True), dst_node_id=1, message_type="train")


def answer(app: ClientApp, message: Message) -> FitRes:
    context = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
    return compat.recorddict_to_fitres(app(message, context).content, True)


def test_what_a_client_sends_is_no_weight() -> None:
    found = answer(app_of(BERT), instruction(BERT, strategy_of(BERT)))
    arrays = parameters_to_ndarrays(found.parameters)
    names, update = list(BERT.start), BERT.updates[0]
    regressed = BERT.grams(BERT.start, 0)["gram"]
    for name, array in zip(names, arrays, strict=False):
        assert np.array_equal(array, update[name].numpy()) == (name not in regressed)
    # Query, key and value read one input; upper triangles of 32 or 64 units.
    sizes = [array.size for array in arrays[len(names) :]]
    assert sorted(sizes) == [32 * 33 // 2] * (2 * 3 + 2) + [64 * 65 // 2] * 2


def changed(gram: Callable[[Tensor], Any], name: str) -> Callable[[State, int], Statistics]:
    def statistics(tensors: State, client: int) -> Statistics:
        found = {kind: dict(by_name) for kind, by_name in BERT.grams(tensors, client).items()}
        value = gram(found["gram"].pop(name))
        if value is not None:
            found["gram"][name] = value
        return found

    return statistics


KEY = "bert.encoder.layer.0.attention.self.key.weight"
POOLER = "bert.pooler.dense.weight"
BAD_STATISTICS = {
    "none": (lambda *_: {}, r"The Gram matrix of '.*' is missing, and the server asks for it"),
    "one is missing": (changed(lambda gram: None, KEY), f"The Gram matrix of '{KEY}' is missing"),
    "diagonal": (changed(torch.diagonal, POOLER), r"shape \[32\]; .* it has to be full, \[32, 32\]"),
    "not finite": (changed(lambda gram: gram * torch.nan, POOLER), "hold NaN, Inf"),
    "not a Gram matrix": (changed(lambda gram: -gram, POOLER), "negative eigenvalues"),
    "not shared": (changed(lambda gram: 2 * gram, KEY), "read one input at the server, and have diff"),
    "trained rows": (
        lambda tensors, client: {**BERT.grams(tensors, client), "trained": {POOLER: torch.tensor(True)}},
        "cannot be left out of masked sums",
    ),
}


@pytest.mark.parametrize("bad", BAD_STATISTICS)
def test_bad_statistics_are_refused_at_the_client(bad: str) -> None:
    statistics, pattern = BAD_STATISTICS[bad]
    app = app_of(BERT, statistics=statistics)
    with pytest.raises(UpdateError, match=pattern):
        answer(app, instruction(BERT, strategy_of(BERT)))


def test_bad_updates_are_refused_at_the_client() -> None:
    message = instruction(BERT, strategy_of(BERT))
    broken = {**BERT.updates[0], POOLER: torch.full((32, 32), torch.nan)}
    with pytest.raises(UpdateError, match=f"'{POOLER}'"):
        answer(app_of(BERT, [broken]), message)
    wide = {**BERT.updates[0], POOLER: torch.zeros(32, 33)}
    with pytest.raises(UpdateError, match=f"'{POOLER}'"):
        answer(app_of(BERT, [wide]), message)
    short = dict(list(BERT.updates[0].items())[:-1])
    with pytest.raises(UpdateError, match="tensors without names, but regmean_mod was given"):
        answer(app_of(BERT, [short]), message)


def test_a_broken_client_drops_out_of_the_masked_sums() -> None:
    sent = BERT.updates
    sent[1] = {name: tensor * torch.nan for name, tensor in sent[1].items()}
    secure = {"quantization_range": 2**26}
    found = run(app_of(BERT, sent, mods=secured), strategy_of(BERT), BERT, secure=secure)
    others = RegMean()
    for client in (0, 2):
        update = BERT.updates[client]
        others.add(update, WEIGHTS[client], BERT.grams(update, client))
    assert apart(found, others.result(), BERT.start) <= 1e-3


def test_the_order_of_mods_is_checked() -> None:
    app = app_of(BERT, mods=lambda mod: [mod, secaggplus_mod])
    with pytest.raises(FedrotError, match=r"Write mods=\[secaggplus_mod, regmean_mod\(...\)\]"):
        answer(app, instruction(BERT, strategy_of(BERT)))


def test_clients_without_the_mod_end_the_run_with_what_to_do() -> None:
    for secure in (None, {}):
        mods: list[Any] = [] if secure is None else [secaggplus_mod]
        app = app_of(BERT, mods=lambda _, mods=mods: mods)
        with pytest.raises(FedrotError, match=r"let each client run regmean_mod\(model.state_dict\(\)"):
            run(app, strategy_of(BERT), BERT, secure=secure)


def test_requests_of_other_strategies_pass_unchanged() -> None:
    message = instruction(BERT, strategy_of(BERT))
    fit = compat.recorddict_to_fitins(message.content, True)
    plain = compat.fitins_to_recorddict(FitIns(fit.parameters, {"lr": 0.1}), True)
    found = answer(app_of(BERT), Message(plain, dst_node_id=1, message_type="train"))
    arrays = parameters_to_ndarrays(found.parameters)
    assert all(map(np.array_equal, arrays, (t.numpy() for t in BERT.updates[0].values())))


@pytest.mark.parametrize("given", [b"", b"\0" * 8, "text", 3])
def test_an_unreadable_request_is_refused(given: Any) -> None:
    message = instruction(BERT, strategy_of(BERT))
    message.content.config_records["fitins.config"][ASKED] = given
    with pytest.raises(FedrotError, match=r"cannot be read, .* same version of fedrot"):
        answer(app_of(BERT), message)


def test_impossible_arguments_are_refused() -> None:
    for given in ({"alpha": 1.0}, {"alpha": -0.1}, {"headroom": 0.0}, {"headroom": float("nan")}):
        with pytest.raises(FedrotError, match=r"alpha is 0 to 0\.99, headroom positive"):
            strategy_of(BERT, **given)
    with pytest.raises(FedrotError, match="None of the names are weights of linear layers"):
        strategy_of(BERT, names=["bert.pooler.dense.bias"])
    with pytest.raises(FedrotError, match="is bfloat16, which NumPy lacks"):
        SecureRegMean(nn.Linear(3, 2).bfloat16())
    with pytest.raises(FedrotError, match="give SecureRegMean batches"):
        SecureRegMean(nn.Linear(3, 2))


def test_the_server_says_at_its_start_what_clients_need(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("flwr").propagate = True
    caplog.set_level(logging.INFO)
    strategy_of(BERT)
    assert "14 layers; every client needs fedrot.strategies.regmean_mod(" in caplog.text
