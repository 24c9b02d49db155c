"""One client among honest ones: it ends no round, pushes nobody out, and costs bounded
resources.
"""

import pytest
import torch
from flwr.app import (
    ArrayRecord,
    Error,
    Message,
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
from fedrot.aggregation import Mean
from fedrot.errors import SymmetryError
from fedrot.matching import descent
from fedrot.simulations.run_folder import read_rows
from fedrot.strategies import FedRot, OtherBasis, Reporting
from fedrot.strategies.wire.arrays import encode
from fedrot.tensors import LARGEST_NORM, check_finite
from tests.models import near
from tests.strategies.classifier import SYMMETRY, WHOLE, build, permuted, state
from tests.strategies.fakes import (
    aggregated,
    arrays_of,
    in_front_of,
    largest_difference,
    tensors_of,
)
from tests.strategies.hostile import CONFIG, KINDS, SETUPS, attack, filled, gaussian

HONEST = [near(state(), 0.02, seed) for seed in (1, 2, 3)]
EQUIVALENT = [
    fedrot.random_equivalent(update, SYMMETRY, i) for i, update in enumerate(HONEST)
]


# --- updates that no alignment can be computed from
# --------------------------------------------------


@pytest.mark.parametrize("turn", range(len(SETUPS)), ids=SETUPS)
def test_hostile_updates_end_no_round_and_push_no_honest_client_out(turn, tmp_path):
    """Every other kind in one round; which of them come before the honest clients
    differs by set-up.
    """
    kinds = ([*KINDS] * 2)[turn % len(KINDS) :][: len(KINDS) - 1 : 2]
    hostile = [attack(state(), kind) for kind in kinds]
    half = len(kinds) // 2
    sent = [*hostile[:half], *HONEST, *hostile[half:]]
    weights = [10.0 + i for i in range(len(sent))]
    weights[-(turn % 2)] = 1e12
    strategy = list(SETUPS.values())[turn]()
    strategy.reporting = Reporting(rows=tmp_path / "rows.jsonl")
    arrays, _ = aggregated(strategy, state(), sent, weights)
    check_finite(tensors_of(arrays))
    rows = read_rows(tmp_path / "rows.jsonl")
    dropped = {row["client"] for row in rows if "dropped" in row}
    assert not dropped & set(range(half, half + len(HONEST)))


@pytest.mark.parametrize("kind", ["0", "constant 1e-42", "squares vanish"])
def test_what_has_no_normal_scale_is_averaged_as_it_is(kind):
    """Nothing is moved to such an anchor, nor such an update to another one."""
    turned = [fedrot.random_equivalent(update, SYMMETRY, 3) for update in HONEST]
    sent = [attack(state(), kind), *turned]
    result, metrics = aggregated(FedRot(CONFIG), state(), sent)
    assert metrics["fedrot-groups-moved"] == 0
    plain, _ = aggregated(FedRot(alignment=None, aggregation=Mean), state(), sent)
    assert largest_difference(result, plain) <= 1e-6


def test_the_heaviest_model_of_another_basis_is_the_anchor_if_it_can_be():
    own = [build_anew(seed) for seed in (5, 6, 7)]
    hostile = filled(own[0], gaussian(1e10))
    strategy = FedRot(CONFIG, other_basis=OtherBasis(build))
    weights = (10, 11, 12, 1e12)
    _, metrics = aggregated(strategy, state(), [*own, hostile], weights)
    assert metrics["fedrot-replies-dropped"] == 1
    assert metrics["fedrot-replies-accepted"] == 3


def build_anew(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return near(dict(build().state_dict()), 0.05, seed)


def test_a_broadcast_model_that_cannot_be_matched_is_no_anchor():
    """A hostile update can make such a model, where it is averaged."""
    embeddings = {name: t for name, t in state().items() if "embeddings.weight" in name}
    broken = attack(state(), "gaussian 1e10") | embeddings
    sent = [build_anew(0), *HONEST[1:]]
    _, metrics = aggregated(FedRot(CONFIG, other_basis=OtherBasis(build)), broken, sent)
    assert metrics["fedrot-replies-accepted"] == 3
    assert metrics["fedrot-groups-moved"] > 0


GPT2 = GPT2Config(
    vocab_size=50,
    n_embd=16,
    n_layer=2,
    n_head=2,
    n_positions=16,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=0,
)


def build_gpt2():
    return GPT2LMHeadModel(GPT2)


def gpt2_clients(scale):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        start = {name: t.clone() for name, t in build_gpt2().state_dict().items()}
    rotated = fedrot.symmetry_of(GPT2, start).rotated
    clients = (fedrot.canonical(near(start, scale, seed), rotated) for seed in range(3))
    whole = fedrot.WHOLE_MODEL
    return start, [
        fedrot.random_equivalent(c, rotated, i, whole) for i, c in enumerate(clients)
    ]


def overflows_when_folded(update):
    """Return an update that is finite, while a gain in front of its output table takes
    that too far.
    """
    hostile = {name: tensor.clone() for name, tensor in update.items()}
    hostile["lm_head.weight"].view(-1)[-1] = -0.99 * LARGEST_NORM
    hostile["transformer.ln_f.weight"][:] = 1.2
    return hostile


def gpt2(strategy=FedRot, **settings):
    return lambda: strategy(GPT2, other_basis=OtherBasis(build_gpt2), **settings)


START, TURNED = gpt2_clients(0.02)
TRAINED = [near(START, 0.02, seed) for seed in (7, 8, 9)]
FOLDED = overflows_when_folded(TURNED[0])
OWN = state()
BIAS = HONEST[0] | {
    name: torch.full_like(tensor, 1e12)
    for name, tensor in HONEST[0].items()
    if name.endswith(("value.bias", "attention.output.dense.weight"))
}
SIGNS = filled(OWN, lambda t: 1e15 * gaussian(1.0)(t).sign(), "layer.0.")

#: By name: a strategy, the model, honest updates, and one that becomes infinite on its
#: way to the mean.
OVERFLOWS = {
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
    "FedAdam": (gpt2(in_front_of(FedAdam)), START, TRAINED, FOLDED),
    "a bias": (SETUPS["canonical"], OWN, EQUIVALENT, BIAS),
    "signs": (SETUPS["canonical"], OWN, EQUIVALENT, SIGNS),
    "signs, global": (
        lambda: FedRot(
            CONFIG, alignment=fedrot.AlignmentOptions(canonical=True, anchor="global")
        ),
        OWN,
        EQUIVALENT,
        SIGNS,
    ),
}


@pytest.mark.parametrize(
    ("name", "place"), [(name, 3 * (i % 2)) for i, name in enumerate(OVERFLOWS)]
)
def test_an_update_that_overflows_is_dropped_as_if_never_sent(name, place):
    """It weighs more than all others, and would be their anchor."""
    build, start, honest, hostile = OVERFLOWS[name]
    weights = [10.0, 11.0, 12.0]
    expected, figures = aggregated(build(), start, honest, weights)
    weights.insert(place, 1e12)
    sent = [*honest[:place], hostile, *honest[place:]]
    result, metrics = aggregated(build(), start, sent, weights)
    assert metrics == {**figures, "fedrot-replies-dropped": 1}
    assert largest_difference(result, expected) == 0


# --- failures of ours
# ------------------------------------------------------------------------------


MARK, MARKED = 12345.0, "bert.embeddings.word_embeddings.weight"


@pytest.mark.parametrize(
    ("anchor", "place", "at_anchor"),
    [
        ("global", 1, False),
        ("running", 0, False),
        ("running", 3, False),
        ("global", 3, True),
        ("running", 0, True),
        ("running", 1, True),
    ],
)
def test_whatever_fails_drops_the_update_that_causes_it_and_not_the_round(
    anchor, place, at_anchor, monkeypatch
):
    """Where matching fails for the anchor's sake, nobody is to blame."""
    solve = descent.match_stage

    def match(groups, problem):
        side = problem.anchor.tensors if at_anchor else problem.client
        if float(side[MARKED][0, 0]) >= MARK / 4:
            raise RuntimeError("no algorithm for this")
        return solve(groups, problem)

    monkeypatch.setattr(descent, "match_stage", match)
    marked = {name: tensor.clone() for name, tensor in HONEST[0].items()}
    marked[MARKED][0, 0] = MARK
    strategy = FedRot(CONFIG, alignment=fedrot.AlignmentOptions(anchor=anchor))
    weights = [1.0] * 3 if at_anchor else [10.0, 11.0, 12.0]
    expected, _ = aggregated(strategy, state(), HONEST, weights)
    sent = [*HONEST[:place], marked, *HONEST[place:]]
    weights.insert(place, 1e12 if at_anchor else 20.0)
    result, metrics = aggregated(strategy, state(), sent, weights)
    assert metrics["fedrot-replies-accepted"] == 3 + at_anchor
    assert metrics["fedrot-replies-dropped"] == (not at_anchor)
    assert at_anchor or largest_difference(result, expected) <= 1e-6


def test_what_no_client_can_cause_ends_the_round(
    monkeypatch,
):
    for error in (SymmetryError("no solver"), MemoryError()):

        def match(*problem, error=error):
            raise error

        monkeypatch.setattr(descent, "match_stage", match)
        with pytest.raises(type(error)):
            aggregated(FedRot(CONFIG), state(), HONEST)


FORGED = "first\n\x1b[31msecond " * 50_000


@pytest.mark.parametrize("fault", ["error", "name"])
def test_an_answer_to_a_request_for_matching_is_one_line(fault, caplog):
    def answer(message):
        if fault == "error":
            return Message(Error(1, FORGED), reply_to=message)
        elements = ArrayRecord({FORGED: encode("x", torch.eye(3))})
        return Message(RecordDict({"fedrot-elements": elements}), reply_to=message)

    other_basis = OtherBasis(options=WHOLE, at_clients=True)
    strategy = FedRot(SYMMETRY, other_basis=other_basis, fraction_evaluate=0.0)
    updates = [permuted(near(state(), 0.01, seed), seed) for seed in (1, 2)]
    with caplog.at_level("INFO", logger="flwr"):
        aggregated(strategy, state(), updates, nodes=[answer, answer])
    lines = [r.getMessage() for r in caplog.records if "first" in r.getMessage()]
    assert lines
    assert all(line.isprintable() and len(line) < 1000 for line in lines)


# --- what Flower's strategies divide by


PRIVACY = {
    DifferentialPrivacyServerSideFixedClipping: {"clipping_norm": 1.0},
    DifferentialPrivacyServerSideAdaptiveClipping: {},
}


@pytest.mark.parametrize("wrapper", PRIVACY)
@pytest.mark.parametrize("change", [0.0, 1e-30])
def test_an_update_that_changes_nothing_can_be_clipped(wrapper, change):
    base = {"w": torch.zeros(2, 3)}
    settings = {"noise_multiplier": 0.0, "num_sampled_clients": 2, **PRIVACY[wrapper]}
    private = in_front_of(wrapper)(None, FedAvg(), alignment=None, **settings)
    sent = [{"w": base["w"] + change}, {"w": base["w"] + 0.01}]
    arrays, _ = aggregated(private, base, sent, [1, 1])
    assert arrays_of(arrays)["w"] == pytest.approx(0.005)
