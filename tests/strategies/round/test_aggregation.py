"""Ways to merge aligned updates behind FedRot: statistics are asked for, moved and
used.
"""

import logging
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
)

import fedrot
from fedrot.aggregation import Fisher, Mean, RegMean, registry
from fedrot.collect import statistics as kinds
from fedrot.collect.statistics import TRAINED
from fedrot.simulations.run_folder import read_rows
from fedrot.strategies import FedRot, OtherBasis, Reporting, wanted_statistics
from tests.models import EAGER, config_of, near
from tests.strategies.aggregating import (
    ANCHOR,
    DOWN,
    OUTPUT,
    PERMUTATIONS,
    Client,
    answer,
    apart,
    batches,
    finished,
    fishers,
    grams,
    headless,
    honest,
    loaded,
    mean,
    merged,
    play,
    scrambled,
)
from tests.strategies.classifier import NAME, SYMMETRY, WHOLE, build, state
from tests.strategies.fakes import (
    broadcast,
    grid_of,
    in_front_of,
    largest_difference,
    model_in,
    reply,
    round_of,
    tensors_of,
)

CONFIG = config_of(NAME)
GLOBAL = fedrot.AlignmentOptions(anchor="global")
ALIGN = pytest.mark.parametrize(
    "alignment", [GLOBAL, None], ids=["aligned", "unaligned"]
)
WITHIN = fedrot.AlignmentOptions(
    ("heads", "attention", "ffn"), within_heads="permutation"
)
PAGE = Path(__file__).parents[3] / "docs/how-to/own-model.md"
EMBEDDING = "bert.embeddings.word_embeddings.weight"


def bare(clients):
    return [replace(client, statistics={}) for client in clients]


# --- what is merged
# ----------------------------------------------------------------------------------


def of_conv1d():
    """GPT-2 reads its inputs with the weights' first axis: all of its matrices are
    ``gram_conv1d``.
    """
    generator = torch.Generator().manual_seed(0)
    clients = []
    for weight in (1.0, 4.0):
        inputs = torch.randn(20, 4, generator=generator)
        update = {"h.c_fc.weight": torch.randn(4, 3, generator=generator)}
        clients.append(
            Client(
                update, weight, {"gram_conv1d": {"h.c_fc.weight": inputs.T @ inputs}}
            )
        )
    return clients


#: Aggregations, and the clients whose updates they merge.
MERGES = {
    "regmean": (RegMean, honest),
    "options of its own": (lambda: RegMean(alpha=0.3, beta=0.1), honest),
    "conv1d": (RegMean, of_conv1d),
    "fisher": (Fisher, lambda: honest(fishers)),
}


@pytest.mark.parametrize("name", MERGES)
def test_without_alignment_a_round_is_its_aggregation(name):
    build, make = MERGES[name]
    clients = make()
    strategy = FedRot(CONFIG, alignment=None, aggregation=build)
    result, metrics = play(strategy, clients, base=clients[0].update)
    assert apart(result, merged(build(), clients)) <= 1e-6
    assert apart(result, mean(clients)) > 1e-3
    assert not metrics


#: Aggregation, its statistics, what is aligned, and what is scrambled.
FOLLOWING = {
    "regmean": (RegMean, grams, EAGER, EAGER.parts),
    "fisher": (Fisher, fishers, PERMUTATIONS, PERMUTATIONS.parts),
    "fisher inside of heads": (Fisher, fishers, WITHIN, PERMUTATIONS.parts),
}


@ANCHOR
@pytest.mark.parametrize("name", FOLLOWING)
def test_statistics_follow_the_updates_that_alignment_moves(name, anchor):
    """The oracle: align the round, move each client's statistics by hand, merge."""
    aggregation, collect, options, parts = FOLLOWING[name]
    options = replace(options, anchor=anchor)
    clients = honest(collect)
    moved = scrambled(clients, collect, parts)
    aligned = fedrot.align_round(
        [(c.update, c.weight) for c in moved], state(), SYMMETRY, options
    )
    expected = [
        Client(dict(a.tensors), a.weight, a.alignment.transport(c.statistics))
        for c, a in zip(moved, aligned, strict=True)
    ]
    strategy = FedRot(CONFIG, alignment=options, aggregation=aggregation)
    result, metrics = play(strategy, moved)
    assert metrics["fedrot-replies-dropped"] == 0
    assert metrics["fedrot-groups-moved"] > 0
    assert apart(result, merged(aggregation(), expected)) <= 1e-6
    assert largest_difference(result, play(strategy, clients)[0]) <= 1e-4
    unaligned = FedRot(CONFIG, alignment=None, aggregation=aggregation)
    assert largest_difference(play(unaligned, moved)[0], result) > 0.1


