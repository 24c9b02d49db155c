"""Every method of averaging adapters keeps one contract; oracles are dense products in
float64.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

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
from tests.fedrot.oracles import drawing, eye, gap
from tests.models import cast, copied, same

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


def factor(module, name="A"):
    return f"{module}.lora_{name}.weight"


QUERY_A, QUERY_B = factor(QUERY), factor(QUERY, "B")


def adapter(seed, rank=3, start=None):
    """Return an adapter with random factors, near those of a start if there is one."""
    drawn = drawing(seed)
    found = {}
    for module, (width, outputs) in MODULES.items():
        found |= pair(drawn, rank, width, outputs, module)
    found[BIAS] = drawn(4)
    if start is None:
        return found
    return {name: start[name] + 0.3 * tensor for name, tensor in found.items()}


def pair(
    drawn,
    rank=4,
    width=60,
    outputs=50,
    module="q",
):
    """Return one pair of random factors."""
    first = drawn(rank, width)
    return {factor(module): first, factor(module, "B"): drawn(outputs, rank)}


def product(tensors, module, settings=SETTINGS):
    """Return the dense update of a module: the oracle."""
    a, b = (tensors[factor(module, name)].flatten(1) for name in "AB")
    return settings.scale(module, len(a)) * b @ a


def truncated(dense, rank):
    u, s, vt = torch.linalg.svd(dense, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vt[:rank]


def scrambled(tensors, seed):
    """Return factors with the same products: ``G A`` and ``B G^-1`` for random
    invertible ``G``.
    """
    drawn = drawing(seed)
    found = dict(tensors)
    for module in MODULES:
        a, b = (factor(module, name) for name in "AB")
        rank = len(tensors[a])
        g = drawn(rank, rank) + 3 * torch.eye(rank)
        found |= {a: g @ tensors[a], b: tensors[b] @ torch.linalg.inv(g)}
    return found


def updates(adapters, weights=(1, 2, 5)):
    return [
        AdapterUpdate(a, w, SETTINGS) for a, w in zip(adapters, weights, strict=False)
    ]


def mean_of(sent, terms):
    """Return the mean of the clients' terms."""
    total = sum(update.weight for update in sent)
    return sum(u.weight / total * term for u, term in zip(sent, terms, strict=True))


def dense_mean(sent, module):
    return mean_of(sent, [product(u.tensors, module, u.settings) for u in sent])


def clients(seed, ranks=(3, 3, 3)):
    return [
        AdapterUpdate(adapter(seed + n, rank), n + 1.0, SCALES[n % 3])
        for n, rank in enumerate(ranks)
    ]


def of_factors(sent, module, rank):
    """Return the product of the means of the factors, in which ``B`` includes the
    scale.
    """
    a = mean_of(sent, [u.tensors[factor(module)] for u in sent])
    scaled = [
        u.settings.scale(module, rank) * u.tensors[factor(module, "B")] for u in sent
    ]
    return mean_of(sent, scaled) @ a


def of_products(sent, module, rank):
    return truncated(dense_mean(sent, module), rank)


def relative(found, expected):
    """Return the distance, relative to the norm of what was expected."""
    return float((found - expected).norm() / expected.norm())


ORACLES = {"mean": of_factors, "exact": of_products}
OWN_GAUGES = ("keep-a", "previous", "none")
CASES = [
    AdapterOptions(name, gauge)
    for name in ORACLES
    for gauge in (OWN_GAUGES if METHODS[name].used else ("keep-a",))
]
EVERY = pytest.mark.parametrize("options", CASES, ids=str)


def close(found, module, expected, tolerance=1e-6):
    apart = (product(found, module) - expected).norm()
    assert float(apart) <= tolerance * max(1.0, float(expected.norm()))


