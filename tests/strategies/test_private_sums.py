"""Private sums: every client's part is bounded, the noise is the documented one, epsilon is exact."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import FitRes, parameters_to_ndarrays
from flwr.common.secure_aggregation.quantization import quantize
from flwr.compat.common import recorddict_compat as compat
from scipy import integrate, stats
from torch import Tensor

from fedrot.aggregation import RegMean
from fedrot.errors import FedrotError, UpdateError
from fedrot.strategies import Privacy, gaussian_epsilon
from fedrot.strategies.sums.client_sums import clipped
from tests.models import State, largest_difference, near
from tests.strategies.test_secure_regmean import (
    BERT,
    WEIGHTS,
    Node,
    apart,
    app_of,
    instruction,
    partition,
    run,
    secured,
    strategy_of,
)

FAINT = 1e-9  # A noise multiplier that changes nothing that is tested.
Parts = list[np.ndarray[Any, Any]]


def private(**given: Any) -> Any:
    """Return a strategy with privacy; its noise is faint unless given."""
    return strategy_of(
        BERT, privacy=Privacy(**{"clipping_norm": 1.0, "noise_multiplier": FAINT, "seed": 0, **given})
    )


def sent(strategy: Any, client: int, updates: list[State] | None = None, **options: Any) -> FitRes:
    """Return a client's reply to a strategy's request."""
    context = Context(1, 1, {"partition-id": client}, RecordDict(), {})
    app = app_of(BERT, updates, **options)
    return compat.recorddict_to_fitres(app(instruction(BERT, strategy), context).content, True)


def own_part(reply: FitRes) -> Parts:
    """Return what a reply adds to the sums: weights that are not regressed less the received ones."""
    arrays = parameters_to_ndarrays(reply.parameters)
    regressed = BERT.grams(BERT.start, 0)["gram"]
    received = [
        np.zeros(()) if name in regressed else tensor.double().numpy()
        for name, tensor in BERT.start.items()
    ]
    received += [np.zeros(())] * (len(arrays) - len(received))
    return [array - start for array, start in zip(arrays, received, strict=True)]


def length(parts: Parts) -> float:
    return math.sqrt(sum(float((part**2).sum()) for part in parts))


# --- every client's part is bounded ------------------------------------------------------------------


@pytest.mark.parametrize("norm", [1e-3, 1.0, 10.0])
def test_what_a_client_adds_is_no_longer_than_the_norm(norm: float) -> None:
    """However far it has trained: the sum without it, or with another's part, is as near as promised."""
    strategy = private(clipping_norm=norm)
    for scale in (0.2, 1e3):
        updates = [near(BERT.start, scale, seed) for seed in range(3)]
        parts = [own_part(sent(strategy, client, updates)) for client in range(3)]
        assert all(length(part) <= norm for part in parts)
        assert length(parts[0]) >= 0.999 * norm
        for one in parts[1:]:
            assert length([a - b for a, b in zip(parts[0], one, strict=True)]) <= 2 * norm


