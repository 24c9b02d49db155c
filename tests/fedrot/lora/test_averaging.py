"""Averages of adapters, against dense products in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedrot.errors import FedrotError, UpdateError
from fedrot.lora import AdapterOptions, AdapterUpdate, LoraSettings, average_adapters, fitted
from fedrot.lora.gauges import GAUGES, Wanted, rotated
from fedrot.lora.products import ProductSum, decomposed

Adapter = dict[str, Tensor]
IN, OUT = 9, 7
MODULES = {"base_model.model.layer.query": (IN, OUT), "base_model.model.classifier": (IN, 2)}
SETTINGS = LoraSettings(alpha=6.0)
KEEP_A = AdapterOptions("exact", "keep-a")
BALANCED = AdapterOptions("exact", "none")


def adapter(seed: int, rank: int = 3, start: Adapter | None = None) -> Adapter:
    """Return an adapter with random factors, near those of a start if there is one."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    found = {}
    for module, (width, outputs) in MODULES.items():
        found[f"{module}.lora_A.weight"] = drawn(rank, width)
        found[f"{module}.lora_B.weight"] = drawn(outputs, rank)
    found["base_model.model.head.bias"] = drawn(4)
    return found if start is None else {name: start[name] + 0.3 * t for name, t in found.items()}


def product(tensors: Adapter, module: str, settings: LoraSettings = SETTINGS) -> Tensor:
    """Return the dense update of a module: the oracle."""
    a, b = tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"]
    return settings.scale(module, len(a)) * b @ a


