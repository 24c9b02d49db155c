"""One client among honest ones: it ends no round, pushes nobody out, and costs bounded
resources.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
)
from transformers import GPT2Config, GPT2LMHeadModel

import fedrot
from fedrot.aggregation import RegMean
from fedrot.errors import SymmetryError
from fedrot.matching import descent
from fedrot.matching.problem import Match, Problem
from fedrot.simulations.run_folder import read_rows
from fedrot.strategies import Aligned, FedRot, OtherBasis, Reporting, Server
from fedrot.strategies.wire.arrays import STATISTICS, TIED, encode, to_arrays
from fedrot.strategies.wire.flower_compat import NUMPY
from fedrot.symmetry import Group
from fedrot.tensors import LARGEST_NORM
from tests.models import State, near
from tests.strategies import fakes
from tests.strategies.classifier import SYMMETRY, WHOLE, build, permuted, state
from tests.strategies.fakes import arrays_of, broadcast, largest_difference, reply
from tests.strategies.hostile import CONFIG, KINDS, SETUPS, attack, filled, gaussian

HONEST = [near(state(), 0.02, seed) for seed in (1, 2, 3)]


def play(
    strategy: Any,
    sent: Sequence[State],
    weights: Sequence[float] = (10, 11, 12, 13),
    start: State | None = None,
) -> tuple[ArrayRecord | None, MetricRecord]:
    """Play one round in which the clients answer in the order of their ids."""
    messages = broadcast(strategy, start or state(), len(sent))
    messages.sort(key=lambda m: m.metadata.dst_node_id)
    answers = [
        reply(m, u, w, i)
        for i, (m, u, w) in enumerate(zip(messages, sent, weights, strict=False))
    ]
    arrays, metrics = strategy.aggregate_train(1, answers)
    return arrays, metrics or MetricRecord()


# --- updates that no alignment can be computed from
# --------------------------------------------------


@pytest.mark.parametrize("turn", range(len(SETUPS)), ids=SETUPS)
def test_hostile_updates_end_no_round_and_push_no_honest_client_out(
    turn: int, tmp_path: Path
) -> None:
    """Every other kind in one round; which of them come before the honest clients
    differs by set-up.
    """
    kinds = [list(KINDS)[(turn + 2 * i) % len(KINDS)] for i in range(len(KINDS) // 2)]
    hostile, half = [attack(state(), kind) for kind in kinds], len(kinds) // 2
    sent = [*hostile[:half], *HONEST, *hostile[half:]]
    weights = [10.0 + i for i in range(len(sent))]
    weights[-(turn % 2)] = 1e12
    strategy = list(SETUPS.values())[turn]()
    strategy.reporting = Reporting(rows=tmp_path / "rows.jsonl")
    arrays, _ = play(strategy, sent, weights)
    assert all(
        torch.isfinite(torch.from_numpy(array)).all()
        for array in arrays_of(arrays).values()
    )
    dropped = {
        row["client"] for row in read_rows(tmp_path / "rows.jsonl") if "dropped" in row
    }
    assert not dropped & set(range(half, half + len(HONEST)))


@pytest.mark.parametrize("kind", ["0", "constant 1e-42", "squares vanish"])
def test_what_has_no_normal_scale_is_averaged_as_it_is(kind: str) -> None:
    """Nothing is moved to such an anchor, nor such an update to another one."""
    hostile = attack(state(), kind)
    turned = [
        fedrot.random_equivalent(update, fedrot.symmetry_of(CONFIG, update), 3)
        for update in HONEST
    ]
    found, metrics = play(FedRot(CONFIG), [hostile, *turned])
    assert metrics["fedrot-groups-moved"] == 0
    weights = torch.tensor([10.0, 11.0, 12.0, 13.0], dtype=torch.float64) / 46
    for name, array in arrays_of(found).items():
        mean = sum(
            w * u[name].double()
            for w, u in zip(weights, [hostile, *turned], strict=True)
        )
        assert torch.allclose(torch.from_numpy(array).double(), mean, atol=1e-6), name


def test_the_heaviest_model_of_another_basis_is_the_anchor_if_it_can_be() -> None:
    own = [build_anew(seed) for seed in (5, 6, 7)]
    hostile = filled(own[0], gaussian(1e10))
    strategy = FedRot(CONFIG, other_basis=OtherBasis(build))
    _, metrics = play(strategy, [*own, hostile], (10, 11, 12, 1e12))
    assert metrics["fedrot-replies-dropped"] == 1
    assert metrics["fedrot-replies-accepted"] == 3


def build_anew(seed: int) -> State:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return near(dict(build().state_dict()), 0.05, seed)


def test_a_broadcast_model_that_cannot_be_matched_is_no_anchor() -> None:
    """A hostile update can make such a model, where it is averaged."""
    embeddings = {name: t for name, t in state().items() if "embeddings.weight" in name}
    broken = attack(state(), "gaussian 1e10") | embeddings
    sent = [build_anew(0), *HONEST[1:]]
    _, metrics = play(FedRot(CONFIG, other_basis=OtherBasis(build)), sent, start=broken)
    assert metrics["fedrot-replies-accepted"] == 3
    assert metrics["fedrot-groups-moved"] > 0


GPT2 = GPT2Config(
    **{"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16},
    **{"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0},
)


def build_gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2)


def gpt2_clients(scale: float) -> tuple[State, list[State]]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        start = {name: t.clone() for name, t in build_gpt2().state_dict().items()}
    rotated = fedrot.symmetry_of(GPT2, start).rotated
    clients = (fedrot.canonical(near(start, scale, seed), rotated) for seed in range(3))
    whole = fedrot.WHOLE_MODEL
    return start, [
        fedrot.random_equivalent(c, rotated, i, whole) for i, c in enumerate(clients)
    ]


def overflows_when_folded(update: State) -> State:
    """Return an update that is finite, while a gain in front of its output table takes
    that too far.
    """
    hostile = {name: tensor.clone() for name, tensor in update.items()}
    hostile["lm_head.weight"].view(-1)[-1] = -0.99 * LARGEST_NORM
    hostile["transformer.ln_f.weight"][:] = 1.2
    return hostile


class AlignedFedAdam(Aligned, FedAdam):
    pass


def gpt2(strategy: type = FedRot, **settings: Any) -> Callable[[], Any]:
    return lambda: strategy(GPT2, other_basis=OtherBasis(build_gpt2), **settings)


START, TURNED = gpt2_clients(0.02)
TRAINED = [near(START, 0.02, seed) for seed in (7, 8, 9)]
FOLDED = overflows_when_folded(TURNED[0])
OWN = state()
EQUIVALENT = [
    fedrot.random_equivalent(update, SYMMETRY, i) for i, update in enumerate(HONEST)
]
BIAS = HONEST[0] | {
    name: torch.full_like(tensor, 1e12)
    for name, tensor in HONEST[0].items()
    if name.endswith(("value.bias", "attention.output.dense.weight"))
}
SIGNS = filled(OWN, lambda t: 1e15 * gaussian(1.0)(t).sign(), "layer.0.")

#: By name: a strategy, the model, honest updates, and one that becomes infinite on its
#: way to the mean.
OVERFLOWS: dict[str, tuple[Callable[[], Any], State, Sequence[State], State]] = {
    **{
        kind: (SETUPS["other basis"], OWN, HONEST, attack(OWN, kind))
        for kind in ("gaussian 1e10", "alternating 1e15")
    },
    **{
        anchor: (
            gpt2(alignment=fedrot.AlignmentOptions(anchor=anchor)),
            START,
            TURNED,
            FOLDED,
        )
        for anchor in fedrot.alignment.anchors.ANCHORS
    },
    "one of another basis": (gpt2(), START, TRAINED, FOLDED),
    "FedAdam": (gpt2(AlignedFedAdam), START, TRAINED, FOLDED),
    "a bias": (SETUPS["canonical"], OWN, EQUIVALENT, BIAS),
    "signs": (SETUPS["canonical"], OWN, EQUIVALENT, SIGNS),
    "signs, global": (
        lambda: FedRot(
            CONFIG, alignment=fedrot.AlignmentOptions(canonical=True, anchor="global")
        ),
        *(OWN, EQUIVALENT, SIGNS),
    ),
}


@pytest.mark.parametrize(
    ("name", "place"), [(name, 3 * (i % 2)) for i, name in enumerate(OVERFLOWS)]
)
def test_an_update_that_overflows_is_dropped_as_if_never_sent(
    name: str, place: int
) -> None:
    """It weighs more than all others, and would be their anchor."""
    build, start, honest, hostile = OVERFLOWS[name]
    weights = [10.0, 11.0, 12.0]
    sent = [*honest[:place], hostile, *honest[place:]]
    found, metrics = play(
        build(), sent, [*weights[:place], 1e12, *weights[place:]], start
    )
    expected, figures = play(build(), honest, weights, start)
    assert dict(metrics) == {**figures, "fedrot-replies-dropped": 1}
    assert largest_difference(found, expected) == 0


# --- failures of ours
# ------------------------------------------------------------------------------


MARK = 12345.0


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Fail to match a client whose embeddings are marked, or an anchor, if the list
    holds True.
    """
    against_anchors: list[bool] = []
    solve = descent.match_stage

    def match(groups: Sequence[Group], problem: Problem) -> list[Match]:
        side = problem.anchor.tensors if against_anchors else problem.client
        if float(side["bert.embeddings.word_embeddings.weight"][0, 0]) >= MARK / 4:
            raise RuntimeError("no algorithm for this")
        return solve(groups, problem)

    monkeypatch.setattr(descent, "match_stage", match)
    return against_anchors