def test_the_whole_contribution_is_one_vector_that_keeps_its_direction() -> None:
    long, short = (own_part(sent(private(clipping_norm=norm), 0)) for norm in (1e9, 1.0))
    for whole, cut in zip(long, short, strict=True):
        np.testing.assert_allclose(cut * length(long), whole, rtol=1e-6, atol=1e-6 * np.abs(whole).max())
    unclipped = parameters_to_ndarrays(sent(strategy_of(BERT), 0).parameters)
    clipped_far = parameters_to_ndarrays(sent(private(clipping_norm=1e9), 0).parameters)
    for one, other in zip(unclipped, clipped_far, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("seed", range(20))
def test_clipping_leaves_room_for_the_rounding_of_secure_aggregation(seed: int) -> None:
    """Flower's own rounding, of parts that are as long as they may be."""
    draw = torch.Generator().manual_seed(seed)
    received = {"w": torch.randn(40, 30, generator=draw), "b": torch.randn(40, generator=draw)}
    update = {n: t + torch.randn(t.shape, generator=draw) for n, t in received.items()}
    products = {"w": 5 * torch.randn(40, 30, generator=draw, dtype=torch.float64)}
    grams = [torch.randn(200, generator=draw, dtype=torch.float64)]
    norm, bits = 2.0, 12
    step = 16 / 2**bits
    tensors, sums = clipped(products, grams, update, received, norm, step)
    arrays = [tensors["w"].numpy(), tensors["b"].numpy(), sums[0].numpy()]
    rounded = [q * step - 8 for q in quantize(arrays, 8.0, 2**bits)]
    part = [rounded[0], rounded[1] - received["b"].double().numpy(), rounded[2]]
    assert length(part) <= norm
    assert length([arrays[0], arrays[1] - received["b"].double().numpy(), arrays[2]]) >= 0.5 * norm


def test_integers_are_sent_as_received_and_nothing_is_divided_by_zero() -> None:
    received = {"w": torch.ones(3, 3), "count": torch.tensor([5])}
    update = {"w": torch.ones(3, 3), "count": torch.tensor([9])}
    tensors, sums = clipped({"w": torch.zeros(3, 3)}, [torch.zeros(6)], update, received, 1.0, 0.0)
    assert torch.equal(tensors["count"], received["count"])
    assert not tensors["w"].any()
    assert not sums[0].any()


def test_rounding_that_can_exceed_the_norm_is_refused() -> None:
    with pytest.raises(UpdateError, match="Give SecAggPlusWorkflow a larger quantization_range"):
        clipped({}, [torch.ones(100)], {}, {}, 1.0, 0.2)


def test_clients_send_one_weight_and_no_metrics() -> None:
    class Talking(Node):
        def fit(self, *given: Any) -> tuple[list[Any], int, dict[str, Any]]:
            arrays, weight, _ = super().fit(*given)
            return arrays, weight, {"rows-of-class-3": 17}

    def client(context: Context) -> Any:
        return Talking(BERT.updates[partition(context)], WEIGHTS[partition(context)]).to_client()

    from fedrot.strategies import regmean_mod

    mod = regmean_mod(BERT.start, lambda m, c, tensors: BERT.grams(dict(tensors), partition(c)))
    app = ClientApp(client_fn=client, mods=[mod])
    for strategy, weights, metrics in (
        (private(), [1, 1, 1], {}),
        (strategy_of(BERT), [*WEIGHTS], {"rows-of-class-3": 17}),
    ):
        replies = []
        for place in range(3):
            context = Context(1, 1, {"partition-id": place}, RecordDict(), {})
            content = app(instruction(BERT, strategy), context).content
            replies.append(compat.recorddict_to_fitres(content, True))
        assert [reply.num_examples for reply in replies] == weights
        assert [reply.metrics for reply in replies] == [metrics] * 3


def released(strategy: Any) -> list[list[Tensor]]:
    """Return a list that will hold the means before noise of every round."""
    before: list[list[Tensor]] = []
    noisy: Callable[..., list[Tensor]] = strategy._noisy

    def watched(means: list[Tensor], deviation: float) -> list[Tensor]:
        before.append(means)
        return noisy(means, deviation)

    strategy._noisy = watched
    return before


@pytest.mark.parametrize("secure", [None, {"quantization_range": 2**22}])
def test_the_masked_sum_without_a_client_is_as_near_as_promised(secure: Any) -> None:
    """A client that adds nothing has learned nothing, and has seen no inputs."""
    norm, mods = 5.0, secured if secure else lambda mod: [mod]
    sums = []
    for absent in (False, True):
        updates = BERT.updates
        if absent:
            updates[1] = BERT.start

        def grams(tensors: State, client: int, absent: bool = absent) -> Any:
            found = BERT.grams(tensors, client)
            share = 0.0 if absent and client == 1 else 1e3
            return {"gram": {name: share * gram for name, gram in found["gram"].items()}}

        strategy = private(clipping_norm=norm)
        before = released(strategy)
        run(app_of(BERT, updates, statistics=grams, mods=mods), strategy, BERT, secure=secure)
        sums.append([3 * mean.double().numpy() for mean in before[0]])
    apart = length([one - other for one, other in zip(*sums, strict=True)])
    assert 0.9 * norm <= apart <= norm * (1 + 1e-9)


# --- the noise ---------------------------------------------------------------------------------------


def test_the_noise_is_the_documented_one() -> None:
    norm, multiplier = 3.0, 0.7
    strategy = private(clipping_norm=norm, noise_multiplier=multiplier, seed=5)
    before, after = released(strategy), []
    solved = strategy._solved
    strategy._solved = lambda means, deviation: (after.append(means), solved(means, deviation))[1]
    run(app_of(BERT), strategy, BERT)
    noise = [
        (noisy.double() - mean.double()).flatten()
        for noisy, mean in zip(after[0], before[0], strict=True)
        if noisy.dtype == torch.float64
    ]
    names = [name for name, tensor in BERT.start.items() if tensor.is_floating_point()]
    assert len(noise) == len(names) + len(after[0]) - len(BERT.start)
    units = torch.cat(noise).numpy() / (multiplier * norm / 3)
    count = len(units)
    assert count > 20_000
    # Mean and variance within five standard errors, and the whole distribution.
    assert abs(units.mean()) <= 5 / math.sqrt(count)
    assert abs(units.var() - 1) <= 5 * math.sqrt(2 / count)
    assert stats.kstest(units, "norm").pvalue > 1e-3
    neighbours = float(np.corrcoef(units[1:], units[:-1])[0, 1])
    assert abs(neighbours) <= 5 / math.sqrt(count)


def test_noise_differs_between_rounds_and_between_runs() -> None:
    def drawn(seed: int | None) -> list[Tensor]:
        strategy = private(seed=seed)
        return [strategy._noisy([torch.zeros(3)], 1.0)[0] for _ in range(2)]

    same, again = drawn(4), drawn(4)
    assert torch.equal(same[0], again[0])
    assert not torch.equal(same[0], same[1])
    assert not torch.equal(drawn(None)[0], drawn(None)[0])


# --- the model ---------------------------------------------------------------------------------------


def equal_weights() -> State:
    aggregator = RegMean()
    for client, update in enumerate(BERT.updates):
        aggregator.add(update, 1.0, BERT.grams(update, client))
    return aggregator.result()


def test_without_clipping_and_noise_it_is_regmean_of_equal_weights() -> None:
    strategy = private(clipping_norm=1e6, noise_multiplier=1e-16)
    found = run(app_of(BERT), strategy, BERT)
    assert largest_difference(found, equal_weights()) <= 1e-6
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        name: tensor.dtype for name, tensor in BERT.start.items()
    }