def truncated(dense: Tensor, rank: int) -> Tensor:
    u, s, vt = torch.linalg.svd(dense, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vt[:rank]


def scrambled(tensors: Adapter, seed: int) -> Adapter:
    """Return factors with the same products: ``G A`` and ``B G^-1`` for random invertible ``G``."""
    generator, found = torch.Generator().manual_seed(seed), dict(tensors)
    for module in MODULES:
        a, b = f"{module}.lora_A.weight", f"{module}.lora_B.weight"
        rank = len(tensors[a])
        g = torch.randn(rank, rank, generator=generator, dtype=torch.float64) + 3 * torch.eye(rank)
        found[a], found[b] = g @ tensors[a], tensors[b] @ torch.linalg.inv(g)
    return found


def updates(adapters: Sequence[Adapter], weights: Sequence[float] = (1, 2, 5)) -> list[AdapterUpdate]:
    return [AdapterUpdate(a, w, SETTINGS) for a, w in zip(adapters, weights, strict=False)]


def dense_mean(given: Sequence[AdapterUpdate], module: str) -> Tensor:
    total = sum(update.weight for update in given)
    products = [u.weight / total * product(dict(u.tensors), module, u.settings) for u in given]
    return torch.stack(products).sum(0)


@pytest.mark.parametrize("gauge", GAUGES)
@settings(deadline=None)
@given(seed=st.integers(0, 10_000))
def test_exact_is_the_truncated_svd_of_the_dense_mean(gauge: str, seed: int) -> None:
    asked = updates([adapter(seed + i) for i in range(3)])
    options = AdapterOptions("exact", gauge)
    found, report = average_adapters(asked, SETTINGS, options, previous=adapter(seed + 7))
    for module in MODULES:
        dense = dense_mean(asked, module)
        ours, best = product(found, module), truncated(dense, 3)
        assert torch.allclose(ours, best, atol=1e-8)
        error = torch.linalg.norm(dense - best) / torch.linalg.norm(dense)
        assert report.error[module] == pytest.approx(float(error), abs=1e-6)
        assert report.lost[module] == 0


@pytest.mark.parametrize("gauge", GAUGES)
def test_the_exact_product_does_not_depend_on_coordinates(gauge: str) -> None:
    adapters = [adapter(i) for i in range(3)]
    options = AdapterOptions("exact", gauge)
    plain, _ = average_adapters(updates(adapters), SETTINGS, options)
    turned = updates([scrambled(a, i) for i, a in enumerate(adapters)])
    other, _ = average_adapters(turned, SETTINGS, options)
    for module in MODULES:
        assert torch.allclose(product(plain, module), product(other, module), atol=1e-8)


def test_the_mean_is_that_of_the_tensors() -> None:
    asked = updates([adapter(i) for i in range(3)])
    found, report = average_adapters(asked, SETTINGS, AdapterOptions("mean"))
    for name, tensor in found.items():
        expected = sum(u.weight * u.tensors[name] for u in asked) / 8
        assert torch.allclose(tensor, expected, atol=1e-12)
    for module in MODULES:
        dense = dense_mean(asked, module)
        error = torch.linalg.norm(dense - product(found, module)) / torch.linalg.norm(dense)
        assert report.error[module] == report.error_of_factors[module]
        assert report.error[module] == pytest.approx(float(error), rel=1e-6)


@pytest.mark.parametrize("options", [AdapterOptions("mean"), KEEP_A], ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_equal_clients_come_back_as_they_are(options: AdapterOptions, count: int) -> None:
    # Of two outputs, the product has rank 2, so that only the first module's factors are determined.
    given = adapter(4)
    found, report = average_adapters(updates([given] * count), SETTINGS, options)
    assert found.keys() == given.keys()
    for module in MODULES:
        assert torch.allclose(product(found, module), product(given, module), atol=1e-10)
    for name in (name for name in given if "classifier" not in name or options != KEEP_A):
        assert torch.allclose(found[name], given[name], atol=1e-9), name
    assert max(report.error.values()) < 1e-6


@settings(deadline=None)
@given(seed=st.integers(0, 1000), count=st.integers(1, 3))
def test_without_a_gauge_factors_are_balanced_and_depend_on_the_product_alone(
    seed: int, count: int
) -> None:
    given = adapter(seed)
    clients = [scrambled(given, seed + i) for i in range(count)]
    found, _ = average_adapters(updates(clients, [1.0] * count), SETTINGS, BALANCED)
    again, _ = average_adapters(updates([given], [1.0]), SETTINGS, BALANCED)
    for module in MODULES:
        assert torch.allclose(product(found, module), product(given, module), atol=1e-8)
        a, b = (found[f"{module}.lora_{factor}.weight"] for factor in "AB")
        rank = min(3, len(b))
        assert torch.allclose(a[:rank] @ a[:rank].mT, (b.mT @ b)[:rank, :rank], atol=1e-7)
    query = {name: tensor for name, tensor in found.items() if "query" in name}
    assert all(torch.allclose(tensor, again[name], atol=1e-7) for name, tensor in query.items())


def test_alphas_of_clients_enter_through_the_products() -> None:
    settings = [LoraSettings(alpha=a) for a in (2.0, 16.0)]
    asked = [AdapterUpdate(adapter(i), 1.0, s) for i, s in enumerate(settings)]
    for options in (AdapterOptions("exact"), AdapterOptions()):
        found, _ = average_adapters(asked, SETTINGS, options, rank=3)
        if options.method == "exact":
            for module in MODULES:
                expected = truncated(dense_mean(asked, module), 3)
                assert torch.allclose(product(found, module), expected, atol=1e-8)
    # Adapters of one A: the mean of factors is exact, whatever the alphas.
    same = [{**adapter(i), **{n: t for n, t in adapter(0).items() if "_A" in n}} for i in range(2)]
    asked = [replace(update, tensors=tensors) for update, tensors in zip(asked, same, strict=True)]
    found, report = average_adapters(asked, SETTINGS)
    for module in MODULES:
        assert torch.allclose(product(found, module), dense_mean(asked, module), atol=1e-10)
    assert max(report.error.values()) < 1e-6


@pytest.mark.parametrize("rank", [None, 2, 4, 8])
def test_ranks_may_differ_in_exact_averages(rank: int | None) -> None:
    asked = updates([adapter(i, r) for i, r in enumerate((2, 4, 1))])
    found, report = average_adapters(asked, SETTINGS, AdapterOptions("exact"), rank=rank)
    for module, (width, outputs) in MODULES.items():
        assert found[f"{module}.lora_A.weight"].shape == (rank or 4, width)
        assert found[f"{module}.lora_B.weight"].shape == (outputs, rank or 4)
        expected = truncated(dense_mean(asked, module), rank or 4)
        assert torch.allclose(product(found, module), expected, atol=1e-8)
        assert report.error_of_factors[module] is None
    assert "factors of 2 modules have no mean: their ranks differ" in str(report)
    with pytest.raises(UpdateError, match=r"ranks of .*query' are \[1, 2, 4\].*method='exact'"):
        average_adapters(asked, SETTINGS, AdapterOptions("mean"))


def test_a_start_stays_trainable() -> None:
    """Before training ``B`` is 0. What comes back has an ``A``, or nothing would ever be trained."""
    start = adapter(0)
    start = {name: torch.zeros_like(t) if "_B" in name else t for name, t in start.items()}
    for gauge in GAUGES:
        found, report = average_adapters(updates([start] * 3), SETTINGS, AdapterOptions("exact", gauge))
        for module in MODULES:
            assert not product(found, module).any()
            assert torch.linalg.matrix_rank(found[f"{module}.lora_A.weight"]) == 3
            assert report.error[module] == 0


@settings(deadline=None)
@given(seed=st.integers(0, 1000))
def test_the_rotation_is_the_best_one(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b, to_a, to_b = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((3, IN), (OUT, 3), (3, IN), (OUT, 3))
    )

    def distance(r: Tensor) -> Tensor:
        return torch.linalg.norm(r @ a - to_a) ** 2 + torch.linalg.norm(b @ r.mT - to_b) ** 2

    found = rotated((a, b), (to_a, to_b))
    ours = torch.linalg.norm(found[0] - to_a) ** 2 + torch.linalg.norm(found[1] - to_b) ** 2
    for _ in range(20):
        r, _ = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))
        assert ours <= distance(r) + 1e-9


