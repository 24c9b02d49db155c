"""Every method of averaging adapters keeps one contract; oracles are dense products in
float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedrot.errors import FedrotError, UpdateError
from fedrot.lora import (
    AdapterOptions,
    AdapterUpdate,
    LoraSettings,
    average_adapters,
    fitted,
)
from fedrot.lora.gauges import GAUGES, Wanted, rotated
from fedrot.lora.methods import METHODS
from fedrot.lora.module_sums import ModuleSums
from fedrot.lora.products import ProductSum, decomposed
from tests.fedrot.oracles import eye, normal, seeded
from tests.models import State, copied

Adapter = State
IN, OUT = 9, 7
MODULES = {
    "base_model.model.layer.query": (IN, OUT),
    "base_model.model.classifier": (IN, 2),
}
QUERY, HEAD = MODULES
BIAS = "base_model.model.head.bias"
SETTINGS = LoraSettings(alpha=6.0)
SCALES = (SETTINGS, LoraSettings(alpha=2.0), LoraSettings(alpha=3.0, use_rslora=True))
EXACT = AdapterOptions("exact")


def drawing(seed: int) -> Callable[..., Tensor]:
    generator = seeded(seed)
    return lambda *shape: normal(generator, *shape)


def factor(module: str, name: str = "A") -> str:
    return f"{module}.lora_{name}.weight"


def adapter(seed: int, rank: int = 3, start: Adapter | None = None) -> Adapter:
    """Return an adapter with random factors, near those of a start if there is one."""
    drawn = drawing(seed)
    found = {}
    for module, (width, outputs) in MODULES.items():
        found[factor(module)] = drawn(rank, width)
        found[factor(module, "B")] = drawn(outputs, rank)
    found[BIAS] = drawn(4)
    return (
        found
        if start is None
        else {name: start[name] + 0.3 * t for name, t in found.items()}
    )


def pair(
    seed: int, rank: int = 4, width: int = 60, outputs: int = 50, module: str = "q"
) -> Adapter:
    """Return one pair of random factors."""
    drawn = drawing(seed)
    return {
        factor(module): drawn(rank, width),
        factor(module, "B"): drawn(outputs, rank),
    }


def product(tensors: Adapter, module: str, settings: LoraSettings = SETTINGS) -> Tensor:
    """Return the dense update of a module: the oracle."""
    a = tensors[factor(module)].flatten(1)
    b = tensors[factor(module, "B")].flatten(1)
    return settings.scale(module, len(a)) * b @ a


def truncated(dense: Tensor, rank: int) -> Tensor:
    u, s, vt = torch.linalg.svd(dense, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vt[:rank]


def scrambled(tensors: Adapter, seed: int) -> Adapter:
    """Return factors with the same products: ``G A`` and ``B G^-1`` for random
    invertible ``G``.
    """
    drawn = drawing(seed)
    found = dict(tensors)
    for module in MODULES:
        a = factor(module)
        b = factor(module, "B")
        rank = len(tensors[a])
        g = drawn(rank, rank) + 3 * torch.eye(rank)
        found[a], found[b] = g @ tensors[a], tensors[b] @ torch.linalg.inv(g)
    return found


def updates(
    adapters: Sequence[Adapter], weights: Sequence[float] = (1, 2, 5)
) -> list[AdapterUpdate]:
    return [
        AdapterUpdate(a, w, SETTINGS) for a, w in zip(adapters, weights, strict=False)
    ]


def dense_mean(given: Sequence[AdapterUpdate], module: str) -> Tensor:
    total = sum(update.weight for update in given)
    products = [
        u.weight / total * product(dict(u.tensors), module, u.settings) for u in given
    ]
    return torch.stack(products).sum(0)


@dataclass(frozen=True)
class Client:
    """An adapter, and by module the inputs ``[rows, in]`` of its first factor."""

    tensors: Adapter
    weight: float
    settings: LoraSettings

    def update(self) -> AdapterUpdate:
        return AdapterUpdate(self.tensors, self.weight, self.settings)


def clients(seed: int, ranks: Sequence[int] = (3, 3, 3)) -> list[Client]:
    return [
        Client(adapter(seed + n, rank), n + 1.0, SCALES[n % 3])
        for n, rank in enumerate(ranks)
    ]


def of_factors(sent: Sequence[Client], module: str, rank: int) -> Tensor:
    """Return the product of the means of the factors, in which ``B`` includes the
    scale.
    """
    total = sum(one.weight for one in sent)
    a = torch.zeros(rank, MODULES[module][0]).double()
    b = torch.zeros(MODULES[module][1], rank).double()
    for one in sent:
        a += one.weight / total * one.tensors[factor(module)]
        b += (
            one.weight
            / total
            * one.settings.scale(module, rank)
            * one.tensors[factor(module, "B")]
        )
    return b @ a


def of_products(sent: Sequence[Client], module: str, rank: int) -> Tensor:
    return truncated(dense_mean([one.update() for one in sent], module), rank)


ORACLES = {"mean": of_factors, "exact": of_products}
OWN_GAUGES = ("keep-a", "previous", "none")
CASES = [
    AdapterOptions(name, gauge)
    for name in ORACLES
    for gauge in (OWN_GAUGES if METHODS[name].used else ("keep-a",))
]
EVERY = pytest.mark.parametrize("options", CASES, ids=str)


def close(
    found: Adapter, module: str, expected: Tensor, tolerance: float = 1e-6
) -> None:
    apart = torch.linalg.norm(product(found, module) - expected)
    assert float(apart) <= tolerance * max(1.0, float(torch.linalg.norm(expected)))


def averaged(sent: Sequence[Client], options: AdapterOptions, **given: Any) -> Adapter:
    return average_adapters([one.update() for one in sent], SETTINGS, options, **given)[
        0
    ]


def test_every_method_and_gauge_has_a_case() -> None:
    assert {
        name for name, method in METHODS.items() if method.sums is ModuleSums
    } == ORACLES.keys()
    assert set(OWN_GAUGES) == GAUGES.keys() - {
        "mean"
    }  # The laboratory's, if it is imported.


@EVERY
@settings(deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 10_000),
    ranks=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    rank=st.integers(1, 6),
    received=st.booleans(),
)
def test_the_product_is_the_oracle_s_in_any_order_scale_and_coordinates(
    options: AdapterOptions, seed: int, ranks: Any, rank: int, received: bool
) -> None:
    if not options.averaging.any_rank:
        ranks = [rank] * len(ranks)
        rank = rank
    sent = clients(seed, ranks)
    previous = adapter(seed + 7, rank) if received else None
    asked = [one.update() for one in sent]
    found, report = average_adapters(asked, SETTINGS, options, previous, rank)
    other = [replace(one, weight=8 * one.weight) for one in sent[::-1]]
    if options.averaging.any_rank:
        other = [
            replace(one, tensors=scrambled(one.tensors, n))
            for n, one in enumerate(other)
        ]
    again = averaged(other, options, previous=previous, rank=rank)
    for module, (width, outputs) in MODULES.items():
        assert found[factor(module)].shape == (rank, width)
        assert found[factor(module, "B")].shape == (outputs, rank)
        close(found, module, ORACLES[options.method](sent, module, rank))
        close(again, module, product(found, module))
        dense = dense_mean(asked, module)
        error = torch.linalg.norm(dense - product(found, module)) / torch.linalg.norm(
            dense
        )
        assert report.error[module] == pytest.approx(float(error), abs=1e-6)
        assert report.lost[module] == 0
        naive = report.error_of_factors[module]
        assert (naive is None) == (len(set(ranks)) > 1)
        if options.method == "mean":
            assert naive == report.error[module]
    expected = sum(one.weight * one.tensors[BIAS] for one in sent) / sum(
        one.weight for one in sent
    )
    torch.testing.assert_close(found[BIAS], expected)
    assert (report.updates, report.magnitudes) == (len(sent), False)


@EVERY
@pytest.mark.parametrize(
    ("dtype", "error"),
    [(torch.float32, 1e-5), (torch.bfloat16, 4e-2), (None, 1e-5)],
    ids=str,
)
def test_dtypes_stay_and_sums_are_wide(
    options: AdapterOptions, dtype: Any, error: float
) -> None:
    """None is float32 for ``A`` alone, as a model's parameters."""

    def cast(tensors: Adapter) -> Adapter:
        return {
            n: t.to(dtype or (torch.float32 if "_A" in n else t.dtype))
            for n, t in tensors.items()
        }

    sent = clients(11)
    sent = [replace(one, tensors=cast(one.tensors)) for one in sent]
    asked = [one.update() for one in sent]
    for one in asked if dtype is None else ():
        for tensor in one.tensors.values():
            tensor.requires_grad_()
    found, _ = average_adapters(asked, SETTINGS, options, adapter(9))
    assert {n: t.dtype for n, t in found.items()} == {
        n: t.dtype for n, t in sent[0].tensors.items()
    }
    assert not any(tensor.requires_grad for tensor in found.values())
    wide = [
        replace(one, tensors={n: t.detach().double() for n, t in one.tensors.items()})
        for one in sent
    ]
    for module in MODULES:
        expected = ORACLES[options.method](wide, module, 3)
        close({n: t.double() for n, t in found.items()}, module, expected, error)


