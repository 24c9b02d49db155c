"""``FedRot(fit_head=True)``: head first, the choice after each round, and what travels
for it.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

import fedrot
from fedrot.errors import UpdateError
from fedrot.lora import AdapterOptions, adapter_tensors, load_adapter
from fedrot.strategies import (
    Checkpointing,
    FedRot,
    FedRotLoRA,
    Reporting,
    Server,
    fit_task_head,
)
from fedrot.strategies.fitting import exchange
from fedrot.strategies.wire.arrays import TIED, from_arrays, to_arrays
from fedrot.strategies.wire.fitting_messages import (
    CHANGE,
    EVALUATE,
    LACKS,
    MODEL,
    STAGE,
    SUM,
)
from fedrot.task_head.choice import choose
from tests.models import near
from tests.strategies import toy
from tests.strategies.fakes import (
    failure,
    grid_of,
    largest_difference,
    model_in,
    reply,
    tensors_of,
)
from tests.strategies.fitting.classifiers import KINDS, RANKS, SINGLE
from tests.strategies.toy import HEAD, client, loss, state

CLIENTS = 4


def noting(strategy):
    sent = []

    class Noting(strategy):  # type: ignore[misc, valid-type]
        def configure_train(
            self,
            server_round,
            arrays,
            config,
            grid,
        ):
            sent.append(arrays)
            return super().configure_train(server_round, arrays, config, grid)

    return Noting, sent


def noted(nodes, notes):
    def wrapped(node):
        def answer(message):
            (config,) = message.content.config_records.values()
            records = message.content.array_records.items()
            models = {
                name: own
                for name, own in records
                if name.startswith((MODEL, CHANGE, "arrays"))
            }
            notes.append((str(config.get(STAGE, "train")), models))
            return node(message)

        return answer

    return [wrapped(node) for node in nodes]


#: Sums of updates do not depend on the order of arrival.
COMMON = {
    "fraction_evaluate": 0.0,
    "server": Server(deterministic=True),
}


def played(
    nodes=None,
    rounds=2,
    start=None,
    config=None,
    **given,
):
    """Return the result of a run, by default of ``LEARNERS``, and its rounds' broadcast
    models.
    """
    strategy, sent = noting(FedRot)
    ours = strategy(config or SINGLE.config, **{"fit_head": True, **COMMON, **given})
    initial = start or ArrayRecord(SINGLE.state())
    return ours.start(grid_of(nodes or LEARNERS), initial, rounds, timeout=1), sent


# The choice, with bodies that are one number; the best is 1


def run(nodes, rounds, body=0.0, **given):
    settings = {"alignment": None, "fit_head": HEAD, "server": None, **given}
    start = ArrayRecord(state(body))
    config = {"model_type": "bert"}
    result, sent = played(nodes, rounds, start, config, **settings)
    return result, list(map(tensors_of, sent))


def clients(to, folder=None, count=CLIENTS):
    return [client(seed, folder, to) for seed in range(count)]


#: What training does to the body, and how much of the change is taken.
STEPS = {
    "better": (0.0, lambda body: 1.0, 1.0),
    "half way is better": (0.0, lambda body: 2.0, 0.5),
    "worse": (1.0, lambda body: -1.0, 0.0),
}


@pytest.mark.parametrize("case", STEPS)
def test_the_best_of_old_new_and_half_way_is_taken(case, tmp_path):
    start, to, step = STEPS[case]
    reporting = Reporting(tmp_path / "rows.jsonl", hashes=True)
    # Below four clients losses are means.
    result, (first,) = run(clients(to, count=3), 1, start, reporting=reporting)
    assert (tmp_path / "rows.jsonl").read_text().count('"sha256"') == (3 if step else 0)
    last = tensors_of(result.arrays)
    assert (float(first["body"]), float(last["body"])) == (
        start,
        start + step * (to(start) - start),
    )
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["fedrot-head-step"], metrics["fedrot-head-fitted"]) == (
        step,
        int(step > 0),
    )
    assert (metrics["fedrot-head-change"] < 0) == (step > 0)
    page = Path("docs/reference/metrics.md").read_text(encoding="utf-8")
    assert all(
        f"* `{name}`: " in page for name in metrics if name.startswith("fedrot-head")
    )
    assert metrics["fedrot-head-loss"] == pytest.approx(loss(last, 3), rel=1e-5)


def test_a_body_half_way_without_a_fitted_head_is_no_candidate(monkeypatch):
    fit = exchange.with_fitted_task_heads

    def refused(like, *how):
        if like.share == 0.5:
            raise UpdateError("no head for this body")
        return fit(like, *how)

    compared = []

    def noted(votes, old, candidates):
        compared.extend(candidates)
        return choose(votes, old, candidates)

    monkeypatch.setattr(exchange, "with_fitted_task_heads", refused)
    monkeypatch.setattr(exchange, "choose", noted)
    run(clients(lambda body: 2.0, count=3), 1)
    assert {candidate.share for candidate in compared} == {1.0}
    assert all(candidate.fitted for candidate in compared)


def test_the_error_is_the_standard_error_of_the_differences_of_rows():
    """The oracle: the rows of all clients, which have equal numbers of rows; below
    four, a mean.
    """
    result, (first, *_) = run(clients(lambda body: body + 0.05, count=3), 1)
    last = tensors_of(result.arrays)
    differences = toy.row_losses(last, 3) - toy.row_losses(first, 3)
    metrics = result.train_metrics_clientapp[1]
    assert metrics["fedrot-head-change"] == pytest.approx(
        float(differences.mean()), abs=1e-6
    )
    within = differences.var(1, correction=0).mean() / (3 * 90)
    assert metrics["fedrot-head-error"] == pytest.approx(float(within) ** 0.5, rel=0.2)


#: The first body, and what is sent of it: clients build one of 0 themselves.
FIRST = {
    "the clients' own": (0.0, [], []),
    "another": (0.25, [("sum", [f"{MODEL}-0"])], [f"{MODEL}-0"]),
}


@pytest.mark.parametrize("case", FIRST)
def test_a_model_travels_once_for_its_head_and_then_as_a_change(case, tmp_path):
    start, first, reported = FIRST[case]
    notes = []
    run(noted(clients(lambda body: body + 0.3, tmp_path), notes), 2, start)
    before = [("count", []), ("sum", []), *first, ("evaluate", [])]
    each = [
        ("train", ["arrays"]),
        ("count", []),
        ("sum", [f"{CHANGE}-0"]),
        ("sum", []),
        ("evaluate", []),
    ]
    every = [*before, *each, *each, ("report", reported)]
    expected = [one for one in every for _ in range(CLIENTS)]
    assert [(step, list(models)) for step, models in notes] == expected
    # The first model and the last one; before the report the last one, the one before
    # it, and the one half way. Nobody else may read them.
    files = [*tmp_path.rglob("*.safetensors")]
    assert len(files) == 2
    assert files[0].parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", ["single", "pooled", "adapter"])
def test_a_model_that_clients_build_themselves_is_not_sent(name):
    """The head is that of clients that build another one, and receive it."""
    kind, notes = KINDS[name], []

    def another():
        model = kind.drawn()
        for parameter in model.parameters():
            # The base of an adapter stays.
            parameter.data += float(parameter.requires_grad)
        return model

    own = [kind.client(*pair) for pair in kind.pairs()]
    others = [kind.client(*pair, another) for pair in kind.pairs()]
    found = kind.fitted(noted(own, notes))
    assert {stage for stage, _ in notes} == {"count", "sum", "evaluate"}
    assert not any(models for _, models in notes)
    assert largest_difference(found.arrays, kind.fitted(others).arrays) == 0


def test_only_models_of_runs_long_ago_are_deleted(tmp_path):
    names = ("1/a.safetensors", "2/b.safetensors", "1/c")
    old, new, others = (tmp_path / "fedrot-bodies" / name for name in names)
    for path in (old, new, others):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    for path in (old, others):
        os.utime(path, (0, 0))
    run(clients(lambda body: body, tmp_path), 1)
    assert [path.exists() for path in (old, new, others)] == [False, True, True]


@pytest.mark.parametrize("what", ["lost", "damaged", "never kept"])
def test_lost_and_damaged_files_and_full_disks_cost_only_bytes(
    what, tmp_path, warnings
):
    notes = []
    folder = tmp_path / "folder"
    expected, _ = run(clients(lambda body: body + 0.3), 2)
    if what == "never kept":
        folder.write_text("")
    nodes = noted(clients(lambda body: body + 0.3, folder), notes)

    def spoiling(message):
        for path in folder.rglob("*.safetensors"):
            data = path.read_bytes()
            place = 8 + int.from_bytes(data[:8], "little")  # of the body
            path.write_bytes(data[:place] + b"\1\2\3\4" + data[place + 4 :])
            if what == "lost":
                path.unlink()
        return nodes[0](message)

    found, _ = run([spoiling, *nodes[1:]], 2)
    # What was lost came again, as a whole.
    assert ("evaluate", [f"{MODEL}-0", f"{MODEL}-1", f"{MODEL}-2"]) in [
        (step, list(own)) for step, own in notes
    ]
    assert largest_difference(found.arrays, expected.arrays) == 0
    assert ("is not kept for the next request" in warnings()) == (what == "never kept")


def test_clients_that_always_lack_the_model_are_left_out(
    warnings,
):
    def lacking(message):
        (config,) = message.content.config_records.values()
        lacks = Message(RecordDict({LACKS: ConfigRecord()}), reply_to=message)
        return lacks if config.get(STAGE) in (SUM, EVALUATE) else client(9)(message)

    honest = clients(lambda body: body + 0.3)
    found, expected = (run(nodes, 1)[0] for nodes in ([*honest, lacking], honest))
    bodies = [tensors_of(result.arrays)["body"] for result in (found, expected)]
    assert float((bodies[0] - bodies[1]).abs()) < 0.1
    run([lacking, lacking], 1)
    assert "all say that they lack the model" in warnings()


def test_a_resumed_run_does_not_begin_anew(tmp_path):
    given = {"checkpoints": Checkpointing(tmp_path / "runs")}
    whole, _ = run(clients(lambda body: body + 0.3), 3)
    run(clients(lambda body: body + 0.3), 1, **given)
    notes = []
    found, sent = run(noted(clients(lambda body: body + 0.3), notes), 3, **given)
    assert len(sent) == 2
    # Nothing is known of the clients: what they may have is not asked.
    asked = [(stage, [*models]) for stage, models in notes[::CLIENTS]]
    one = [f"{MODEL}-0"]
    first = [("train", ["arrays"]), ("count", []), *[("sum", one)] * 2]
    assert asked[:5] == [*first, ("evaluate", one)]
    assert largest_difference(found.arrays, whole.arrays) == 0


def learner(index, build=None):
    answers = SINGLE.client(*SINGLE.pairs()[index], build)

    def node(message):
        if message.metadata.message_type != "train":
            return answers(message)
        received = model_in(message)
        return reply(message, near(received, 0.01, seed=index), 10 + index, index)

    return node


LEARNERS = [learner(index) for index in range(3)]


@pytest.mark.parametrize(
    "given",
    [{"alignment": None, "aggregation": "mean", "fit_head": HEAD}, {}],
    ids=["a mean, named head", "aligned"],
)
def test_every_round_ends_with_the_best_of_three_models(given):
    """The oracle: rounds without the argument, one at a time, and ``fit_task_head`` for
    each body.
    """
    result, sent = played(**given)
    grid, config, initial = (
        grid_of(LEARNERS),
        SINGLE.config,
        ArrayRecord(SINGLE.state()),
    )
    model = fit_task_head(grid, initial, config).arrays
    plain = {name: value for name, value in given.items() if name != "fit_head"}
    for number, received in enumerate(sent, start=1):
        assert largest_difference(received, model) == 0
        before = SINGLE.judged(tensors_of(model))
        merged = FedRot(config, **COMMON, **plain).start(grid, model, 1).arrays
        pairs = zip(tensors_of(model).items(), tensors_of(merged).values(), strict=True)
        half = ArrayRecord({name: (old + new) / 2 for (name, old), new in pairs})
        found = [fit_task_head(grid, one, config) for one in (merged, half)]
        best = min(found, key=lambda one: one.losses[2])
        metrics = result.train_metrics_clientapp[number]
        if best.losses[2] < before:
            model = best.arrays
            assert metrics["fedrot-head-step"] == (1, 0.5)[found.index(best)]
            assert metrics["fedrot-head-loss"] == pytest.approx(
                best.losses[2], rel=1e-9
            )
        else:
            assert metrics["fedrot-head-step"] == 0
    assert largest_difference(result.arrays, model) == 0
    assert len(sent) == 2
    assert SINGLE.judged(tensors_of(model)) < SINGLE.judged(tensors_of(initial)) - 0.1


@pytest.mark.parametrize("method", ["mean", "exact"])
def test_adapters_are_never_worse_over_rounds(method):
    """The oracle is the loss of each broadcast adapter on the held-out rows of all
    clients.
    """
    kind = KINDS["adapter"]
    ranks = RANKS if method == "exact" else (max(RANKS),) * 3

    def adapter_learner(index):
        rank = ranks[index]
        answers = kind.client(*kind.pairs()[index], lambda: kind.drawn(rank))

        def node(message):
            if message.metadata.message_type != "train":
                return answers(message)
            own = kind.build(rank)
            load_adapter(own, model_in(message))
            generator = torch.Generator().manual_seed(index)
            sent = {
                name: tensor + torch.randn(tensor.shape, generator=generator) / 2
                for name, tensor in adapter_tensors(own).items()
            }
            return reply(message, sent, 10, index)

        return node

    strategy, sent = noting(FedRotLoRA)
    ours = strategy(
        kind.config, AdapterOptions(method), fit_head=True, fraction_evaluate=0.0
    )
    grid, model, losses = (
        grid_of(map(adapter_learner, range(3))),
        kind.build(),
        list[float](),
    )
    result = ours.start(grid, ArrayRecord(kind.state()), 2, timeout=1)
    for arrays in [*sent, result.arrays]:
        load_adapter(model, tensors_of(arrays))
        own = [
            kind.loss(kind.logits(model, rows), rows["labels"])
            for _, rows in kind.pairs()
        ]
        losses.append(float(torch.cat(own).mean()))
    assert all(after <= before + 1e-5 for before, after in pairwise(losses))
    steps = [one["fedrot-head-step"] for one in result.train_metrics_clientapp.values()]
    assert set(steps) <= ({0.0, 0.5, 1.0} if method == "mean" else {0.0, 1.0})


def test_a_later_round_without_answers_keeps_its_head(
    warnings,
):
    def once(node):
        asked = []

        def answer(message):
            asked.append(message.metadata.message_type != "train")
            # Three answers before the first round, four after it.
            return failure(message) if asked[-1] and sum(asked) > 7 else node(message)

        return answer

    result, sent = played(map(once, LEARNERS), 3)
    assert "Round 2: the task head is not fitted" in warnings()
    metrics = result.train_metrics_clientapp
    assert [own["fedrot-head-failed"] for own in metrics.values()] == [0, 1, 1]
    assert [
        number for number, found in metrics.items() if "fedrot-head-loss" in found
    ] == [1]
    merged = FedRot(SINGLE.config, **COMMON).start(grid_of(LEARNERS), sent[1], 1).arrays
    assert largest_difference(sent[2], merged) == 0


def only(trains):
    """Return a node that fails unless it is to train, or unless it is not."""
    return lambda message: (
        LEARNERS[0] if (message.metadata.message_type == "train") is trains else failure
    )(message)


def test_a_failed_round_fits_no_head_and_a_first_round_without_answers_stops():
    notes = []
    result, (first,) = played(noted([only(trains=False)] * 2, notes), 1)
    stages = [stage for stage, _ in notes]
    assert stages[-4:] == ["train", "train", "report", "report"]
    assert largest_difference(result.arrays, first) == 0
    with pytest.raises(fedrot.FedrotError, match="usable answer"):
        played([only(trains=True)] * 2)


def test_a_subclass_that_hides_the_model_is_refused():
    """It makes the messages itself and plays the rounds itself: nobody knows the
    round's model.
    """

    class Own(FedRot):
        def configure_train(self, *given):
            _, arrays, config, grid = given
            content = RecordDict({"arrays": arrays, "config": config})
            return [Message(content, node, "train") for node in grid.get_node_ids()]

    grid = grid_of(LEARNERS)
    initial = ArrayRecord(SINGLE.state())
    for more in ({"fit_head": True}, {"reporting": Reporting(os.devnull, hashes=True)}):
        strategy = Own(SINGLE.config, alignment=None, **more)
        messages = strategy.configure_train(1, initial, ConfigRecord(), grid)
        with pytest.raises(fedrot.FedrotError, match="round 1"):
            strategy.aggregate_train(1, list(grid.send_and_receive(messages)))


def of_precision(index, dtype=None):
    """Return a node that computes in float32; with a precision it answers in it, and
    with the tie.
    """

    def tied():
        model = SINGLE.drawn()
        model.register_parameter("again", model.bert.pooler.dense.weight)
        return model

    node = learner(index, tied if dtype else None)

    def answer(message):
        if message.metadata.message_type != "train":
            return node(message)
        known = from_arrays(message.content.array_records["arrays"])
        floats = {
            name: tensor.float() for name, tensor in known.items() if name != "again"
        }
        message.content = RecordDict({**message.content, "arrays": ArrayRecord(floats)})
        found = node(message)
        if found is not None and dtype:
            update = {
                n: t.to(dtype) for n, t in from_arrays(found.content["arrays"]).items()
            }
            update["again"] = update["bert.pooler.dense.weight"]
            found.content["arrays"] = to_arrays(update)
        return found

    return answer


@pytest.mark.parametrize(
    ("dtype", "wire"),
    [(torch.bfloat16, None), (torch.float64, None), (None, torch.bfloat16)],
)
def test_models_travel_in_the_wires_precision_and_keep_their_own_and_their_ties(
    dtype, wire
):
    tensors = {
        name: tensor.to(dtype or torch.float32)
        for name, tensor in SINGLE.state().items()
    }
    if dtype:
        tensors["again"] = tensors["bert.pooler.dense.weight"]
    model = to_arrays(tensors)
    notes = list[Any]()
    assert [array.stype for array in model.values()].count(TIED) == bool(dtype)
    nodes = noted((of_precision(index, dtype) for index in range(3)), notes)
    server = Server(wire=wire, deterministic=True)
    result, _ = played(nodes, start=model, alignment=None, server=server)
    records = {
        kind: [models[kind] for _, models in notes if kind in models]
        for kind in ("arrays", f"{MODEL}-0", f"{CHANGE}-0")
    }
    # What has changed is sent as bytes.
    *whole, changes = records.values()
    assert [*map(len, whole)] == [6, 3]
    assert {a.dtype for record in changes for a in record.values()} == {"uint8"}
    for record, own in [
        *((record, wire or dtype) for records in whole for record in records),
        (result.arrays, dtype),
    ]:
        kind = str(own or torch.float32).removeprefix("torch.")
        assert {array.dtype for array in record.values()} == {kind}
        if dtype:
            assert [(n, a.stype) for n, a in record.items()] == [
                (n, a.stype) for n, a in model.items()
            ]
    assert all(
        "fedrot-head-loss" in found for found in result.train_metrics_clientapp.values()
    )