def test_keep_a_is_the_nearest_a_of_its_product() -> None:
    """Every ``A`` with the product lies in its row space; the projection of the mean is the nearest."""
    asked = updates([adapter(i, start=adapter(9)) for i in range(3)])
    found, _ = average_adapters(asked, SETTINGS, KEEP_A)
    mean, _ = average_adapters(asked, SETTINGS)
    name = "base_model.model.layer.query.lora_A.weight"
    ours = torch.linalg.norm(found[name] - mean[name])
    for seed in range(20):
        other = scrambled(found, seed)[name]
        # The nearest multiple of another A is no nearer.
        other = other * (other * mean[name]).sum() / (other * other).sum()
        assert ours <= torch.linalg.norm(other - mean[name])


@pytest.mark.parametrize("terms", [0, 1, 2])
def test_what_the_product_does_not_need_of_a_stays(terms: int) -> None:
    """Products of a smaller rank than the factors: clients of small ranks, or a module without use."""
    start = adapter(9)
    name = "base_model.model.layer.query"
    a, b = f"{name}.lora_A.weight", f"{name}.lora_B.weight"
    given = {**start, b: torch.cat([start[b][:, :terms], 0 * start[b][:, terms:]], 1)}
    sent = {**given, a: given[a] + 0.1 * adapter(1)[a]}
    if not terms:
        sent = given
    for gauge in GAUGES:
        found, report = average_adapters(
            updates([sent]), SETTINGS, AdapterOptions("exact", gauge), previous=start
        )
        assert torch.allclose(product(found, name), product(sent, name), atol=1e-10)
        # Every direction of A is left to be trained.
        assert torch.linalg.svdvals(found[a])[-1] > 0.1
        assert report.error[name] < 1e-7
        if not terms and gauge != "none":
            assert torch.allclose(found[a], start[a], atol=1e-10)
        if gauge == "keep-a":
            ours = torch.linalg.norm(found[a] - sent[a])
            assert ours < 1e-8  # One client's own A has the product.