@EVERY
def test_results_may_be_taken_in_between_and_share_nothing(
    options: AdapterOptions,
) -> None:
    one, two = (client.update() for client in clients(3, (3, 3)))
    average = options.average(SETTINGS)
    with pytest.raises(FedrotError, match="no adapters to average"):
        average.result()
    average.add(one)
    for tensor in average.result()[0].values():
        tensor.zero_()
    average.add(two)
    expected = average_adapters([one, two], SETTINGS, options)[0]
    for _ in range(2):
        assert all(torch.equal(t, expected[n]) for n, t in average.result()[0].items())


# Refusals


PISSA = LoraSettings.of({"lora_alpha": 6, "init_lora_weights": "pissa"})
EXPERTS = "base_model.model.experts.base_layer"
#: Tensors that one client sends otherwise, None for those that it leaves out, and a
#: word of the error.
BAD = {
    "no B": ({factor(QUERY, "B"): None}, "query.lora_A.weight' has no partner"),
    "no A": ({factor(QUERY): None}, "query.lora_B.weight' has no partner"),
    "two ranks": ({factor(QUERY): torch.ones(2, IN)}, "no common rank"),
    "no matrix": ({factor(QUERY): torch.ones(4)}, "no common rank"),
    "rank 0": (
        {factor(QUERY): torch.ones(0, IN), factor(QUERY, "B"): torch.ones(OUT, 0)},
        "no common",
    ),
    "other inputs": ({factor(QUERY): torch.ones(3, 5)}, "5 inputs"),
    "other outputs": (
        {factor(QUERY, "B"): torch.ones(4, 3)},
        "4 outputs",
    ),
    "no bias": ({BIAS: None}, "head.bias'.*missing"),
    "NaN": ({BIAS: torch.full((4,), torch.nan)}, "holds NaN or Inf"),
    "one more pair": (
        {"m.lora_A.weight": torch.ones(1, 1), "m.lora_B.weight": torch.ones(1, 1)},
        "'m.lora_A.weight' is in some adapters",
    ),
    "two pairs": (
        {f"{QUERY}.lora_{f}.more.weight": torch.ones(3, 3) for f in "AB"},
        "two pairs",
    ),
    "experts": (
        {factor(EXPERTS, f): torch.ones(2, 2) for f in "AB"},
        "inside a module",
    ),
    **{
        f"huge {of}, {size:g}": (
            {factor(QUERY, of): adapter(1)[factor(QUERY, of)] * size},
            "has norm",
        )
        for of in "AB"
        for size in (1e7, 1e15)
    },
}
#: Changes of a client's update, and a word of the error.
BAD_UPDATES = {
    **{
        f"weight {w}": (lambda u, w=w: replace(u, weight=w), "weight")
        for w in (0, -1, float("nan"))
    },
    "no factors": (
        lambda u: replace(u, tensors={"w": torch.ones(2)}),
        "no factors",
    ),
    "another rank of PiSSA": (
        lambda u: replace(u, tensors=adapter(1, 2), settings=PISSA),
        "'pissa'",
    ),
}