def test_every_method_and_gauge_has_a_case():
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
    options, seed, ranks, rank, received
):
    any_rank = options.averaging.any_rank
    sent = clients(seed, ranks if any_rank else [rank] * len(ranks))
    previous = adapter(seed + 7, rank) if received else None
    other = [replace(update, weight=8 * update.weight) for update in sent[::-1]]
    if any_rank:
        other = [
            replace(update, tensors=scrambled(dict(update.tensors), n))
            for n, update in enumerate(other)
        ]
    (found, report), (again, _) = (
        average_adapters(each, SETTINGS, options, previous, rank)
        for each in (sent, other)
    )
    for module, (width, outputs) in MODULES.items():
        assert found[factor(module)].shape == (rank, width)
        assert found[factor(module, "B")].shape == (outputs, rank)
        close(found, module, ORACLES[options.method](sent, module, rank))
        dense = product(found, module)
        close(again, module, dense)
        error = relative(dense, dense_mean(sent, module))
        assert report.error[module] == pytest.approx(error, abs=1e-6)
        assert report.lost[module] == 0
        naive = report.error_of_factors[module]
        assert (naive is None) == (any_rank and len(set(ranks)) > 1)
        if options.method == "mean":
            assert naive == report.error[module]
    assert_close(found[BIAS], mean_of(sent, [u.tensors[BIAS] for u in sent]))
    assert (report.updates, report.magnitudes) == (len(sent), False)


@EVERY
@pytest.mark.parametrize(
    ("dtype", "error"),
    [(torch.float32, 1e-5), (torch.bfloat16, 4e-2), (None, 1e-5)],
    ids=str,
)
def test_dtypes_stay_and_sums_are_wide(options, dtype, error):
    """None is float32 for ``A`` alone, as a model's parameters."""
    sent = clients(11)
    for update in sent:
        for name, tensor in update.tensors.items():
            if dtype or "_A" in name:
                tensor.data = tensor.to(dtype or torch.float32)
            tensor.requires_grad_(dtype is None)
    found, _ = average_adapters(sent, SETTINGS, options, adapter(9))
    for name, tensor in found.items():
        assert tensor.dtype == sent[0].tensors[name].dtype
        assert not tensor.requires_grad
    wide = [replace(u, tensors=cast(u.tensors, torch.float64)) for u in sent]
    for module in MODULES:
        expected = ORACLES[options.method](wide, module, 3).detach()
        close(cast(found, torch.float64), module, expected, error)


# Refusals


PISSA = LoraSettings.of({"lora_alpha": 6, "init_lora_weights": "pissa"})
EXPERTS = "base_model.model.experts.base_layer"
#: Tensors that one client sends otherwise, None for those that it leaves out, and a
#: word of the error.
BAD = {
    "no B": ({QUERY_B: None}, "query.lora_A.weight' has no partner"),
    "no A": ({QUERY_A: None}, "query.lora_B.weight' has no partner"),
    "two ranks": ({QUERY_A: torch.ones(2, IN)}, "no common rank"),
    "no matrix": ({QUERY_A: torch.ones(4)}, "no common rank"),
    "rank 0": ({QUERY_A: torch.ones(0, IN), QUERY_B: torch.ones(OUT, 0)}, "no common"),
    "other inputs": ({QUERY_A: torch.ones(3, 5)}, "5 inputs"),
    "other outputs": ({QUERY_B: torch.ones(4, 3)}, "4 outputs"),
    "no bias": ({BIAS: None}, "head.bias'.*missing"),
    "NaN": ({BIAS: torch.full((4,), torch.nan)}, "holds NaN or Inf"),
    "one more pair": (
        {factor("m", f): torch.ones(1, 1) for f in "AB"},
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
        f"huge {name}, {size:g}": ({name: adapter(1)[name] * size}, "has norm")
        for name in (QUERY_A, QUERY_B)
        for size in (1e7, 1e15)
    },
}
#: What else a client's update has otherwise, and a word of the error.
BAD_UPDATES = {
    **{f"weight {w}": ({"weight": w}, "weight") for w in (0, -1, float("nan"))},
    "no factors": ({"tensors": {"w": torch.ones(2)}}, "no factors"),
    "another rank of PiSSA": (
        {"tensors": adapter(1, 2), "settings": PISSA},
        "'pissa'",
    ),
}