def test_keep_a_is_nearest_for_products_of_small_rank() -> None:
    """Any k combinations of rows of the mean can be moved into the product's row space."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mean, vt = drawn(5, 30), torch.linalg.qr(drawn(30, 2))[0].mT
    u, s = torch.linalg.qr(drawn(20, 2))[0], torch.tensor([3.0, 1.0], dtype=torch.float64)
    padded = torch.cat([s, torch.zeros(3, dtype=torch.float64)])
    full_u, full_vt = torch.linalg.qr(drawn(20, 5))[0], torch.linalg.qr(drawn(30, 5))[0].mT
    full_u[:, :2], full_vt[:2] = u, vt
    a, b = GAUGES["keep-a"](Wanted(full_u, padded, full_vt, (mean, drawn(20, 5)), None))
    assert torch.allclose(b @ a, (u * s) @ vt, atol=1e-10)
    outside = mean - mean @ vt.mT @ vt
    for _ in range(50):
        z = torch.linalg.qr(drawn(5, 2))[0]
        other = mean - z @ z.mT @ outside
        assert torch.linalg.norm(a - mean) <= torch.linalg.norm(other - mean) + 1e-12


def test_a_start_that_changed_the_base_needs_one_rank() -> None:
    pissa = LoraSettings.of({"lora_alpha": 6, "init_lora_weights": "pissa"})
    sent = [AdapterUpdate(adapter(i, rank), 1.0, pissa) for i, rank in enumerate((3, 3, 2))]
    average_adapters(sent[:2], pissa, AdapterOptions("exact"))
    said = "'pissa' base weights depend on the rank"
    with pytest.raises(UpdateError, match=said):
        average_adapters(sent, pissa, AdapterOptions("exact"))
    with pytest.raises(UpdateError, match=said):
        average_adapters(sent[:1], pissa, AdapterOptions("exact"), previous=adapter(9, 4))
    with pytest.raises(FedrotError, match="The update is a dict; pass an AdapterUpdate"):
        average_adapters([adapter(0)], SETTINGS)  # type: ignore[list-item]
    with pytest.raises(FedrotError, match=r"rank is 2\.5; it must be an integer"):
        average_adapters(sent[:1], SETTINGS, rank=2.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@settings(deadline=None)
@given(seed=st.integers(0, 1000), limit=st.integers(1, 6), near=st.booleans())
def test_a_bounded_sum_says_what_it_lost(dtype: torch.dtype, seed: int, limit: int, near: bool) -> None:
    """Several compressions, also of clients near a start, whose sum has a few large terms."""
    generator = torch.Generator().manual_seed(seed)
    total, dense = ProductSum(limit), torch.zeros(40, 30, dtype=torch.float64)
    size = 1e-13 if dtype == torch.float64 else 1e-5
    start = [torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((40, 2), (2, 30))]
    for weight in range(1, 9):
        b, a = (torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in start)
        if near:
            b, a = start[0] + 0.01 * b, start[1] + 0.01 * a
        b, a = b.to(dtype), a.to(dtype)
        total.add(b, a, weight)
        dense += weight * b.double() @ a.double()
    terms = total.terms()
    ours = (terms.u * terms.s).double() @ terms.vt.double()
    rounding = size * float(torch.linalg.norm(dense))
    assert torch.linalg.norm(ours - dense) <= total.lost + rounding
    assert total.lost > (0 if limit < 6 or not near else -1)
    assert terms.norm == pytest.approx(float(torch.linalg.norm(ours)), rel=1e-5)
    u, vt = terms.u.double(), terms.vt.double()
    identity = torch.eye(len(terms.s), dtype=torch.float64)
    strong = terms.s.double()[:, None] * terms.s.double() > 1e-3 * float(terms.s[0]) ** 2
    for gram in (u.mT @ u, vt @ vt.mT):
        assert torch.where(strong, (gram - identity).abs(), 0.0).max() < 1e-4
    # The best approximation of bounded rank is not much better.
    best = torch.linalg.svdvals(dense)[limit:].square().sum().sqrt()
    cut = terms.first(limit)
    error = torch.linalg.norm((cut.u * cut.s).double() @ cut.vt.double() - dense)
    assert error <= float(best) + 2 * total.lost + rounding


@settings(deadline=None)
@given(seed=st.integers(0, 1000), rank=st.integers(1, 6), lost=st.integers(0, 3))
def test_float32_is_decomposed_as_well_as_by_qr(seed: int, rank: int, lost: int) -> None:
    """Gram matrices in float64 lose nothing that float32 holds, of stacks without full rank either."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(*s, generator=generator) for s in ((40, rank), (rank, 30)))
    left = torch.cat([left, left[:, :lost] * 3], 1)
    right = torch.cat([right, right[:lost] - 0.5], 0)
    terms = decomposed(left, right)
    dense = left.double() @ right.double()
    assert torch.allclose((terms.u * terms.s).double() @ terms.vt.double(), dense, atol=1e-4)
    expected = torch.linalg.svdvals(dense)[: len(terms.s)]
    assert torch.allclose(terms.s.double(), expected, rtol=1e-5)
    for basis in (terms.u, terms.vt.mT):
        inner = basis.mT @ basis
        assert torch.allclose(inner, torch.eye(len(inner)), atol=1e-4)