def with_tensors(
    change: dict[str, Tensor | None],
) -> Callable[[AdapterUpdate], AdapterUpdate]:
    def changed(update: AdapterUpdate) -> AdapterUpdate:
        tensors = {
            n: t for n, t in {**update.tensors, **change}.items() if t is not None
        }
        return replace(update, tensors=tensors)

    return changed


def bad(
    options: AdapterOptions,
) -> dict[str, tuple[Callable[[AdapterUpdate], Any], str]]:
    return {
        name: (with_tensors(change), said) for name, (change, said) in BAD.items()
    } | BAD_UPDATES


@pytest.mark.parametrize(
    ("options", "change", "said"),
    [
        pytest.param(options, *row, id=f"{options.method}: {name}")
        for options in (AdapterOptions(method) for method in ORACLES)
        for name, row in bad(options).items()
    ],
)
def test_what_is_refused_leaves_nothing(
    options: AdapterOptions, change: Any, said: str
) -> None:
    one, wrong, two = (client.update() for client in clients(2))
    average = options.average(SETTINGS)
    average.add(one)
    with pytest.raises(UpdateError, match=said):
        average.add(change(wrong))
    average.add(two)
    found, report = average.result()
    assert report.updates == 2
    expected = average_adapters([one, two], SETTINGS, options)[0]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_what_does_not_go_together_is_refused() -> None:
    asked = updates([adapter(0)])
    pissa = [AdapterUpdate(adapter(0), 1.0, PISSA)]
    average_adapters(pissa * 2, PISSA, EXACT, adapter(9))
    rows = [
        (
            updates([adapter(i, i + 1) for i in range(2)]),
            {},
            r"query' are \[1, 2\].*method='exact'",
        ),
        (asked, {"rank": 2}, "rank 2"),
        (pissa, {"previous": adapter(9, 4), "options": EXACT}, "has rank 3, others 4"),
        (asked, {"previous": {BIAS: torch.ones(4)}}, "does not contain '.*query'"),
        (asked, {"rank": 2.5}, r"rank is 2\.5; it must be an integer"),
        (asked, {"rank": 0}, "rank is 0"),
        (
            asked,
            {"options": "exact"},
            r"options is 'exact'; pass fedrot\.lora\.AdapterOptions",
        ),
        (asked, {"settings": {"hidden_size": 3}}, "configuration"),
        (
            [replace(asked[0], settings={"hidden_size": 3})],
            {},
            "configuration",
        ),
        ([adapter(0)], {}, "a dict; pass an AdapterUpdate"),
        ([], {}, "no adapters to average"),
    ]
    for sent, given_, said in rows:
        with pytest.raises(FedrotError, match=said):
            average_adapters(sent, **{"settings": SETTINGS, **given_})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"method": "median"},
            "Unknown method 'median' of adapters; one of mean, exact",
        ),
        (
            {"gauge": "best"},
            "Unknown gauge 'best' of adapters; one of keep-a, previous, none",
        ),
        ({"gauge": "none"}, "an option of 'exact', and has no effect with 'mean'"),
    ],
)
def test_options_are_checked(options: Any, said: str) -> None:
    assert str(AdapterOptions("exact", "none")) == "exact, gauge 'none'"
    with pytest.raises(FedrotError, match=said):
        AdapterOptions(**options)


