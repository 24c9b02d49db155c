"""Whatever a client sends, the round goes on with all honest clients, and its model is
finite.
"""

import torch
from flwr.app import MetricRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedMedian,
    Krum,
    QFedAvg,
)
from hypothesis import strategies as st

from fedrot.aggregation import Fisher, RegMean
from fedrot.collect.statistics import check_statistics
from fedrot.errors import UpdateError
from fedrot.lora import AdapterOptions
from fedrot.strategies import FedRotLoRA
from fedrot.tensors import LARGEST_NORM, check_finite
from tests.fuzz.cases import fuzzed
from tests.strategies.fakes import (
    broadcast,
    in_front_of,
    replies,
    tensors_of,
)

#: Sizes of numbers at which float32 and float64 break: too small, too large, none.
SCALES = (
    0.0,
    1e-320,
    1e-44,
    1e-20,
    1e-6,
    1.0,
    1e6,
    1e10,
    1e15,
    9e29,
    1e38,
    float("nan"),
    float("inf"),
)
WEIGHTS = (1e-9, 1.0, 10.0, 1e12)
scales, weights, places = (
    st.sampled_from(SCALES),
    st.sampled_from(WEIGHTS),
    st.integers(0, 3),
)
usual = st.just(1.0)


@st.composite
def matrices(draw, *shape):
    """Draw a matrix in float64: random, of one value, or with one entry, and of any
    size.
    """
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    found = torch.randn(shape, generator=generator, dtype=torch.float64)
    match draw(st.integers(0, 4)):
        case 0:
            found = torch.ones_like(found)
        case 1 if found.numel():
            found = torch.zeros_like(found)
            found.view(-1)[0] = 1
    return found * draw(usual | scales)


@st.composite
def grams(draw, size):
    """Draw what may be a Gram matrix, with a size of its own for every input."""
    own = torch.tensor(
        draw(st.lists(scales, min_size=size, max_size=size)), dtype=torch.float64
    )
    base = draw(matrices(size, size))
    match draw(st.integers(0, 3)):
        case 0 | 1:
            base = base @ base.mT
        case 2:
            base = base + base.mT
    root = own.sqrt() if draw(st.booleans()) else torch.ones(size)
    base = root[:, None] * base * root
    for _ in range(draw(st.sampled_from((0, 0, 1, 2)))):
        base[draw(st.integers(0, size - 1)), draw(st.integers(0, size - 1))] = draw(
            scales
        )
    return base.to(draw(st.sampled_from((torch.float32, torch.float32, torch.float64))))


# Adapters

INPUTS, OUTPUTS, RANK = 5, 4, 3
MODULES = ("layer.0.query", "layer.0.value")
LORA = {"peft_type": "LORA", "lora_alpha": 6}
ADAPTERS = (
    AdapterOptions("mean"),
    *(AdapterOptions("exact", gauge=gauge) for gauge in ("keep-a", "none", "previous")),
)


def factor(module, name):
    return f"base_model.model.{module}.lora_{name}.weight"