def test_replies_of_another_basis_bring_statistics_of_the_whole_model():
    other = state(3)
    clients = [
        Client(other, weight, grams(other, s))
        for s, weight in enumerate((9.0, 5.0, 5.0))
    ]
    moved = [clients[0], *scrambled(clients, parts=fedrot.WHOLE_MODEL)[1:]]
    strategy = FedRot(
        CONFIG, aggregation=RegMean, other_basis=OtherBasis(options=WHOLE)
    )
    assert apart(play(strategy, moved)[0], other) <= 1e-3


@pytest.mark.parametrize(
    ("rows", "length"), [(16, 12), (2, 5)], ids=["many tokens", "few tokens"]
)
def test_statistics_in_bfloat16_drop_nobody_and_give_nearly_the_same(rows, length):
    """Rounding leaves eigenvalues below zero where a direction was not seen."""
    clients = [
        replace(
            c,
            statistics=fedrot.collect_gram(
                loaded(c.update), batches(seed, rows, length)
            ),
        )
        for seed, c in enumerate(honest())
    ]
    strategy = FedRot(CONFIG, alignment=GLOBAL, aggregation=RegMean)
    expected, _ = play(strategy, clients)
    result, metrics = play(strategy, clients, dtype=torch.bfloat16)
    assert metrics["fedrot-replies-dropped"] == 0
    assert (
        0 < largest_difference(result, expected) < 0.1 * apart(expected, mean(clients))
    )


def test_the_report_tells_who_was_dropped_and_what_was_noted(tmp_path):
    reporting = Reporting(rows=tmp_path / "report.jsonl")
    strategy = FedRot(
        CONFIG, aggregation=partial(RegMean, alpha=1.0), reporting=reporting
    )
    few = [
        replace(
            c, statistics=fedrot.collect_gram(loaded(c.update), batches(seed, 2, 5))
        )
        for seed, c in enumerate(honest())
    ]
    play(strategy, [*few, *bare(few[:1])])
    rows = read_rows(tmp_path / "report.jsonl")
    assert [row["client"] for row in rows if "dropped" in row] == [3]
    assert (
        "at every client" in {r["tensor"]: r["note"] for r in rows if "note" in r}[DOWN]
    )
    assert {row["client"] for row in rows if "client" in row} == {0, 1, 2, 3}


# --- who is asked, and who is told
# -------------------------------------------------------------------


class EveryOther(FedRot):
    """A strategy of a user's own that uses statistics in odd rounds only."""

    def needs(self, server_round):
        return super().needs(server_round) if server_round % 2 else ()

    def aggregator(self, server_round):
        return super().aggregator(server_round) if server_round % 2 else Mean


def test_clients_read_round_by_round_what_a_subclass_asks_for():
    """The configuration of all rounds is one and the same record."""
    asked = [[], [], []]

    def client(index):
        def train(message):
            asked[index].append(wanted_statistics(message))
            sent = honest() if asked[index][-1] else bare(honest())
            return answer(message, sent[index], index)

        return train

    strategy = EveryOther(
        CONFIG, alignment=None, aggregation=RegMean, fraction_evaluate=0.0
    )
    grid = grid_of(map(client, range(3)))
    config = ConfigRecord({"lr": 0.1})
    for rounds, expected in ((2, mean(honest())), (3, merged(RegMean(), honest()))):
        result = strategy.start(grid, ArrayRecord(state()), rounds, train_config=config)
        assert apart(result.arrays, expected) <= 1e-6
    assert asked == [[("gram",), (), ("gram",), (), ("gram",)]] * 3


@pytest.mark.parametrize("aggregation", [None, Mean])
def test_without_needs_nothing_is_asked_for(aggregation):
    messages = broadcast(FedRot(CONFIG, aggregation=aggregation), state())
    assert [list(m.content.config_records["config"]) for m in messages] == [
        ["server-round"]
    ] * 3


class Inspecting(FedAvg):
    """Notes the records of the replies that reach it."""

    seen = ()

    def aggregate_train(self, server_round, replies):
        given = list(replies)
        self.seen = tuple(set(message.content) for message in given)
        return super().aggregate_train(server_round, given)


class FedRotInspecting(FedRot, Inspecting):
    """FedRot with its aggregation."""