# Gauges


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), count=st.integers(1, 3))
def test_without_a_gauge_factors_are_balanced_and_depend_on_the_product_alone(
    seed: int, count: int
) -> None:
    sent = adapter(seed)
    options = AdapterOptions("exact", "none")
    turned = [scrambled(sent, seed + i) for i in range(count)]
    found, _ = average_adapters(updates(turned), SETTINGS, options)
    again, _ = average_adapters(updates([sent]), SETTINGS, options)
    for module in MODULES:
        a = found[factor(module)]
        b = found[factor(module, "B")]
        rank = min(3, len(b))
        assert torch.allclose(
            a[:rank] @ a[:rank].mT, (b.mT @ b)[:rank, :rank], atol=1e-7
        )
    for name in (factor(QUERY), factor(QUERY, "B")):
        assert torch.allclose(found[name], again[name], atol=1e-7)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000))
def test_the_rotation_is_the_best_one(seed: int) -> None:
    drawn = drawing(seed)
    a, b, to_a, to_b = (
        drawn(*shape) for shape in ((3, IN), (OUT, 3), (3, IN), (OUT, 3))
    )

    def distance(a: Tensor, b: Tensor) -> Tensor:
        return torch.linalg.norm(a - to_a) ** 2 + torch.linalg.norm(b - to_b) ** 2

    u, s, vt = torch.linalg.svd(b @ a)
    wanted = Wanted(
        u[:, :3], s[:3], vt[:3], (drawn(3, IN), drawn(OUT, 3)), (to_a, to_b)
    )
    for start, found in (
        ((a, b), rotated((a, b), (to_a, to_b))),
        (GAUGES["none"](wanted), GAUGES["previous"](wanted)),
    ):
        for _ in range(20):
            r, _ = torch.linalg.qr(drawn(3, 3))
            assert distance(*found) <= distance(r @ start[0], start[1] @ r.mT) + 1e-9


