"""What a client writes down of its answers, and what it refuses because of it."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrot.errors import FedrotError
from fedrot.strategies import LabelledRows, Privacy, answer_with_sums
from fedrot.strategies.client import answers
from fedrot.strategies.client.answer_line import rows_noted
from fedrot.strategies.client.answer_record import Record
from fedrot.strategies.wire.fitting_messages import hash_of
from fedrot.task_head.outputs import OUTPUT_KINDS, SEVERAL
from fedrot.task_head.outputs import SINGLE as ONE_CLASS
from tests.simulations.commands import run
from tests.strategies.fitting.classifiers import SINGLE


def site(privacy, training, held_out=None, number=1):
    """Return a node that keeps its state, as a SuperNode does."""
    app = ClientApp()
    held_out = SINGLE.rows(50, 40) if held_out is None else held_out
    data = LabelledRows(
        SINGLE.drawn,
        lambda: [training],
        lambda: [held_out],
    )
    answer_with_sums(app, lambda message, context: data, privacy=privacy)
    context = Context(number, 1, {}, RecordDict(), {})
    return lambda message: app(message, context)


def first(rows, count):
    return {name: values[:count] for name, values in rows.items()}


def with_labels(rows, labels):
    return {**rows, "labels": torch.tensor(labels)}


# The file


def test_a_record_grows_by_lines_and_keeps_its_salt(tmp_path):
    path = tmp_path / "new" / "record.jsonl"
    with Record(path).locked():
        assert Record(path).lines() == []
        salt = Record(path).salt()
        Record(path).append({"stage": "sum", "epsilon": 0.5})
        Record(path).append({"stage": "count"})
    assert Record(path).lines() == [
        {"stage": "sum", "epsilon": 0.5},
        {"stage": "count"},
    ]
    assert Record(path).salt() == salt
    assert Record(tmp_path / "other").salt() != salt
    assert len(salt) == 16
    # Others on the machine do not read the salt.
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("place", "operation"),
    [(os, "fsync"), (os, "replace"), (os, "open"), (Path, "write_text")],
)
@pytest.mark.parametrize("at", range(2))
def test_a_kill_leaves_the_old_or_the_new_record(tmp_path, place, operation, at):
    record = Record(tmp_path / "record.jsonl")
    record.append({"number": 0})
    child = os.fork()
    if not child:
        real = getattr(place, operation)
        calls = iter(range(100))

        def dying(*args, **kwargs):
            if next(calls) == at:
                if place is Path:  # in the middle of its text
                    real(args[0], args[1][:-3])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(place, operation, dying)
        record.append({"number": 1})
        os._exit(0)
    os.waitpid(child, 0)
    assert [line["number"] for line in record.lines()] in ([0], [0, 1])
    record.append({"number": 2})
    assert record.lines()[-1] == {"number": 2}


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-5],
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data.split(b"\n", 1)[1],
        lambda data: data + b"[1]\n",
        lambda data: data + b"\xff\n",
        lambda data: data + b"[" * 10_000 + b"\n",
        lambda data: b'{"salt": 3}\n',
    ],
)
def test_a_damaged_record_is_refused_and_left_alone(tmp_path, damage):
    record = Record(tmp_path / "record.jsonl")
    record.append({"stage": "sum"})
    damaged = damage(record.path.read_bytes())
    record.path.write_bytes(damaged)
    for use in (record.lines, record.salt, lambda: record.append({})):
        with pytest.raises(FedrotError, match=r"record\.jsonl' is damaged"):
            use()
    assert record.path.read_bytes() == damaged


# The digest of rows


def batches_of(rows, sizes, longer):
    """Return rows of tokens and a label, padded by batch."""
    places = iter(rows)
    batches = []
    for size in sizes:
        batch = [row for _, row in zip(range(size), places, strict=False)]
        if not batch:
            break
        length = max(len(tokens) for tokens, _ in batch) + longer
        ids = [[*tokens, *[0] * (length - len(tokens))] for tokens, _ in batch]
        mask = [[1] * len(t) + [0] * (length - len(t)) for t, _ in batch]
        batches.append(
            {
                "input_ids": torch.tensor(ids),
                "attention_mask": torch.tensor(mask),
                "labels": torch.tensor([label for _, label in batch]),
                "once": torch.tensor(3),
            }
        )
    return batches


ROWS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=3), st.integers(-1, 1)),
    max_size=5,
)


@settings(max_examples=150, deadline=None)
@given(ROWS, ROWS, st.randoms(use_true_random=False))
def test_digests_are_equal_if_and_only_if_the_labelled_rows_are(rows, others, drawn):
    def noted(rows, salt=b"salt"):
        sizes = [drawn.randint(1, 3) for _ in range(5)]
        batches = batches_of(rows, sizes, drawn.randint(0, 2))
        return rows_noted(batches, OUTPUT_KINDS[ONE_CLASS], salt)

    def labelled(rows):
        return Counter((tuple(t), label) for t, label in rows if label >= 0)

    expected = noted(rows)
    assert expected["rows"] == labelled(rows).total()
    assert expected["classes"] == {label for _, label in labelled(rows)}
    assert noted(drawn.sample(rows, len(rows))) == expected
    other = noted(others)
    same = labelled(rows) == labelled(others)
    assert (other["digest"] == expected["digest"]) == same
    if labelled(rows):
        assert noted(rows, b"pepper")["digest"] != expected["digest"]


def test_labels_as_many_as_tokens_are_no_padding():
    def digest(labels):
        batch = {
            "input_ids": torch.tensor([[1, 2, 0]]),
            "attention_mask": torch.tensor([[1, 1, 0]]),
            "labels": torch.tensor([labels]),
        }
        return rows_noted([batch], OUTPUT_KINDS[SEVERAL], b"")

    assert digest([1.0, 0, 0])["digest"] != digest([1.0, 0, 1])["digest"]
    assert digest([1.0, 0, 1])["classes"] == {0, 2}


# Lines about answers


def test_a_line_says_what_was_answered_and_left_out(tmp_path):
    path = tmp_path / "record.jsonl"
    # 10 rows of class 0, 9 of class 1 and 4 of class 2; 3 held-out rows.
    rows = with_labels(SINGLE.rows(0, 23), [0] * 10 + [1] * 9 + [2] * 4)
    few = with_labels(SINGLE.rows(1, 3), [0, 1, 2])
    node = site(Privacy(record=path), rows, few, number=77)
    result = SINGLE.fitted([node, *SINGLE.clients()])
    assert result.fitted
    count, sums = Record(path).lines()
    body = hash_of(SINGLE.state(), "classifier")[:16]
    assert (count["stage"], count["bodies"]) == ("count", [])
    assert (sums["stage"], sums["bodies"], sums["of"]) == ("sum", [body], "training")
    for line in (count, sums):
        assert line["when"].endswith("+00:00")
        assert (line["run"], line["round"], line["withheld"]) == (77, None, False)
        assert (line["rows"], line["classes"]) == (19, 2)
        assert line["left_out"] == {"rows": 4, "classes": 1}
    assert count["digest"] == sums["digest"]
    reported = run("report", path, says="Answers in record.jsonl")
    assert "77 sum 1 - 19 4 1 0 0" in reported


def test_an_answer_without_rows_is_withheld(tmp_path):
    path = tmp_path / "record.jsonl"
    node = site(Privacy(1, 10, path), SINGLE.rows(0, 9))
    SINGLE.fitted([node, *SINGLE.clients()])
    count, evaluated = Record(path).lines()
    assert (count["stage"], count["rows"], count["withheld"]) == ("count", 0, True)
    assert count["left_out"]["rows"] == 9
    assert (evaluated["stage"], evaluated["of"]) == ("evaluate", "held_out")
    assert (evaluated["rows"], evaluated["withheld"]) == (40, False)


def played(path, rows, once, caplog, held_out=None):
    """Return what is logged when a site with these rows takes part in a fit."""
    caplog.clear()
    node = site(
        Privacy(1, 1, path, once), rows, held_out, number=random.randrange(2**40)
    )
    SINGLE.fitted([node, *SINGLE.clients()])
    return caplog.text


@pytest.mark.parametrize("once", [False, True])
def test_a_second_answer_about_other_rows_is_seen_in_every_run(tmp_path, caplog, once):
    path = tmp_path / "record.jsonl"
    rows = SINGLE.rows(0, 30)
    played(path, rows, once, caplog)
    before = path.read_text()
    # The same rows in another order are no other rows.
    order = torch.randperm(30)
    shuffled = {name: values[order] for name, values in rows.items()}
    assert "other rows" not in played(path, shuffled, once, caplog)
    assert len(path.read_text().splitlines()) == 2 * len(before.splitlines()) - 1
    before = path.read_text()
    text = played(path, first(rows, 29), once, caplog)
    # Counts tell about no model, and the held-out rows are the same ones.
    assert text.count("has other rows now") == 1
    new = [json.loads(line) for line in path.read_text().splitlines()][
        len(before.splitlines()) :
    ]
    again = {line["stage"]: "again" in line for line in new}
    if once:
        assert "A client's answer is left out" in text
        assert "once=True refuses the second answer" in text
        assert again == {"count": False, "evaluate": False}
    else:
        assert again == {"count": False, "sum": True, "evaluate": False}
        other = first(SINGLE.rows(50, 40), 39)
        assert "other rows" in played(path, first(rows, 29), once, caplog, other)


@pytest.mark.parametrize("damage", [os.unlink, lambda path: path.write_text(KEPT)])
def test_a_record_that_was_removed_or_cut_in_a_run_is_refused(tmp_path, caplog, damage):
    path = tmp_path / "record.jsonl"
    node = site(Privacy(record=path), SINGLE.rows(0, 60))
    nodes = [node, *SINGLE.clients()]
    SINGLE.fitted(nodes)
    assert len(Record(path).lines()) == 3
    damage(path)
    assert "was removed or cut" not in caplog.text
    SINGLE.fitted(nodes)
    assert "has 0 of the 3 lines of this run" in caplog.text
    assert Record(path).lines() == []


KEPT = json.dumps({"salt": "00"}) + "\n"


def test_once_needs_a_record():
    with pytest.raises(FedrotError, match="no record"):
        Privacy(once=True)


def test_few_rows_are_named_once_a_run(caplog, monkeypatch):
    monkeypatch.setattr(answers, "_WARNED", set())
    SINGLE.fitted(
        [site(Privacy(), SINGLE.rows(seed, 47), number=3) for seed in range(3)]
    )
    few = "over 47 rows, fewer than three times their width, 16"
    assert caplog.text.count(few) == 1
    caplog.clear()
    SINGLE.fitted([site(Privacy(), SINGLE.rows(0, 48), number=4)])
    assert "three times" not in caplog.text


def test_a_link_to_a_record_stays_one(tmp_path):
    real, link = tmp_path / "real.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(real)
    Record(link).append({"number": 1})
    assert link.is_symlink()
    assert Record(real).lines() == [{"number": 1}]