def adapter(seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module in MODULES:
        tensors[factor(module, "A")] = torch.randn(RANK, INPUTS, generator=generator)
        tensors[factor(module, "B")] = torch.randn(OUTPUTS, RANK, generator=generator)
    return tensors


@st.composite
def adapters(draw):
    """Draw an adapter whose factors may have any size, and another rank."""
    rank = draw(st.sampled_from((RANK, RANK, RANK, 0, 1, RANK + 1)))
    scale = draw(usual | st.sampled_from((1e-44, 1e-42, 1e-20, 1e10, 1e15)))
    tensors = {}
    for module in MODULES:
        tensors[factor(module, "A")] = scale * draw(matrices(rank, INPUTS))
        tensors[factor(module, "B")] = scale * draw(matrices(OUTPUTS, rank))
    return {name: tensor.float() for name, tensor in tensors.items()}


@fuzzed(
    3,
    options=st.sampled_from(ADAPTERS),
    hostile=adapters(),
    examples=weights,
    place=st.integers(0, 2),
)
def test_adapters_are_averaged_or_dropped(options, hostile, examples, place):
    strategy = FedRotLoRA(LORA, options, fraction_evaluate=0.0)
    honest = [(adapter(seed), {"num-examples": 10.0}) for seed in (1, 2)]
    honest.insert(place, (hostile, {"num-examples": examples}))
    accepted = played(strategy, adapter(0), honest)
    assert accepted >= 2
    return accepted == 3


def played(strategy, base, sent):
    """Play a round of updates with metrics; return how many replies were accepted.

    The model is finite.
    """
    asked = broadcast(strategy, base, len(sent))
    answers = replies(asked, [tensors for tensors, _ in sent])
    for answer, (_, metrics) in zip(answers, sent, strict=True):
        answer.content["metrics"] = MetricRecord(metrics)
    arrays, figures = strategy.aggregate_train(1, answers)
    check_finite(tensors_of(arrays))
    return len(sent) - int((figures or {}).get("fedrot-replies-dropped", 0))


# Statistics

SIZE = 4
SHAPES = {"w": (3, SIZE)}
honest_inputs = torch.randn(20, SIZE, generator=torch.Generator().manual_seed(0))
HONEST_GRAM = honest_inputs.T @ honest_inputs / 20


@st.composite
def fishers(draw):
    """Draw what may be a diagonal Fisher."""
    found = draw(matrices(*SHAPES["w"]))
    found = found if draw(st.integers(0, 4)) == 0 else found.abs()
    return found.to(
        draw(st.sampled_from((torch.float16, torch.float32, torch.float64)))
    )


kinds = (
    st.tuples(st.just("gram"), grams(SIZE), st.sampled_from((0.0, 0.9, 1.0))),
    st.tuples(st.just("fisher"), fishers(), st.sampled_from((0.0, 1e-6))),
)


@fuzzed(
    4,
    drawn=st.one_of(kinds),
    update=matrices(*SHAPES["w"]),
    examples=weights,
    place=places,
)
def test_statistics_leave_a_bounded_mean_or_are_refused(drawn, update, examples, place):
    kind, value, setting = drawn
    honest = HONEST_GRAM if kind == "gram" else torch.ones(SHAPES["w"])
    clients = [
        (torch.full(SHAPES["w"], float(i)), 10.0, {kind: {"w": honest}})
        for i in range(3)
    ]
    hostile = update.float(), examples, {kind: {"w": value}}
    try:
        check_finite({"w": hostile[0]})
        check_statistics(hostile[2], SHAPES)
    except UpdateError:
        return False
    clients.insert(place, hostile)
    merge = RegMean(setting) if kind == "gram" else Fisher(setting)
    for tensor, rows, statistics in clients:
        merge.add({"w": tensor}, rows, statistics)
    found = merge.result()["w"]
    largest = max(
        float(torch.linalg.vector_norm(tensor.double())) for tensor, _, _ in clients
    )
    assert float(torch.linalg.vector_norm(found.double())) <= min(
        1.001 * LARGEST_NORM, 1e4 * largest
    )
    return True


# Metrics, and strategies that look at every update

BASE = {"w": torch.zeros(2, 3), "b": torch.ones(2)}
FIXED = {"noise_multiplier": 0.1, "clipping_norm": 1.0, "num_sampled_clients": 5}
ADAPTIVE = {"noise_multiplier": 0.1, "num_sampled_clients": 5}


def behind(strategy, *args, **settings):
    return lambda: in_front_of(strategy)(None, *args, alignment=None, **settings)


BEHIND = {
    **{s.__name__: behind(s) for s in (FedAvg, FedAdam, FedMedian, Krum)},
    **{f"q={q}": behind(QFedAvg, q=q, client_learning_rate=0.1) for q in (0.2, 2.0)},
    "fixed": behind(DifferentialPrivacyServerSideFixedClipping, FedAvg(), **FIXED),
    "adaptive": behind(
        DifferentialPrivacyServerSideAdaptiveClipping, FedAvg(), **ADAPTIVE
    ),
}
HOSTILE = (
    "\n\x1b[31mFORGED",
    "\u202e",
    "x" * 10_000,
    "loss",
    "norm_bit",
    "fedrot-replies-dropped",
)
values = (
    scales
    | st.integers(-(2**63), 2**64 - 1)
    | st.lists(scales, max_size=3)
    | st.sampled_from((-1.0, 0.5, 1e12, 1e308))
)
given = st.fixed_dictionaries(
    {"num-examples": usual | weights | values, "train_loss": usual | values}
)
metrics = given | st.dictionaries(
    st.sampled_from(("num-examples", "train_loss", *HOSTILE)), values, max_size=4
)


@st.composite
def updates(draw):
    """Draw an update, which may be the broadcast model itself, or differ from it by
    hardly anything.
    """
    if draw(st.integers(0, 3)) == 0:
        return BASE
    return {
        name: draw(matrices(*tensor.shape)).float() for name, tensor in BASE.items()
    }


@fuzzed(
    2,
    behind=st.sampled_from(sorted(BEHIND)),
    update=updates(),
    own=metrics,
    place=places,
)
def test_a_round_goes_on(behind, update, own, place):
    usual = {"num-examples": 1.0, "train_loss": 0.5}
    clients = [
        ({n: t + 0.1 * (i + 1) for n, t in BASE.items()}, usual) for i in range(4)
    ]
    clients.insert(place, (update, own))
    accepted = played(BEHIND[behind](), BASE, clients)
    assert accepted >= 4
    return accepted == 5