@pytest.mark.parametrize("rank", [1, 2, 3, 5])
def test_a_client_of_a_smaller_rank_takes_the_best_that_it_can_hold(rank: int) -> None:
    given = adapter(3)
    found = fitted(given, SETTINGS, rank)
    for module in MODULES:
        assert len(found[f"{module}.lora_A.weight"]) == min(rank, 3)
        expected = truncated(product(given, module), rank)
        assert torch.allclose(product(found, module), expected, atol=1e-10)
    assert found["base_model.model.head.bias"] is given["base_model.model.head.bias"]
    start = {name: torch.zeros_like(t) if "_B" in name else t for name, t in given.items()}
    cut = fitted(start, SETTINGS, rank)
    for module in MODULES:
        a = f"{module}.lora_A.weight"
        assert torch.equal(cut[a], start[a][:rank])
        assert not product(cut, module).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factors_whose_product_is_rounding_noise_stay_trainable(dtype: torch.dtype) -> None:
    """PEFT's start ``orthogonal`` has two large factors with ``B A = 0``."""
    generator = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=dtype))[0]
    a = q[:, :3] @ torch.randn(3, IN, generator=generator, dtype=dtype)
    b = torch.randn(OUT, 3, generator=generator, dtype=dtype) @ q[:, 3:].mT
    assert (b @ a).any()
    start = {"m.lora_A.weight": a, "m.lora_B.weight": b}
    for gauge in GAUGES:
        found, _ = average_adapters(updates([start] * 3), SETTINGS, AdapterOptions("exact", gauge))
        for cut, part in ((found, a), (fitted(start, SETTINGS, 2), a[:2])):
            assert not cut["m.lora_B.weight"].any()
            own = cut["m.lora_A.weight"]
            assert torch.allclose(own.mT @ own, part.mT @ part, atol=1e-4)