@pytest.mark.parametrize("terms", [2, 5])
def test_keep_a_is_the_nearest_a_of_its_product(terms: int) -> None:
    """Any ``terms`` combinations of rows of the mean can be moved into the product's
    row space.
    """
    drawn = drawing(0)
    u = torch.linalg.qr(drawn(20, 5))[0]
    vt = torch.linalg.qr(drawn(30, 5))[0].mT
    s = torch.tensor([3.0, 1.0, 0.9, 0.5, 0.2]).double() * (torch.arange(5) < terms)
    mean = drawn(5, 30)
    a, b = GAUGES["keep-a"](Wanted(u, s, vt, (mean, drawn(20, 5)), None))
    assert torch.allclose(b @ a, (u * s) @ vt, atol=1e-10)
    outside = mean - mean @ vt[:terms].mT @ vt[:terms]
    for _ in range(50):
        z = torch.linalg.qr(drawn(5, terms))[0]
        other = mean - z @ z.mT @ outside
        assert torch.linalg.norm(a - mean) <= torch.linalg.norm(other - mean) + 1e-12


@pytest.mark.parametrize("gauge", OWN_GAUGES)
@pytest.mark.parametrize("terms", [0, 1, 2])
def test_what_the_product_does_not_need_of_a_stays(terms: int, gauge: str) -> None:
    """Products of a smaller rank than the factors, as at LoRA's start, where ``B`` is
    0.
    """
    start, a, b = adapter(9), factor(QUERY), factor(QUERY, "B")
    sent = {**start, b: torch.cat([start[b][:, :terms], 0 * start[b][:, terms:]], 1)}
    if terms:
        sent[a] = sent[a] + 0.1 * adapter(1)[a]
    for previous in (start, None):
        found, report = average_adapters(
            updates([sent]), SETTINGS, AdapterOptions("exact", gauge), previous
        )
        assert torch.allclose(product(found, QUERY), product(sent, QUERY), atol=1e-10)
        # Every direction of A is left to be trained.
        assert torch.linalg.svdvals(found[a])[-1] > 0.1
        assert report.error[QUERY] < 1e-7
        if (not terms and gauge != "none") or gauge == "keep-a":
            assert torch.allclose(
                found[a], sent[a], atol=1e-8
            )  # One client's own A has the product.