def test_masked_it_is_the_same_model_up_to_rounding() -> None:
    strategy, secure = private(clipping_norm=1e6, noise_multiplier=1e-16), {"quantization_range": 2**26}
    found = run(app_of(BERT, mods=secured), strategy, BERT, secure=secure)
    assert apart(found, equal_weights(), BERT.start) <= 1e-3


def test_much_noise_leaves_a_model_with_bounded_weights() -> None:
    found = run(app_of(BERT), private(noise_multiplier=100.0), BERT, rounds=2)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in found.values())


# --- epsilon -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-10])
@pytest.mark.parametrize("multiplier", [0.3, 1.0, 4.0, 50.0])
def test_epsilon_by_a_numerical_integral(multiplier: float, delta: float) -> None:
    """The delta of an epsilon is the integral of ``max(0, p - e^epsilon q)`` of the two densities."""
    epsilon = gaussian_epsilon(multiplier, delta)
    assert epsilon > 0
    start = epsilon * multiplier**2 + 0.5  # From here on p is the larger.

    def excess(x: float) -> float:
        p, q = (math.exp(-((x - mean) ** 2) / (2 * multiplier**2)) for mean in (1, 0))
        return (p - math.exp(epsilon) * q) / (multiplier * math.sqrt(2 * math.pi))

    found, _ = integrate.quad(excess, start, start + 40 * multiplier, epsabs=0, epsrel=1e-9, limit=500)
    assert found == pytest.approx(delta, rel=1e-5)