@pytest.mark.parametrize("rank", [1, 2])
def test_kernels_of_convolutions_keep_their_shape(rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = "c.lora_A.weight", "c.lora_B.weight"
    shapes = {a: (2, 3, 5, 5), b: (4, 2, 1, 1)}

    def drawn(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def dense(tensors: Adapter) -> Tensor:
        matrix = tensors[b].flatten(1)
        return SETTINGS.scale("c", matrix.shape[1]) * matrix @ tensors[a].flatten(1)

    given = [{name: drawn(shape) for name, shape in shapes.items()} for _ in range(2)]
    found, _ = average_adapters(updates(given), SETTINGS, AdapterOptions("exact"), rank=rank)
    assert (found[a].shape, found[b].shape) == ((rank, 3, 5, 5), (4, rank, 1, 1))
    mean = (dense(given[0]) + 2 * dense(given[1])) / 3
    assert torch.allclose(dense(found), truncated(mean, rank), atol=1e-8)
    cut = fitted(found, SETTINGS, 1)
    assert (cut[a].shape, cut[b].shape) == ((1, 3, 5, 5), (4, 1, 1, 1))


def test_dtypes_are_those_of_the_adapters() -> None:
    halves = [{n: t.bfloat16() for n, t in adapter(i).items()} for i in range(3)]
    for method in ("mean", "exact"):
        found, _ = average_adapters(updates(halves), SETTINGS, AdapterOptions(method))
        assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_model.model.layer.query.lora_B.weight": None}, "query.lora_A.weight' has no partner"),
        ({"base_model.model.layer.query.lora_A.weight": None}, "query.lora_B.weight' has no partner"),
        ({"base_model.model.layer.query.lora_A.weight": torch.ones(2, IN)}, "no common rank"),
        (
            {
                "base_model.model.layer.query.lora_A.weight": torch.ones(3, 5),
                "base_model.model.layer.query.lora_B.weight": torch.ones(OUT, 3),
            },
            "map 5 inputs to 7 outputs, those of the first adapter 9 to 7",
        ),
        (
            {"base_model.model.head.bias": None},
            "head.bias' is in some adapters and missing",
        ),
        ({"base_model.model.head.bias": torch.full((4,), torch.nan)}, "holds NaN or Inf"),
        (
            {"m.lora_A.weight": torch.ones(1, 1), "m.lora_B.weight": torch.ones(1, 1)},
            "'m.lora_A.weight' is in some adapters and missing in others",
        ),
    ],
)
def test_adapters_that_do_not_fit_are_refused_whole(
    change: dict[str, Tensor | None], message: str
) -> None:
    wrong = {n: t for n, t in {**adapter(1), **change}.items() if t is not None}
    asked = [*updates([adapter(0)]), AdapterUpdate(wrong, 1.0, SETTINGS)]
    with pytest.raises(UpdateError, match=message):
        average_adapters(asked, SETTINGS)


def test_what_is_no_adapter_is_refused() -> None:
    with pytest.raises(UpdateError, match="no factors of a LoRA adapter"):
        average_adapters([AdapterUpdate({"w": torch.ones(2)}, 1.0, SETTINGS)], SETTINGS)
    with pytest.raises(FedrotError, match="no adapters to average"):
        average_adapters([], SETTINGS)


@pytest.mark.parametrize("frozen", ["A", "B"])
@pytest.mark.parametrize("apart", [0.0, 5e-7, 1e-4])
def test_float32_errors_are_right_where_one_factor_hardly_moved(frozen: str, apart: float) -> None:
    """The small terms of such sums have vectors that are not orthogonal in float32."""
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        shapes = {"q.lora_A.weight": (4, 60), "q.lora_B.weight": (50, 4)}
        start = {n: torch.randn(*shape, generator=generator) for n, shape in shapes.items()}
        moved = {name: apart if f"_{frozen}" in name else 1.0 for name in shapes}
        sent = [
            {n: t + moved[n] * torch.randn(t.shape, generator=generator) for n, t in start.items()}
            for _ in range(6)
        ]
        asked = [AdapterUpdate(tensors, 1.0 + i, SETTINGS) for i, tensors in enumerate(sent)]
        doubles = [
            replace(update, tensors={n: t.double() for n, t in update.tensors.items()})
            for update in asked
        ]
        for method in ("mean", "exact"):
            found, report = average_adapters(asked, SETTINGS, AdapterOptions(method))
            dense = dense_mean(doubles, "q")
            wide = {name: tensor.double() for name, tensor in found.items()}
            true = torch.linalg.norm(product(wide, "q") - dense) / torch.linalg.norm(dense)
            assert report.error["q"] == pytest.approx(float(true), abs=1e-6)