@pytest.mark.parametrize("gauge", OWN_GAUGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factors_whose_product_is_rounding_noise_stay_trainable(
    dtype: Any, gauge: str
) -> None:
    """PEFT's start ``orthogonal`` has two large factors with ``B A = 0``."""
    drawn = drawing(0)
    q = torch.linalg.qr(drawn(6, 6))[0].to(dtype)
    a = q[:, :3] @ drawn(3, IN).to(dtype)
    b = drawn(OUT, 3).to(dtype) @ q[:, 3:].mT
    assert (b @ a).any()
    start = {"m.lora_A.weight": a, "m.lora_B.weight": b}
    found, _ = average_adapters(
        updates([start] * 3), SETTINGS, AdapterOptions("exact", gauge)
    )
    for cut, part in ((found, a), (fitted(start, SETTINGS, 2), a[:2])):
        assert not cut["m.lora_B.weight"].any()
        own = cut["m.lora_A.weight"]
        assert torch.allclose(own.mT @ own, part.mT @ part, atol=1e-4)


@pytest.mark.parametrize("gauge", OWN_GAUGES)
@pytest.mark.parametrize("trained", [0, 1, 3])
def test_adapters_of_embeddings_stay_trainable(gauge: str, trained: int) -> None:
    """PEFT starts them with ``A = 0`` and a random ``B``; directions where both are 0
    are dead.
    """
    drawn, a, b = drawing(0), "table.lora_embedding_A", "table.lora_embedding_B"
    start = {a: torch.zeros(6, 30, dtype=torch.float64), b: drawn(20, 6)}
    sent = []
    for _ in range(2):  # Clients that saw a few tokens.
        own = copied(start)
        own[a][:, :trained] = 0.1 * drawn(6, trained)
        sent.append(own)
    found, _ = average_adapters(
        updates(sent), SETTINGS, AdapterOptions("exact", gauge), start
    )
    for tensors in (found, fitted(found, SETTINGS, 4)):
        alive = tensors[a] @ tensors[a].mT + tensors[b].mT @ tensors[b]
        assert torch.linalg.eigvalsh(alive)[0] > 1e-3
    mean = (sent[0][b] @ sent[0][a] + 2 * sent[1][b] @ sent[1][a]) / 3
    assert torch.allclose(found[b] @ found[a], mean, atol=1e-9)


# Ranks, shapes and biases


@pytest.mark.parametrize("rank", [1, 2, 3, 5])
def test_a_client_of_a_smaller_rank_takes_the_best_that_it_can_hold(rank: int) -> None:
    sent = adapter(3)
    found = fitted(sent, SETTINGS, rank)
    for module in MODULES:
        assert len(found[factor(module)]) == min(rank, 3)
        close(found, module, truncated(product(sent, module), rank))
    assert all(found[name] is sent[name] for name in (sent if rank >= 3 else [BIAS]))
    start = {
        name: torch.zeros_like(t) if "_B" in name else t for name, t in sent.items()
    }
    cut = fitted(start, SETTINGS, rank)
    for module in MODULES:
        assert torch.equal(cut[factor(module)], start[factor(module)][:rank])
        assert not product(cut, module).any()
    near = fitted(
        sent, SETTINGS, {factor(module): torch.ones(rank, 1) for module in MODULES}
    )
    assert all(torch.equal(tensor, found[name]) for name, tensor in near.items())
    for wrong, said in (
        (0, "rank is 0"),
        ({}, "at the server"),
    ):
        with pytest.raises(FedrotError, match=said):
            fitted(sent, SETTINGS, wrong)


@pytest.mark.parametrize("rank", [1, 2])
def test_kernels_of_convolutions_keep_their_shape(rank: int) -> None:
    drawn, a, b = drawing(0), factor("c"), factor("c", "B")
    sent = [{a: drawn(2, 3, 5, 5), b: drawn(4, 2, 1, 1)} for _ in range(2)]
    found, _ = average_adapters(updates(sent), SETTINGS, EXACT, rank=rank)
    assert (found[a].shape, found[b].shape) == ((rank, 3, 5, 5), (4, rank, 1, 1))
    close(
        found,
        "c",
        truncated((product(sent[0], "c") + 2 * product(sent[1], "c")) / 3, rank),
    )
    cut = fitted(found, SETTINGS, 1)
    assert (cut[a].shape, cut[b].shape) == ((1, 3, 5, 5), (4, 1, 1, 1))


def test_biases_of_b_are_averaged_with_their_scale() -> None:
    """``LoraConfig(lora_bias=True)``: PEFT multiplies the bias by the scale, too."""
    bias, kinds, ranks = (
        f"{QUERY}.lora_B.bias",
        [LoraSettings(alpha=a) for a in (2.0, 16.0)],
        (2, 4),
    )
    asked = [
        AdapterUpdate(
            {**adapter(i, ranks[i]), bias: torch.ones(OUT).double()}, 1.0, kinds[i]
        )
        for i in range(2)
    ]
    found, _ = average_adapters(asked, SETTINGS, EXACT, rank=3)
    mean = (
        sum(kind.scale("query", rank) for kind, rank in zip(kinds, ranks, strict=True))
        / 2
    )
    for rank, tensors in ((3, found), (1, fitted(found, SETTINGS, 1))):
        scaled = SETTINGS.scale("query", rank) * tensors[bias]
        assert torch.allclose(scaled, torch.full((OUT,), mean).double())


# Bounded sums of products


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), limit=st.integers(1, 6), near=st.booleans())
def test_a_bounded_sum_says_what_it_lost(
    dtype: Any, seed: int, limit: int, near: bool
) -> None:
    """Several compressions, also of clients near a start, whose sum has a few large
    terms.
    """
    drawn = drawing(seed)
    total = ProductSum(limit)
    dense = torch.zeros(40, 30, dtype=torch.float64)
    size = 1e-13 if dtype == torch.float64 else 1e-5
    start = [drawn(40, 2), drawn(2, 30)]
    for weight in range(1, 9):
        b, a = (drawn(*t.shape) for t in start)
        if near:
            b = start[0] + 0.01 * b
            a = start[1] + 0.01 * a
        b = b.to(dtype)
        a = a.to(dtype)
        total.add(b, a, weight)
        dense += weight * b.double() @ a.double()
    terms = total.terms()
    ours = (terms.u * terms.s).double() @ terms.vt.double()
    rounding = size * float(torch.linalg.norm(dense))
    assert torch.linalg.norm(ours - dense) <= total.lost + rounding
    assert total.lost > (0 if limit < 6 or not near else -1)
    assert terms.norm == pytest.approx(float(torch.linalg.norm(ours)), rel=1e-5)
    u = terms.u.double()
    vt = terms.vt.double()
    identity = eye(len(terms.s))
    strong = (
        terms.s.double()[:, None] * terms.s.double() > 1e-3 * float(terms.s[0]) ** 2
    )
    for gram in (u.mT @ u, vt @ vt.mT):
        assert torch.where(strong, (gram - identity).abs(), 0.0).max() < 1e-4
    # The best approximation of bounded rank is not much better.
    best = torch.linalg.svdvals(dense)[limit:].square().sum().sqrt()
    cut = terms.first(limit)
    error = torch.linalg.norm((cut.u * cut.s).double() @ cut.vt.double() - dense)
    assert error <= float(best) + 2 * total.lost + rounding


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), rank=st.integers(1, 6), lost=st.integers(0, 3))
def test_float32_is_decomposed_as_well_as_by_qr(
    seed: int, rank: int, lost: int
) -> None:
    """Gram matrices in float64 lose nothing that float32 holds, of stacks without full
    rank either.
    """
    drawn = drawing(seed)
    left = drawn(40, rank).float()
    right = drawn(rank, 30).float()
    left = torch.cat([left, left[:, :lost] * 3], 1)
    right = torch.cat([right, right[:lost] - 0.5], 0)
    terms = decomposed(left, right)
    dense = left.double() @ right.double()
    assert torch.allclose(
        (terms.u * terms.s).double() @ terms.vt.double(), dense, atol=1e-4
    )
    expected = torch.linalg.svdvals(dense)[: len(terms.s)]
    assert torch.allclose(terms.s.double(), expected, rtol=1e-5)
    more = terms.first(len(terms.s) + 2)
    assert not more.s[-2:].any()
    for basis in (more.u, more.vt.mT):
        inner = basis.mT @ basis
        assert torch.allclose(inner, torch.eye(len(inner)), atol=1e-4)