@EVERY
@pytest.mark.parametrize("wrong", [None, *BAD, *BAD_UPDATES])
def test_what_is_refused_leaves_nothing_and_results_share_nothing(options, wrong):
    """Results may be taken in between."""
    one, other, two = clients(2)
    average = options.average(SETTINGS)
    with pytest.raises(FedrotError, match="no adapters to average"):
        average.result()
    average.add(one)
    if wrong in BAD:
        change, word = BAD[wrong]
        tensors = {**other.tensors, **change}
        tensors = {name: t for name, t in tensors.items() if t is not None}
        other = replace(other, tensors=tensors)
    elif wrong:
        change, word = BAD_UPDATES[wrong]
        other = replace(other, **change)
    if wrong:
        with pytest.raises(UpdateError, match=word):
            average.add(other)
    for tensor in average.result()[0].values():
        tensor.zero_()
    average.add(two)
    expected = average_adapters([one, two], SETTINGS, options)[0]
    for _ in range(2):
        found, report = average.result()
        assert same(found, expected)
        assert report.updates == 2


def exact(adapters, *more, gauge="keep-a", **how):
    """Return the exact average and its report."""
    options = AdapterOptions("exact", gauge)
    return average_adapters(updates(adapters), SETTINGS, options, *more, **how)


def test_what_does_not_go_together_is_refused():
    asked = updates([adapter(0)])
    pissa = [AdapterUpdate(adapter(0), 1.0, PISSA)]
    average_adapters(pissa * 2, PISSA, EXACT, adapter(9))
    other = {"hidden_size": 3}
    two_ranks = updates([adapter(i, i + 1) for i in range(2)])
    rows = [
        (two_ranks, {}, r"query' are \[1, 2\].*method='exact'"),
        (asked, {"rank": 2}, "rank 2"),
        (pissa, {"previous": adapter(9, 4), "options": EXACT}, "has rank 3, others 4"),
        (asked, {"previous": {BIAS: torch.ones(4)}}, "does not contain '.*query'"),
        (asked, {"rank": 2.5}, r"rank is 2\.5; it must be an integer"),
        (asked, {"rank": 0}, "rank is 0"),
        (asked, {"options": "exact"}, r"fedrot\.lora\.AdapterOptions"),
        (asked, {"settings": other}, "configuration"),
        ([replace(asked[0], settings=other)], {}, "configuration"),
        ([adapter(0)], {}, "a dict; pass an AdapterUpdate"),
        ([], {}, "no adapters to average"),
    ]
    for sent, how, word in rows:
        with pytest.raises(FedrotError, match=word):
            average_adapters(sent, **{"settings": SETTINGS, **how})


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
def test_options_are_checked(options, said):
    assert str(AdapterOptions("exact", "none")) == "exact, gauge 'none'"
    with pytest.raises(FedrotError, match=said):
        AdapterOptions(**options)


# Gauges


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), count=st.integers(1, 3))
def test_without_a_gauge_factors_are_balanced_and_depend_on_the_product_alone(
    seed, count
):
    sent = adapter(seed)
    found, _ = exact([scrambled(sent, seed + i) for i in range(count)], gauge="none")
    again, _ = exact([sent], gauge="none")
    for module in MODULES:
        a, b = (found[factor(module, name)] for name in "AB")
        rank = min(3, len(b))
        assert gap(a[:rank] @ a[:rank].mT, (b.mT @ b)[:rank, :rank]) <= 1e-6
    for name in (QUERY_A, QUERY_B):
        assert gap(found[name], again[name]) <= 1e-6


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000))
def test_the_rotation_is_the_best_one(seed):
    drawn = drawing(seed)
    start, to, mean = ((drawn(3, IN), drawn(OUT, 3)) for _ in range(3))

    def distance(a, b):
        return (a - to[0]).norm() ** 2 + (b - to[1]).norm() ** 2

    u, s, vt = torch.linalg.svd(start[1] @ start[0])
    wanted = Wanted(u[:, :3], s[:3], vt[:3], mean, to)
    for (a, b), found in (
        (start, rotated(start, to)),
        (GAUGES["none"](wanted), GAUGES["previous"](wanted)),
    ):
        for _ in range(20):
            r, _ = torch.linalg.qr(drawn(3, 3))
            assert distance(*found) <= distance(r @ a, b @ r.mT) + 1e-9