def test_a_large_rank_that_is_asked_for_is_kept_in_the_sum() -> None:
    """Ten adapters of rank 4 have products of rank 40, which the result may have, too."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q.lora_A.weight": (4, 60), "q.lora_B.weight": (50, 4)}
    sent = [
        {n: torch.randn(*shape, generator=generator, dtype=torch.float64) for n, shape in shapes.items()}
        for _ in range(10)
    ]
    asked = updates(sent, 10 * [1])
    dense = dense_mean(asked, "q")
    for rank in (24, 40):
        found, report = average_adapters(asked, SETTINGS, AdapterOptions("exact"), rank=rank)
        best = torch.linalg.norm(dense - truncated(dense, rank))
        error = torch.linalg.norm(dense - product(found, "q"))
        assert error <= best + 1e-9
        assert report.error["q"] == pytest.approx(float(error / torch.linalg.norm(dense)), abs=1e-6)


@pytest.mark.parametrize("gauge", GAUGES)
@pytest.mark.parametrize("trained", [0, 1, 3])
def test_adapters_of_embeddings_stay_trainable(gauge: str, trained: int) -> None:
    """PEFT starts them with ``A = 0`` and a random ``B``; directions where both are 0 are dead."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    a, b = "table.lora_embedding_A", "table.lora_embedding_B"
    start = {a: torch.zeros(6, 30, dtype=torch.float64), b: drawn(20, 6)}
    sent = []
    for _ in range(2):  # Clients that saw a few tokens.
        own = {name: tensor.clone() for name, tensor in start.items()}
        own[a][:, :trained] = 0.1 * drawn(6, trained)
        sent.append(own)
    options = AdapterOptions("exact", gauge)
    found, _ = average_adapters(updates(sent), SETTINGS, options, previous=start)
    for tensors in (found, fitted(found, SETTINGS, 4)):
        alive = tensors[a] @ tensors[a].mT + tensors[b].mT @ tensors[b]
        assert torch.linalg.eigvalsh(alive)[0] > 1e-3
    mean = (sent[0][b] @ sent[0][a] + 2 * sent[1][b] @ sent[1][a]) / 3
    assert torch.allclose(found[b] @ found[a], mean, atol=1e-9)


def test_biases_of_b_are_averaged_with_their_scale() -> None:
    """``LoraConfig(lora_bias=True)``: PEFT multiplies the bias by the scale, too."""
    bias = "base_model.model.layer.query.lora_B.bias"
    kinds = [LoraSettings(alpha=a) for a in (2.0, 16.0)]
    ranks = (2, 4)
    asked = [
        AdapterUpdate({**adapter(i, ranks[i]), bias: torch.ones(OUT).double()}, 1.0, kinds[i])
        for i in range(2)
    ]
    found, _ = average_adapters(asked, SETTINGS, AdapterOptions("exact"), rank=3)
    mean = sum(kind.scale("query", rank) for kind, rank in zip(kinds, ranks, strict=True)) / 2
    assert torch.allclose(SETTINGS.scale("query", 3) * found[bias], torch.full((OUT,), mean).double())
    cut = fitted(found, SETTINGS, 1)
    assert torch.allclose(SETTINGS.scale("query", 1) * cut[bias], torch.full((OUT,), mean).double())


def test_adapters_and_what_was_received_may_have_other_dtypes() -> None:
    start = {name: tensor.float() for name, tensor in adapter(9).items()}
    mixed = {n: t.float() if "_A" in n else t for n, t in adapter(0, start=adapter(9)).items()}
    for sent in (mixed, start):
        found, _ = average_adapters(
            [AdapterUpdate(sent, 1.0, SETTINGS)],
            SETTINGS,
            AdapterOptions("exact", "previous"),
            adapter(9),
        )
        assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in sent.items()}


def test_factors_may_be_parameters_of_a_model() -> None:
    sent = adapter(0)
    trained = {name: tensor.clone().requires_grad_() for name, tensor in sent.items()}
    for options in (KEEP_A, AdapterOptions("mean")):
        found, _ = average_adapters(updates([trained, adapter(1)]), SETTINGS, options)
        expected, _ = average_adapters(updates([sent, adapter(1)]), SETTINGS, options)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor)
            assert not found[name].requires_grad, name