@ALIGN
def test_statistics_never_reach_the_strategy_behind_and_who_uses_none_says_so(
    alignment, warnings
):
    behind = FedRotInspecting(CONFIG, alignment=alignment, aggregation=RegMean)
    play(behind, honest())
    assert behind.seen == ({"arrays", "metrics"},)
    assert "not used" not in warnings()
    strategy = in_front_of(Inspecting)(CONFIG, alignment=alignment)
    result, _ = play(strategy, [headless(client, [0]) for client in honest()])
    assert strategy.seen == ({"arrays", "metrics", "client"},) * 3
    assert f"'gram', '{TRAINED}' are not used" in warnings()
    plain, _ = play(strategy, bare(headless(client, [0]) for client in honest()))
    assert largest_difference(result, plain) == 0


# --- rounds that lose clients, or all
# ----------------------------------------------------------------


class Choosy(Mean):
    """Refuses whatever weighs 10."""

    def add(self, update, weight, statistics=None):
        if weight == 10:
            raise fedrot.UpdateError("I do not like it.")
        super().add(update, weight, statistics)


@pytest.mark.parametrize(
    "alignment", [EAGER, None], ids=["running anchor", "unaligned"]
)
def test_what_an_aggregation_of_ones_own_refuses_is_in_no_figure_and_no_anchor(
    alignment,
):
    one, two, three = bare(scrambled(honest()))
    clients = [one, replace(two, update=near(two.update, 2.0)), three]
    strategy = FedRot(CONFIG, alignment=alignment, aggregation=Choosy)
    arrays, metrics = finished(strategy, clients, loss=[1.0, 1000.0, 3.0])
    assert metrics["fedrot-replies-dropped"] == 1
    assert metrics["loss"] == pytest.approx((3 * 1.0 + 5 * 3.0) / 8)
    expected, figures = play(strategy, [one, three])
    assert largest_difference(arrays, expected) <= 1e-6
    ours = {"fedrot-groups-moved", "fedrot-share-removed"} & figures.keys()
    assert {name: metrics[name] for name in ours} == {
        name: figures[name] for name in ours
    }


class Picky(Mean):
    """Takes no update at all."""

    def add(self, *args, **kwargs):
        raise fedrot.UpdateError("I do not like it.")


@ALIGN
@pytest.mark.parametrize("aggregation", [RegMean, Picky])
def test_where_nothing_can_be_taken_nothing_is_averaged(aggregation, alignment):
    strategy = FedRot(CONFIG, alignment=alignment, aggregation=aggregation)
    arrays, metrics = finished(strategy, bare(honest()), 2)
    assert arrays is None
    assert metrics["fedrot-replies-dropped"] == 3
    assert metrics.get("fedrot-replies-accepted", 0) == 0


class Broken(Mean):
    """Returns Inf in one entry, and says that all is well."""

    sentence = "this average is exact"

    def result(self):
        found = super().result()
        return {
            **found,
            OUTPUT: found[OUTPUT].index_fill(0, torch.tensor(0), torch.inf),
        }


class Exploding(FedAvg):
    """Makes a model that is none."""

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        return ArrayRecord(
            {n: t * torch.nan for n, t in tensors_of(arrays).items()}
        ), metrics


#: Strategies whose round ends without a model.
NO_MODEL = {
    "an aggregation": lambda **given: FedRot(CONFIG, aggregation=Broken, **given),
    "unaligned": lambda **given: FedRot(
        CONFIG, aggregation=Broken, alignment=None, **given
    ),
    "a step": lambda **given: in_front_of(FedAdam)(CONFIG, eta=1e39, **given),
    "behind": lambda **given: in_front_of(Exploding)(CONFIG, **given),
    "behind, unaligned": lambda **given: in_front_of(Exploding)(
        CONFIG, alignment=None, **given
    ),
}


@pytest.mark.parametrize("name", NO_MODEL)
def test_a_result_that_is_not_finite_leaves_the_model_as_it_was(name, tmp_path, caplog):
    logging.getLogger("flwr").propagate = True
    caplog.set_level(logging.INFO)
    strategy = NO_MODEL[name](reporting=Reporting(rows=tmp_path / "report.jsonl"))
    with np.errstate(over="ignore", invalid="ignore"):
        arrays, metrics = finished(strategy, bare(honest()), loss=[1.0, 1.0, 1.0])
    assert arrays is None
    assert metrics.get("fedrot-replies-dropped", 0) == 0
    assert metrics.get("fedrot-replies-accepted", 3) == 3
    assert metrics["loss"] == pytest.approx(1.0)
    lost = [
        row["lost"] for row in read_rows(tmp_path / "report.jsonl") if "lost" in row
    ]
    assert ["not finite" in reason for reason in lost] == [True]
    assert "exact" not in caplog.text