@pytest.mark.parametrize("terms", [2, 5])
def test_keep_a_is_the_nearest_a_of_its_product(terms):
    """Any ``terms`` combinations of rows of the mean can be moved into the product's
    row space.
    """
    drawn = drawing(0)
    u, v = (torch.linalg.qr(drawn(size, 5))[0] for size in (20, 30))
    s = torch.tensor([3.0, 1.0, 0.9, 0.5, 0.2]).double() * (torch.arange(5) < terms)
    mean = drawn(5, 30)
    a, b = GAUGES["keep-a"](Wanted(u, s, v.mT, (mean, drawn(20, 5)), None))
    assert gap(b @ a, (u * s) @ v.mT) <= 1e-10
    outside = mean - mean @ v[:, :terms] @ v[:, :terms].mT
    for _ in range(50):
        z = torch.linalg.qr(drawn(5, terms))[0]
        assert (a - mean).norm() <= (z @ z.mT @ outside).norm() + 1e-12


@pytest.mark.parametrize("gauge", OWN_GAUGES)
@pytest.mark.parametrize("terms", [0, 1, 2])
def test_what_the_product_does_not_need_of_a_stays(terms, gauge):
    """Products of a smaller rank than the factors, as at LoRA's start, where ``B`` is
    0.
    """
    start = adapter(9)
    sent = copied(start)
    sent[QUERY_B][:, terms:] = 0
    if terms:
        sent[QUERY_A] += 0.1 * adapter(1)[QUERY_A]
    for previous in (start, None):
        found, report = exact([sent], previous, gauge=gauge)
        assert gap(product(found, QUERY), product(sent, QUERY)) <= 1e-10
        # Every direction of A is left to be trained.
        assert torch.linalg.svdvals(found[QUERY_A])[-1] > 0.1
        assert report.error[QUERY] < 1e-7
        # One client's own A has the product.
        if (not terms and gauge != "none") or gauge == "keep-a":
            assert gap(found[QUERY_A], sent[QUERY_A]) <= 1e-7


