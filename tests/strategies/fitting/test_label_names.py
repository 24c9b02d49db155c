"""Clients whose labels have another order or other names, found in every exchange."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedrot.errors import LONGEST_REASON, UpdateError
from fedrot.strategies import (
    FedRot,
    FedRotLoRA,
    Server,
    class_priors,
    evaluate_at_clients,
    fit_task_head,
    labels_record,
    report_sites,
)
from fedrot.strategies.wire.label_names import (
    LABELS,
    check_names,
    label_names,
    read_names,
)
from tests.models import near
from tests.strategies.fakes import (
    FakeGrid,
    grid_of,
    largest_difference,
    model_in,
    reply,
)
from tests.strategies.fitting.classifiers import KINDS, SINGLE

NAMES = ("anger", "joy", "fear")
#: What a client says, and a word of why it is left out; without one it is not.
SAID = {
    "another order": (("joy", "anger", "fear"), "from number 0 on, are"),
    "other names": (("anger", "joy", "trust"), "from number 2 on, are"),
    "no names": (("LABEL_0", "LABEL_1", "LABEL_2"), ""),
    "no names in another order": (("LABEL_1", "LABEL_0", "LABEL_2"), ""),
    "one without a name": (("anger", "joy", "LABEL_2"), ""),
    "the same": (NAMES, ""),
}


def configured(config, names):
    config.id2label = dict(enumerate(names))
    return config


def node(index, names=NAMES, kind=SINGLE, asked=None, says=False):
    """Return a client that answers, trains, and notes the requests for its names.

    With ``says`` its training replies say them.
    """

    def build():
        model = kind.drawn()
        configured(model.config, names)
        return model

    answers = kind.client(kind.rows(index, 60), kind.rows(100 + index, 40), build)

    def answer(message):
        for config in message.content.config_records.values():
            if asked is not None and config.get(LABELS):
                asked.append(index)
        if message.metadata.message_type != "train":
            return answers(message)
        made = reply(message, near(model_in(message), 0.01, seed=index), 10, index)
        if says:
            made.content[LABELS] = labels_record(build())
        return made

    return answer


def clients(names, *settings):
    return [node(index, NAMES if index < 3 else names, *settings) for index in range(4)]


def fitted(nodes, kind=SINGLE, names=None):
    config = configured(kind.config, names) if names else kind.config
    return fit_task_head(grid_of(nodes), ArrayRecord(kind.state()), config, timeout=1)


def trained(nodes, kind=SINGLE, names=None, **given):
    server = Server(deterministic=True)
    common = {"fraction_evaluate": 0.0, "server": server, **given}
    if kind.adapter:
        strategy = FedRotLoRA(kind.config, **common)
    else:
        strategy = FedRot(configured(kind.config, names or NAMES), **common)
    return strategy.start(grid_of(nodes), ArrayRecord(kind.state()), 2, timeout=1)


def in_rounds(nodes, kind=SINGLE, names=None):
    return trained(nodes, kind, names, fit_head=True)


def evaluated(nodes, kind=SINGLE, names=None):
    evaluate = evaluate_at_clients(grid_of(nodes))
    arrays = ArrayRecord(kind.state())
    return SimpleNamespace(arrays=arrays, metrics=[evaluate(n, arrays) for n in (1, 2)])


def reporting(nodes, kind=SINGLE, names=None):
    arrays = ArrayRecord(kind.state())
    sites = report_sites(grid_of(nodes), arrays, kind.config)
    assert {*map(tuple, (row["classes"] for row in sites.rows))} == {NAMES}
    return SimpleNamespace(arrays=arrays, metrics=sites.rows)


def counted(nodes, kind=SINGLE, names=None):
    priors = class_priors(grid_of(nodes), configured(kind.config, names))
    return SimpleNamespace(arrays=ArrayRecord(kind.state()), metrics=priors)


#: How a run asks, of which kind of models, and the names at the server.
RUNS = {
    "fit, names at the server": (fitted, "single", NAMES),
    "fit, most clients": (fitted, "single", None),
    "fit, adapter": (fitted, "adapter", None),
    "rounds": (in_rounds, "single", NAMES),
    "rounds, adapter": (in_rounds, "adapter", None),
    "evaluation": (evaluated, "single", None),
    "report, adapter": (reporting, "adapter", None),
    "priors": (counted, "single", NAMES),
    "training replies": (trained, "single", NAMES),
}


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("way", RUNS)
def test_a_client_with_other_labels_has_no_part_and_is_asked_once(way, said, warnings):
    run, kind, at_server = RUNS[way]
    names, word = SAID[said]
    asked = []
    kind = KINDS[kind]
    says = run is trained
    found = run(clients(names, kind, asked, says), kind, at_server)
    assert sorted(asked) == ([] if says else [0, 1, 2, 3])
    text = warnings()
    assert ("Client 103: Its labels" in text) == bool(word and not says)
    if says or run is in_rounds:
        assert ("Reply of client 3 dropped: Its labels" in text) == bool(word)
    assert word in text
    # With equal names nothing is left out.
    expected = run(clients(NAMES, kind)[: 3 if word else 4], kind, at_server)
    assert largest_difference(found.arrays, expected.arrays) == 0
    if run in (evaluated, reporting, counted):
        assert found.metrics == expected.metrics


def test_names_that_a_client_says_late_keep_its_sums_out():
    def late(message):
        answer = swapped(message)
        if LABELS in answer.content and not answer.content.array_records:
            del answer.content[LABELS]
        elif answer.content.array_records:
            answer.content[LABELS] = labels_record(model)
        return answer

    names, _ = SAID["another order"]
    swapped, model = node(3, names), SINGLE.drawn()
    configured(model.config, names)
    honest = [node(index) for index in range(3)]
    found = fitted([*honest, late], SINGLE, NAMES)
    assert found.priors == fitted(honest, SINGLE, NAMES).priors


def test_names_that_read_alike_are_alike():
    config = {"id2label": {0: "caf\u00e9", 1: "joy "}}
    assert label_names(config) == label_names({"id2label": {0: "cafe\u0301", 1: "joy"}})


def test_without_a_majority_of_all_clients_nobody_is_left_out(warnings):
    swapped, _ = SAID["another order"]
    nodes = [node(index, (NAMES, swapped)[index % 2]) for index in range(4)]
    assert fitted(nodes).clients == 4
    # Liars that say something, where most say nothing, are no majority.
    silent = [node(index, SAID["no names"][0]) for index in range(3)]
    assert fitted([*silent, nodes[0], nodes[2], nodes[1]]).clients == 6
    assert "no order is that of most clients: {100: ('anger', 'joy'" in warnings()
    assert "Client 10" not in warnings()


@pytest.mark.parametrize("count", [2, 28])
def test_the_reason_has_both_orders_and_a_line_that_mends(count):
    wanted = tuple(f"l'{number}" for number in range(count))
    names = wanted[::-1]
    with pytest.raises(UpdateError, match="from number 0 on") as found:
        check_names(names, wanted)
    reason = str(found.value)
    assert len(reason) < LONGEST_REASON
    before, line = reason.split("build(): ")
    assert str([*names])[:60] in before
    model = SimpleNamespace(config=SimpleNamespace(id2label={}))
    for place, name in enumerate(wanted):
        scope = {"model": model, "name": name}
        exec(line, scope)
        assert scope["label"] == place
    assert label_names(model.config) == wanted
    with pytest.raises(UpdateError, match=r"from number 1 on, are \['joy', 'anger'\]"):
        check_names(("fear", "joy", "anger"), ("LABEL_0", "anger", "joy"))


def test_names_of_clients_are_no_code_and_bounded():
    evil = ('"); import os; ("', "b\n\x1b[31m", "c" * 10_000)
    with pytest.raises(UpdateError) as found:
        check_names(evil, NAMES)
    assert str(found.value).isprintable()
    assert "import os" not in str(found.value).split("build(): ")[1]
    assert len(str(found.value)) <= LONGEST_REASON
    config = {"id2label": {"1": "b", "0": "a", "10": "z", "9": "y"}}
    assert label_names(config) == ("a", "b", "y", "z")
    for config in (None, {}, {"id2label": None}, {"id2label": {0: "label_0"}}):
        assert label_names(config) == ()
        model = SimpleNamespace(config=config)
        assert read_names(RecordDict({LABELS: labels_record(model)})) == ()


@pytest.mark.parametrize("names", [[1, 2, 3], [b"anger"], ["a" * 2**18]])
def test_names_that_are_none_are_refused(names, warnings):
    def bad(message):
        made = node(3)(message)
        if LABELS in made.content:
            made.content[LABELS] = ConfigRecord({"names": names})
        return made

    assert fitted([node(0), node(1), bad]).clients == 2
    assert f"Client 102: '{LABELS}' is no list of names" in warnings()


def test_a_site_that_has_left_is_in_no_bit_of_the_head():
    """Exact unlearning, whatever the order of the answers."""
    nodes = dict(enumerate([*SINGLE.clients(), *clients(NAMES)], start=100))
    arrays = ArrayRecord(SINGLE.state())
    never = {number: other for number, other in nodes.items() if number != 102}
    expected = fit_task_head(FakeGrid(never), arrays, SINGLE.config)
    grid = FakeGrid(dict(reversed(nodes.items())))
    found = fit_task_head(grid, arrays, SINGLE.config, without=[102])
    assert not any(102 in numbers for numbers in grid.asked)
    assert largest_difference(found.arrays, expected.arrays) == 0
    assert (found.losses, found.fitted) == (expected.losses, True)
    whole = fit_task_head(grid, arrays, SINGLE.config)
    assert largest_difference(whole.arrays, expected.arrays) > 0
    with pytest.raises(ValueError, match="hospital"):
        fit_task_head(grid, arrays, SINGLE.config, without=["hospital"])