@pytest.mark.parametrize(
    ("ranks", "rank"),
    [((4,) * 10, 24), ((4,) * 10, 40), ((1, 4, 4, 4, 4), 17), ((4, 4, 4, 4, 1), 17)],
)
def test_a_sum_keeps_four_times_the_largest_rank_and_that_of_the_result(
    ranks: Any, rank: int
) -> None:
    sent = updates([pair(n, of) for n, of in enumerate(ranks)], [1.0] * len(ranks))
    found, report = average_adapters(sent, SETTINGS, EXACT, rank=rank)
    close(found, "q", truncated(dense_mean(sent, "q"), rank), 1e-9)
    assert report.lost == {"q": 0.0}


@pytest.mark.parametrize("method", ["mean", "exact"])
@pytest.mark.parametrize(
    ("steps", "count", "error"),
    [
        *(((1.0, apart), 6, {"abs": 1e-6}) for apart in (0.0, 5e-7, 1e-4)),
        *(((apart, 1.0), 6, {"abs": 1e-6}) for apart in (0.0, 5e-7, 1e-4)),
        *(((apart, apart), 40, {"rel": 0.05}) for apart in (0.3, 1.0)),
    ],
)
def test_errors_are_near_the_true_ones(
    method: str, steps: Any, count: int, error: Any
) -> None:
    """Where one float32 factor hardly moved, and where a bounded sum leaves out a part
    of the mean.
    """
    start = pair(3)
    few = count == 6
    moved = dict(zip(start, steps, strict=True))
    sent = [
        {n: t + moved[n] * pair(9 + i)[n] for n, t in start.items()}
        for i in range(count)
    ]
    sent = [
        {n: t.float() if few else t for n, t in tensors.items()} for tensors in sent
    ]
    found, report = average_adapters(
        updates(sent, range(1, count + 1)), SETTINGS, AdapterOptions(method)
    )
    wide = [{n: t.double() for n, t in tensors.items()} for tensors in (found, *sent)]
    dense = dense_mean(updates(wide[1:], range(1, count + 1)), "q")
    true = float(
        torch.linalg.norm(product(wide[0], "q") - dense) / torch.linalg.norm(dense)
    )
    assert report.error["q"] == pytest.approx(true, **error)
    assert (report.lost["q"] > true / 2) != few
    assert ("the sum of bounded rank leaves out at most" in str(report)) != few


def test_a_sum_reads_no_number_of_a_device_before_its_terms() -> None:
    """On the device ``meta``, which has no numbers, the sum fails where it first reads
    one.
    """
    total = ProductSum(4)
    for _ in range(2):
        total.add(
            torch.empty(40, 4, device="meta"), torch.empty(4, 30, device="meta"), 1.0
        )
        with pytest.raises(RuntimeError, match="meta"):
            total.terms()