def marked() -> State:
    hostile = {name: tensor.clone() for name, tensor in HONEST[0].items()}
    hostile["bert.embeddings.word_embeddings.weight"][0, 0] = MARK
    return hostile


@pytest.mark.parametrize(
    ("anchor", "place"), [("global", 1), ("running", 0), ("running", 3)]
)
def test_whatever_fails_drops_the_update_and_not_the_round(
    anchor: str, place: int, failing: list[bool]
) -> None:
    strategy = FedRot(CONFIG, alignment=fedrot.AlignmentOptions(anchor=anchor))
    found, metrics = play(strategy, [*HONEST[:place], marked(), *HONEST[place:]])
    expected, _ = play(
        strategy, HONEST, [w for i, w in enumerate((10, 11, 12, 13)) if i != place]
    )
    assert metrics["fedrot-replies-dropped"] == 1
    assert largest_difference(found, expected) <= 1e-6


@pytest.mark.parametrize(
    ("anchor", "place"), [("global", 3), ("running", 0), ("running", 1)]
)
def test_honest_clients_are_not_dropped_where_the_anchor_fails(
    anchor: str, place: int, failing: list[bool]
) -> None:
    failing.append(True)
    _, metrics = play(
        FedRot(CONFIG, alignment=fedrot.AlignmentOptions(anchor=anchor)),
        [*HONEST[:place], marked(), *HONEST[place:]],
        [1e12 if i == place else 1 for i in range(4)],
    )
    assert metrics["fedrot-replies-accepted"] == 4