def test_a_server_step_that_overflows_fails_one_round_and_not_the_next_ones(
    tmp_path,
):
    base = {
        name: t.half() if t.is_floating_point() else t for name, t in state().items()
    }

    def client(message):
        number = round_of(message)
        sent = model_in(message)
        if number == 2:
            sent["classifier.bias"] = torch.full_like(sent["classifier.bias"], 6e4)
        return reply(message, sent, 10)

    strategy = in_front_of(FedAvgM)(
        SYMMETRY,
        server_learning_rate=2.0,
        server_momentum=0.0,
        fraction_evaluate=0.0,
        reporting=Reporting(rows=tmp_path / "report.jsonl"),
    )
    result = strategy.start(grid_of([client] * 2), ArrayRecord(base), num_rounds=4)
    assert [
        row["round"] for row in read_rows(tmp_path / "report.jsonl") if "lost" in row
    ] == [2]
    assert largest_difference(result.arrays, ArrayRecord(base)) < 1e-2


# --- what is refused at once
# -------------------------------------------------------------------------

SHUFFLED = fedrot.AlignmentOptions(parts=("residual", "ffn"))
#: Arguments beside a Fisher mean: heads are rotated, which Fisher cannot follow.
ROTATING = [
    {},
    {"alignment": fedrot.AlignmentOptions(parts=("attention",))},
    {"alignment": PERMUTATIONS, "other_basis": OtherBasis(options=WHOLE)},
    {"alignment": PERMUTATIONS, "other_basis": OtherBasis(build)},
]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        *(
            ({**given, "aggregation": Fisher}, r"align_mod.*=None.*\('heads', 'ffn'\)")
            for given in ROTATING
        ),
        (
            {
                "aggregation": RegMean,
                "alignment": fedrot.AlignmentOptions(canonical=True),
            },
            r"'gram' .* canonical=False",
        ),
        ({"aggregation": RegMean(), "alignment": GLOBAL}, "RegMean; give"),
        ({"aggregation": RegMean(), "alignment": None}, "RegMean; give"),
    ],
)
def test_an_aggregation_that_cannot_work_is_refused_at_once(given, words):
    with pytest.raises(fedrot.FedrotError, match=words):
        FedRot(CONFIG, **given)


@pytest.mark.parametrize(
    "given",
    [
        {"alignment": None, "other_basis": OtherBasis(build)},
        {"alignment": PERMUTATIONS},
        {"alignment": PERMUTATIONS, "other_basis": OtherBasis(options=SHUFFLED)},
    ],
)
def test_fisher_follows_permutations(given):
    FedRot(CONFIG, aggregation=Fisher, **given)


def test_a_privacy_wrapper_around_an_aggregation_is_refused():
    behind = FedRot(CONFIG, alignment=None, aggregation=RegMean)
    strategy = DifferentialPrivacyServerSideFixedClipping(behind, 0.0, 1.0, 3)
    with pytest.raises(fedrot.FedrotError, match="clips"):
        broadcast(strategy, state())


# --- an aggregation of one's own
# ---------------------------------------------------------------------


def test_the_aggregation_and_the_statistic_of_the_page_work_in_rounds(
    monkeypatch,
):
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    monkeypatch.setattr(kinds, "STATISTIC_KINDS", dict(kinds.STATISTIC_KINDS))
    text = PAGE.read_text(encoding="utf-8")
    kind, aggregation, _ = re.findall(
        r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE
    )
    page = {"__name__": "page"}
    exec(compile(kind + aggregation, "aggregation.md", "exec"), page)

    def collect(tensors, seed):
        return page["collect"](loaded(tensors), batches(seed))

    clients = [
        replace(c, statistics=collect(c.update, i)) for i, c in enumerate(honest())
    ]
    odd = [
        replace(clients[0], statistics={"token_counts": {name: torch.ones(2)}})
        for name in (EMBEDDING, "nowhere")
    ]
    by_tokens = {"aggregation": "by-tokens"}
    plain, metrics = play(
        FedRot(CONFIG, alignment=None, **by_tokens),
        [*bare(clients[:1]), *odd, *clients],
    )
    assert metrics["fedrot-replies-dropped"] == 3
    assert apart(plain, merged(page["ByTokens"](), clients)) <= 1e-6
    assert (tensors_of(plain)[EMBEDDING] - mean(clients)[EMBEDDING]).abs().max() > 1e-4
    moved = [
        play(FedRot(CONFIG, alignment=EAGER, **by_tokens), given)[0]
        for given in (clients, scrambled(clients, collect))
    ]
    assert largest_difference(*moved) <= 1e-4