@pytest.mark.parametrize("multiplier", [0.7, 2.0])
def test_two_rounds_by_a_double_integral(multiplier: float) -> None:
    epsilon, delta = gaussian_epsilon(multiplier, 1e-3, rounds=2), 1e-3
    axis = np.linspace(-9 * multiplier, 1 + 9 * multiplier, 6001)
    width = axis[1] - axis[0]
    p, q = (stats.norm.pdf(axis, mean, multiplier) for mean in (1, 0))
    found = 0.0
    for one, other in zip(p, q, strict=True):
        found += np.clip(one * p - math.exp(epsilon) * other * q, 0, None).sum() * width**2
    assert found == pytest.approx(delta, rel=1e-3)


def test_epsilon_of_rounds_of_replaced_clients_and_of_no_secret() -> None:
    privacy = Privacy(clipping_norm=2.0, noise_multiplier=3.0)
    assert privacy.epsilon(1e-5, 9) == pytest.approx(gaussian_epsilon(1.0, 1e-5))
    assert privacy.epsilon(1e-5, replaced=True) == pytest.approx(gaussian_epsilon(1.5, 1e-5))
    assert gaussian_epsilon(100.0, 0.5) == 0
    # Below Dwork and Roth's bound, which holds for epsilon below 1.
    assert gaussian_epsilon(6.0, 1e-5) < math.sqrt(2 * math.log(1.25e5)) / 6.0 < 1


def test_epsilon_falls_with_noise_and_grows_with_rounds() -> None:
    grid = [0.05, 0.5, 1.0, 5.0, 100.0]
    for fewer, more in pairwise(grid):
        assert gaussian_epsilon(fewer, 1e-6) > gaussian_epsilon(more, 1e-6)
    assert gaussian_epsilon(1.0, 1e-6, 1) < gaussian_epsilon(1.0, 1e-6, 2)


# --- what is refused ---------------------------------------------------------------------------------


def test_what_would_void_the_guarantee_is_refused() -> None:
    privacy = Privacy(1.0, 1.0)
    with pytest.raises(FedrotError, match=r"Give fraction_evaluate=0\.0, and evaluate at the server"):
        strategy_of(BERT, privacy=privacy, fraction_evaluate=1.0)
    with pytest.raises(FedrotError, match="Give no fit_metrics_aggregation_fn"):
        strategy_of(BERT, privacy=privacy, fit_metrics_aggregation_fn=lambda metrics: {})


def test_clients_of_unlike_weights_end_the_round() -> None:
    strategy = private()
    replies = [(None, sent(strategy, client)) for client in range(3)]
    replies[1][1].num_examples = 2
    with pytest.raises(FedrotError, match=r"weights \[1, 2\].*let every client run regmean_mod"):
        strategy.aggregate_fit(1, replies, [])


def test_mods_that_clip_behind_are_refused_as_ever() -> None:
    app = app_of(BERT, mods=lambda mod: [mod, secaggplus_mod])
    message: Message = instruction(BERT, private())
    context = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
    with pytest.raises(FedrotError, match=r"Write mods=\[secaggplus_mod, regmean_mod"):
        app(message, context)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_impossible_arguments_are_refused(value: float) -> None:
    with pytest.raises(FedrotError, match="clipping_norm is"):
        Privacy(value, 1.0)
    with pytest.raises(FedrotError, match="noise_multiplier is"):
        Privacy(1.0, value)
    for given in ((value, 1e-5, 1), (1.0, value, 1), (1.0, 1.0, 1), (1.0, 1e-5, 0)):
        with pytest.raises(FedrotError, match="a delta above 0 and below 1, and at least 1 round"):
            gaussian_epsilon(*given)