@pytest.mark.parametrize("gauge", OWN_GAUGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factors_whose_product_is_rounding_noise_stay_trainable(dtype, gauge):
    """PEFT's start ``orthogonal`` has two large factors with ``B A = 0``."""
    drawn = drawing(0)
    q = torch.linalg.qr(drawn(6, 6))[0]
    a = q[:, :3] @ drawn(3, IN)
    start = {factor("m"): a, factor("m", "B"): drawn(OUT, 3) @ q[:, 3:].mT}
    start = cast(start, dtype)
    assert product(start, "m").any()
    found, _ = exact([start] * 3, gauge=gauge)
    for cut, part in ((found, a), (fitted(start, SETTINGS, 2), a[:2])):
        assert not cut[factor("m", "B")].any()
        kept = cut[factor("m")].double()
        assert gap(kept.mT @ kept, part.mT @ part) <= 1e-4


@pytest.mark.parametrize("gauge", OWN_GAUGES)
@pytest.mark.parametrize("trained", [0, 1, 3])
def test_adapters_of_embeddings_stay_trainable(gauge, trained):
    """PEFT starts them with ``A = 0`` and a random ``B``; directions where both are 0
    are dead.
    """
    drawn = drawing(0)
    a, b = (f"table.lora_embedding_{name}" for name in "AB")
    start = {a: torch.zeros(6, 30).double(), b: drawn(20, 6)}
    # Clients that saw a few tokens.
    sent = [copied(start), copied(start)]
    for client in sent:
        client[a][:, :trained] = 0.1 * drawn(6, trained)
    found, _ = exact(sent, start, gauge=gauge)
    for tensors in (found, fitted(found, SETTINGS, 4)):
        alive = tensors[a] @ tensors[a].mT + tensors[b].mT @ tensors[b]
        assert torch.linalg.eigvalsh(alive)[0] > 1e-3
    one, two = (client[b] @ client[a] for client in sent)
    assert gap(found[b] @ found[a], (one + 2 * two) / 3) <= 1e-9


# Ranks, shapes and biases


@pytest.mark.parametrize("rank", [1, 2, 3, 5])
def test_a_client_of_a_smaller_rank_takes_the_best_that_it_can_hold(rank):
    sent = adapter(3)
    start = {name: 0 * t if "_B" in name else t for name, t in sent.items()}
    found, cut = (fitted(each, SETTINGS, rank) for each in (sent, start))
    for module in MODULES:
        a = factor(module)
        assert len(found[a]) == min(rank, 3)
        close(found, module, truncated(product(sent, module), rank))
        assert torch.equal(cut[a], start[a][:rank])
        assert not product(cut, module).any()
    assert all(found[name] is sent[name] for name in (sent if rank >= 3 else [BIAS]))
    like = {factor(module): torch.ones(rank, 1) for module in MODULES}
    assert same(fitted(sent, SETTINGS, like), found)
    for wrong, word in ((0, "rank is 0"), ({}, "at the server")):
        with pytest.raises(FedrotError, match=word):
            fitted(sent, SETTINGS, wrong)


@pytest.mark.parametrize("rank", [1, 2])
def test_kernels_of_convolutions_keep_their_shape(rank):
    drawn = drawing(0)
    a, b = (factor("c", name) for name in "AB")
    sent = [{a: drawn(2, 3, 5, 5), b: drawn(4, 2, 1, 1)} for _ in range(2)]
    found, _ = exact(sent, rank=rank)
    close(found, "c", truncated(dense_mean(updates(sent), "c"), rank))
    for rows, tensors in ((rank, found), (1, fitted(found, SETTINGS, 1))):
        assert tensors[a].shape == (rows, 3, 5, 5)
        assert tensors[b].shape == (4, rows, 1, 1)


def test_biases_of_b_are_averaged_with_their_scale():
    """``LoraConfig(lora_bias=True)``: PEFT multiplies the bias by the scale, too."""
    bias = f"{QUERY}.lora_B.bias"
    ones = {bias: torch.ones(OUT).double()}
    asked = [
        AdapterUpdate({**adapter(0, rank), **ones}, 1.0, LoraSettings(alpha=alpha))
        for rank, alpha in ((2, 2.0), (4, 16.0))
    ]
    found, _ = average_adapters(asked, SETTINGS, EXACT, rank=3)
    for rank, tensors in ((3, found), (1, fitted(found, SETTINGS, 1))):
        scaled = SETTINGS.scale("query", rank) * tensors[bias]
        assert gap(scaled, (2 / 2 + 16 / 4) / 2 * ones[bias]) <= 1e-7


# Bounded sums of products


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), limit=st.integers(1, 6), near=st.booleans())
def test_a_bounded_sum_says_what_it_lost(dtype, seed, limit, near):
    """Several compressions, also of clients near a start, whose sum has a few large
    terms.
    """
    drawn = drawing(seed)
    total = ProductSum(limit)
    dense = torch.zeros(40, 30, dtype=torch.float64)
    start = drawn(40, 2), drawn(2, 30)
    for weight in range(1, 9):
        b, a = (
            (kept + 0.01 * t if near else t).to(dtype)
            for kept, t in zip(start, (drawn(40, 2), drawn(2, 30)), strict=True)
        )
        total.add(b, a, weight)
        dense += weight * b.double() @ a.double()
    terms = total.terms()
    ours = whole(terms)
    rounding = (1e-13 if dtype == torch.float64 else 1e-5) * float(dense.norm())
    assert (ours - dense).norm() <= total.lost + rounding
    assert total.lost > (0 if limit < 6 or not near else -1)
    assert terms.norm == pytest.approx(float(ours.norm()), rel=1e-5)
    s = terms.s.double()
    strong = s[:, None] * s > 1e-3 * s[0] ** 2
    for basis in (terms.u.double(), terms.vt.mT.double()):
        apart = (basis.mT @ basis - eye(len(s))).abs()
        assert torch.where(strong, apart, 0.0).max() < 1e-4
    # The best approximation of bounded rank is not much better.
    best = torch.linalg.svdvals(dense)[limit:].norm()
    error = (whole(terms.first(limit)) - dense).norm()
    assert error <= best + 2 * total.lost + rounding