def test_devices_may_differ_from_the_cpu() -> None:
    """On the device ``meta``, which has no numbers, the sum fails where it first reads one."""
    total = ProductSum(4)
    for _ in range(2):
        total.add(torch.empty(40, 4, device="meta"), torch.empty(4, 30, device="meta"), 1.0)
        with pytest.raises(RuntimeError, match="cannot be called on meta"):
            total.terms()


def test_arguments_of_another_kind_are_named() -> None:
    asked = updates([adapter(0)])
    for options in ("exact", 0.5):
        with pytest.raises(FedrotError, match=r"; pass fedrot\.lora\.AdapterOptions"):
            average_adapters(asked, SETTINGS, options)  # type: ignore[arg-type]
    found, _ = average_adapters(
        [replace(asked[0], settings={"lora_alpha": 6})],  # type: ignore[arg-type]
        {"lora_alpha": 6},  # type: ignore[arg-type]
    )
    assert found.keys() == adapter(0).keys()
    for alpha in (0.0, -8.0, float("nan")):
        with pytest.raises(FedrotError, match="it must be positive and finite"):
            LoraSettings(alpha)
    flat = {"q.lora_A.weight": torch.ones(4), "q.lora_B.weight": torch.ones(3, 4)}
    with pytest.raises(UpdateError, match="have no common rank"):
        average_adapters([AdapterUpdate(flat, 1.0, SETTINGS)], SETTINGS)


def test_a_bounded_sum_keeps_four_times_the_largest_rank() -> None:
    """Whatever the order of the clients; what it loses is said."""
    generator = torch.Generator().manual_seed(0)

    def drawn(rank: int) -> Adapter:
        a, b = (
            torch.randn(*shape, generator=generator, dtype=torch.float64)
            for shape in ((rank, 60), (50, rank))
        )
        return {"m.lora_A.weight": a, "m.lora_B.weight": b}

    clients = [drawn(rank) for rank in (1, 4, 4, 4, 4)]
    for order in (clients, clients[::-1]):
        found, report = average_adapters(
            updates(order, [1.0] * 5), SETTINGS, AdapterOptions("exact"), rank=17
        )
        assert report.lost == {"m": 0.0}
        dense = torch.stack([product(c, "m") for c in clients]).mean(0)
        assert torch.allclose(product(found, "m"), dense, atol=1e-10)
    many = [drawn(2) for _ in range(20)]
    _, report = average_adapters(updates(many, [1.0] * 20), SETTINGS, AdapterOptions("exact"))
    assert report.lost["m"] > 0.1
    assert "; these are estimates: the sum of bounded rank leaves out at most" in str(report)


@pytest.mark.parametrize("method", ["mean", "exact"])
@pytest.mark.parametrize("apart", [0.3, 1.0])
def test_errors_of_many_adapters_are_near_the_true_ones(method: str, apart: float) -> None:
    """A bounded sum leaves out a part of the mean product, which the errors have to contain."""
    generator = torch.Generator().manual_seed(3)
    start = [
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3, 60), (50, 3))
    ]
    clients = []
    for _ in range(40):
        a, b = (
            t + apart * torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in start
        )
        clients.append({"m.lora_A.weight": a, "m.lora_B.weight": b})
    found, report = average_adapters(updates(clients, [1.0] * 40), SETTINGS, AdapterOptions(method))
    dense = torch.stack([product(client, "m") for client in clients]).mean(0)
    true = float(torch.linalg.norm(product(found, "m") - dense) / torch.linalg.norm(dense))
    assert report.lost["m"] > true / 2
    assert report.error["m"] == pytest.approx(true, rel=0.05)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "median"}, "Unknown method 'median' of adapters; one of mean, exact, regmean"),
        ({"gauge": "best"}, "Unknown gauge 'best' of adapters; one of keep-a, previous, none"),
        (
            {"gauge": "none"},
            "gauge is an option of 'exact' and 'regmean', and has no effect with 'mean'",
        ),
    ],
)
def test_options_are_checked(options: dict[str, str], said: str) -> None:
    with pytest.raises(FedrotError, match=said):
        AdapterOptions(**options)