def test_what_no_client_can_cause_ends_the_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for error in (SymmetryError("no solver"), MemoryError()):

        def match(*given: object, error: Exception = error) -> list[Match]:
            raise error

        monkeypatch.setattr(descent, "match_stage", match)
        with pytest.raises(type(error)):
            play(FedRot(CONFIG), HONEST)


# --- replies that are large
# --------------------------------------------------------------------------

MIB = 2**20
BASE = {"w": torch.ones(4, 3), "v": torch.ones(2, 3), "b": torch.zeros(3)}
GOOD = to_arrays(BASE)
METRICS = MetricRecord({"num-examples": 1})
FORGED = "first\n\x1b[31msecond " * 50_000


one = partial(encode, "x")


def content(arrays: Any = GOOD, **more: Any) -> RecordDict:
    return RecordDict({"arrays": ArrayRecord(dict(arrays)), "metrics": METRICS, **more})


def with_statistics(arrays: dict[str, Array]) -> RecordDict:
    return content(**{STATISTICS: ArrayRecord(arrays)})


def with_array(
    stype: str = NUMPY, data: bytes = GOOD["w"].data, dtype: str = "float32"
) -> RecordDict:
    return content({**GOOD, "w": Array(dtype, (4, 3), stype, data)})


LARGE = one(torch.zeros(MIB // 4))
#: Contents of about 1 MB on the wire each; arrays that are equal travel once.
BOMBS: dict[str, Callable[[], RecordDict]] = {
    "arrays": lambda: content(
        {**GOOD, **{f"x{i}": one(torch.zeros(1)) for i in range(5000)}}
    ),
    "array records": lambda: content(
        **{f"x{i}": ArrayRecord({}) for i in range(10_000)}
    ),
    "metric records": lambda: content(**{f"x{i}": METRICS for i in range(10_000)}),
    "config records": lambda: content(
        **{f"x{i}": ConfigRecord({"a": 1}) for i in range(10_000)}
    ),
    "config list": lambda: content(x=ConfigRecord({"a": [1] * 100_000})),
    "metric keys": lambda: content(
        metrics=MetricRecord(
            {"num-examples": 1, **{f"x{i}": 1.0 for i in range(60_000)}}
        )
    ),
    "metric lists": lambda: content(
        metrics=MetricRecord(
            {"num-examples": 1, **{f"x{i}": [] for i in range(60_000)}}
        )
    ),
    "name": lambda: content({**GOOD, "x" * MIB: one(torch.zeros(1))}),
    "dtype": lambda: with_array(dtype="f" * MIB),
    "stype": lambda: with_array("f" * MIB),
    "tied to a long name": lambda: with_array(TIED, b"x" * MIB),
    "axes": lambda: content(
        {**GOOD, "w": Array("float32", (1,) * 200_000, NUMPY, b"")}
    ),
    "statistics": lambda: with_statistics(
        {f"gram/x{i}": one(torch.ones(1)) for i in range(5000)}
    ),
    "one large array": lambda: with_statistics(
        {f"gram/x{i}": LARGE for i in range(10_000)}
    ),
    "one name": lambda: with_statistics(
        {"gram/" + "|".join("w" * 300_000): one(torch.eye(3))}
    ),
    "names": lambda: with_statistics(
        {"gram/" + "|".join(map(str, range(150_000))): LARGE}
    ),
    "same statistics": lambda: with_statistics(
        {f"gram/{'|'.join('w' * i)}": one(torch.eye(3)) for i in range(1, 1000)}
    ),
}


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_a_reply_of_a_megabyte_takes_bounded_time_and_memory(
    name: str, tmp_path: Path
) -> None:
    reporting, server = (
        Reporting(rows=tmp_path / "rows.jsonl"),
        Server(deterministic=True),
    )
    strategy = FedRot(alignment=None, server=server, reporting=reporting)
    asked = broadcast(strategy, BASE, 3)
    replies = [
        Message(make(), reply_to=m)
        for make, m in zip((BOMBS[name], content, content), asked, strict=True)
    ]
    start = time.process_time()
    tracemalloc.start()
    arrays, _ = strategy.aggregate_train(1, replies)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A fifth of a second on the slowest machine we know, and a few times as much if
    # memory is traced.
    assert time.process_time() - start < 5
    assert most < 64 * MIB
    assert largest_difference(arrays, GOOD) == 0
    reasons = [
        row["dropped"] for row in read_rows(tmp_path / "rows.jsonl") if "dropped" in row
    ]
    assert all(len(reason) <= 500 and reason.isprintable() for reason in reasons)


@pytest.mark.parametrize("fault", ["error", "name"])
def test_an_answer_to_a_request_for_matching_is_one_line(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(message: Message) -> Message:
        if fault == "error":
            return Message(Error(1, FORGED), reply_to=message)
        elements = ArrayRecord({FORGED: one(torch.eye(3))})
        return Message(RecordDict({"fedrot-elements": elements}), reply_to=message)

    other_basis = OtherBasis(options=WHOLE, at_clients=True)
    strategy = FedRot(SYMMETRY, other_basis=other_basis, fraction_evaluate=0.0)
    updates = [permuted(near(state(), 0.01, seed), seed) for seed in (1, 2)]
    with caplog.at_level("INFO", logger="flwr"):
        fakes.play(strategy, state(), updates, [answer, answer])
    found = [r.getMessage() for r in caplog.records if "first" in r.getMessage()]
    assert found
    assert all(line.isprintable() and len(line) < 1000 for line in found)


# --- what the aggregations and Flower's strategies divide by
# ------------------------------------------


@pytest.mark.parametrize("smallest", [-60, -25, -8])
@pytest.mark.parametrize("place", [0, 2])
def test_a_gram_matrix_beside_which_no_other_is_seen_gives_the_mean(
    smallest: int, place: int
) -> None:
    """Its columns differ by many orders of magnitude; its client's weights are
    ordinary.
    """
    generator = torch.Generator().manual_seed(0)
    root = torch.logspace(smallest, 14.9, 16, dtype=torch.float64)
    inputs = torch.randn(32, 16, generator=generator, dtype=torch.float64)
    clients = [
        (torch.randn(3, 16, generator=generator), 10.0, inputs.T @ inputs)
        for _ in range(2)
    ]
    clients.insert(place, (torch.zeros(3, 16), 1e12, torch.outer(root, root)))
    merge = RegMean(alpha=1.0)
    for update, weight, gram in clients:
        merge.add({"w": update}, weight, {"gram": {"w": gram}})
    largest = max(float(torch.linalg.vector_norm(update)) for update, _, _ in clients)
    assert float(torch.linalg.vector_norm(merge.result()["w"])) <= 1e4 * largest


PRIVACY: dict[type, dict[str, Any]] = {
    DifferentialPrivacyServerSideFixedClipping: {"clipping_norm": 1.0},
    DifferentialPrivacyServerSideAdaptiveClipping: {},
}


@pytest.mark.parametrize("wrapper", PRIVACY)
@pytest.mark.parametrize("change", [0.0, 1e-30])
def test_an_update_that_changes_nothing_can_be_clipped(
    wrapper: type, change: float
) -> None:
    base = {"w": torch.zeros(2, 3)}
    settings = {"noise_multiplier": 0.0, "num_sampled_clients": 2, **PRIVACY[wrapper]}
    strategy: Any = type("Private", (Aligned, wrapper), {})(
        None, FedAvg(), alignment=None, **settings
    )
    asked = broadcast(strategy, base, 2)
    sent = [base["w"] + change, base["w"] + 0.01]
    replies = [
        reply(m, {"w": w}, 1, i)
        for i, (m, w) in enumerate(zip(asked, sent, strict=True))
    ]
    arrays, _ = strategy.aggregate_train(1, replies)
    assert arrays_of(arrays)["w"] == pytest.approx(0.005)