def whole(terms):
    """Return the matrix that terms add up to."""
    return (terms.u * terms.s).double() @ terms.vt.double()


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), rank=st.integers(1, 6), lost=st.integers(0, 3))
def test_float32_is_decomposed_as_well_as_by_qr(seed, rank, lost):
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
    assert gap(whole(terms), dense) <= 1e-4
    expected = torch.linalg.svdvals(dense)[: len(terms.s)]
    assert torch.allclose(terms.s.double(), expected, rtol=1e-5)
    more = terms.first(len(terms.s) + 2)
    assert not more.s[-2:].any()
    for basis in (more.u, more.vt.mT):
        assert gap(basis.mT @ basis, torch.eye(len(more.s))) <= 1e-4


@pytest.mark.parametrize(
    ("ranks", "rank"),
    [((4,) * 10, 24), ((4,) * 10, 40), ((1, 4, 4, 4, 4), 17), ((4, 4, 4, 4, 1), 17)],
)
def test_a_sum_keeps_four_times_the_largest_rank_and_that_of_the_result(ranks, rank):
    adapters = [pair(drawing(n), of) for n, of in enumerate(ranks)]
    sent = updates(adapters, [1.0] * len(ranks))
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
def test_errors_are_near_the_true_ones(method, steps, count, error):
    """Where one float32 factor hardly moved, and where a bounded sum leaves out a part
    of the mean.
    """
    start = pair(drawing(3))
    few = count == 6
    dtype = torch.float32 if few else torch.float64
    moved = dict(zip(start, steps, strict=True))
    sent = []
    for seed in range(count):
        noise = pair(drawing(9 + seed))
        client = {name: t + moved[name] * noise[name] for name, t in start.items()}
        sent.append(cast(client, dtype))
    weights = range(1, count + 1)
    found, report = average_adapters(
        updates(sent, weights), SETTINGS, AdapterOptions(method)
    )
    found, *sent = (cast(tensors, torch.float64) for tensors in (found, *sent))
    true = relative(product(found, "q"), dense_mean(updates(sent, weights), "q"))
    assert report.error["q"] == pytest.approx(true, **error)
    assert (report.lost["q"] > true / 2) != few
    assert ("the sum of bounded rank leaves out at most" in str(report)) != few


def test_a_sum_reads_no_number_of_a_device_before_its_terms():
    """On the device ``meta``, which has no numbers, the sum fails where it first reads
    one.
    """
    total = ProductSum(4)
    factors = (torch.empty(40, 4, device="meta"), torch.empty(4, 30, device="meta"))
    for _ in range(2):
        total.add(*factors, 1.0)
        with pytest.raises(RuntimeError, match="meta"):
            total.terms()
