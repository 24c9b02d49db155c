"""Checks of configurations before a run."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import reproductions.arms  # noqa: F401
from fedrot.errors import FedrotError
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation import runner
from fedrot.simulations.report import run_page
from fedrot.simulations.tasks.task import Task, task_of

SMALL: dict[str, Any] = {
    "train_limit": 16,
    "test_limit": 8,
    "layers": 1,
    "width": 16,
    "heads": 2,
    "max_length": 16,
    "clients": 4,
    "seeds": 1,
}


@pytest.mark.parametrize("arm", ["greedy", "aligned:loss", "plain+task-head"])
def test_arms_that_choose_need_held_out_rows_of_some_client(arm: str) -> None:
    config = SimulationConfig.from_flat({**SMALL, "arms": f"plain,{arm}"})
    with pytest.raises(
        FedrotError, match=rf"arm '{re.escape(arm)}' needs clients' held-out rows, but holdout"
    ):
        runner.check([config])
    runner.check([config.model_copy(update={"holdout": 0.5})])
    runner.check([config.model_copy(update={"arms": ("plain", "aligned")})])


def test_an_arm_of_some_clients_needs_held_out_rows_of_theirs() -> None:
    """Of four clients, 1 and 3 have too few rows to hold one out."""
    settings = {**SMALL, "train_limit": 60, "partition": "dirichlet:0.1", "holdout": 0.1}
    config = SimulationConfig.from_flat({**settings, "arms": "aligned:loss,aligned:loss#1+2"})
    runner.check([config])
    with pytest.raises(FedrotError, match=r"arm 'aligned:loss#1\+3' needs .* with seed 0"):
        runner.check([config.model_copy(update={"arms": ("aligned:loss#1+3",)})])


def test_a_guard_has_a_metric_of_the_task() -> None:
    config = SimulationConfig.from_flat({**SMALL, "holdout": 0.5, "arms": "plain,aligned:perplexity"})
    said = r"arm 'aligned:perplexity': unknown metric 'perplexity'; one of accuracy, .*loss$"
    with pytest.raises(FedrotError, match=said):
        runner.check([config])


def test_the_partition_of_every_seed_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = Task.clients

    def failing(self: Task, seed: int) -> Any:
        if seed == 7:
            raise FedrotError("no rows for client 2 with seed 7")
        return clients(self, seed)

    monkeypatch.setattr(Task, "clients", failing)
    config = SimulationConfig.from_flat({**SMALL, "arms": "plain"})
    runner.check([config])
    with pytest.raises(FedrotError, match="with seed 7"):
        runner.check([config, config.model_copy(update={"seeds": (0, 1, 7)})])


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """Flower's logger, which is left as it was."""
    found = logging.getLogger("flwr")
    handlers, propagate, level = [*found.handlers], found.propagate, found.level
    found.setLevel(logging.INFO)
    yield found
    found.handlers[:], found.propagate = handlers, propagate
    found.setLevel(level)


def test_flowers_log_goes_to_one_place_with_its_time(logger: logging.Logger) -> None:
    first, second = io.StringIO(), io.StringIO()
    for text in (first, second):
        runner.log_to(logging.StreamHandler(text))
    logger.warning("one line")
    assert (first.getvalue(), logger.propagate) == ("", False)
    assert re.fullmatch(r"[-\d]+ [:,\d]+ WARNING one line\n", second.getvalue())


def presented(out: Path, settings: tuple[str, ...], arms: tuple[str, ...], **options: Any) -> str:
    """Return what is printed of a run of two seeds, from starts same and scrambled."""
    out.mkdir(exist_ok=True)
    about = [
        {"setting": setting, "arm": arm, "start": start, "seed": seed, "round": 1}
        for setting in settings
        for arm in arms
        for start in ("same", "scrambled")
        for seed in (0, 1)
    ]
    rows = [
        {**of, "scope": "central", "metric": metric, "value": 0.5 + of["seed"] / 8}
        for of in about
        for metric in ("accuracy", "loss")
    ]
    shares = {
        "part": "ffn",
        "layer": 0,
        "before": 2.0,
        "after": 1.0,
        "found": 1.0,
        "chance": 0.5,
        "moved": 1,
    }
    aligned = [{**of, "client": 0, **shares} for of in about if of["arm"] != "plain"]
    for name, found in (("rows", rows), ("alignment", aligned)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    text = io.StringIO()
    runner.present(out, Console(file=text, width=200), **options)
    return text.getvalue()


@pytest.fixture
def unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is not drawn."""
    monkeypatch.setattr(run_page, "write_report", lambda out: out / "report.html")


@pytest.mark.usefixtures("unwritten")
def test_results_are_printed_with_tables_and_verdicts(tmp_path: Path) -> None:
    out = tmp_path / "my run"
    shown = presented(out, ("one",), ("plain", "aligned"), brief=True)
    places = [
        shown.index(text)
        for text in (
            "one: accuracy (0 to 1",
            "one: loss (nats",
            "What helped? (95 % t intervals over seeds)\n  Alignment in 2 settings and starts",
            f"Report: {out / 'report.html'}",
        )
    ]
    assert places == sorted(places)
    assert "Tables: " not in shown


@pytest.mark.usefixtures("unwritten")
def test_tables_of_several_settings_are_left_out_in_brief_if_sentences_say_it(tmp_path: Path) -> None:
    out, both = tmp_path / "my run", ("one", "two")
    brief = presented(out, both, ("plain", "aligned"), brief=True)
    assert "final round" not in brief
    assert f"Tables: fedrot report '{out}'" in brief
    assert "two, start same: alignment" in brief
    for arms, options in ((("plain", "aligned"), {}), (("plain", "ffn"), {"brief": True})):
        shown = presented(out, both, arms, **options)
        assert shown.count("final round") == 4
        assert "Tables: " not in shown
        assert ("What helped?" in shown) == ("aligned" in arms)


def partitions(configs: list[SimulationConfig], brief: bool) -> str:
    text = io.StringIO()
    runner.print_partitions(configs, Console(file=text, width=200), brief=brief)
    return text.getvalue()


def test_the_accuracy_of_the_largest_class_is_a_yardstick() -> None:
    config = SimulationConfig.from_flat({**SMALL, "train_limit": 80, "seeds": 1})
    data = task_of(config.to_json()).data
    names = [data.label_names[label] for label in data.train.labels]
    largest = max(data.label_names, key=names.count)
    held_out = [data.label_names[label] for label in data.test.labels]
    share = held_out.count(largest) / len(held_out)
    assert f"Always '{largest}' would have accuracy {share:.3f}." in partitions([config], True)
    scores = SimulationConfig.from_flat({**SMALL, "task": "mlm", "train_limit": 80, "seeds": 1})
    assert "Always" not in partitions([scores], True)


def test_rows_and_classes_that_no_client_has_are_told() -> None:
    settings = {**SMALL, "clients": 2, "train_limit": 60, "seeds": "3-4"}
    config = SimulationConfig.from_flat({**settings, "partition": "pathological:2"})
    shown = " ".join(partitions([config], True).split())
    names, sizes, counts = task_of(config.to_json()).partition(3)
    all_rows = task_of(config.to_json()).data.train.labels
    absent = [n for i, n in enumerate(names) if (all_rows == i).any() and not sum(c[i] for c in counts)]
    assert len(absent) >= 3
    assert (
        f"Partition pathological:2 leaves out {60 - sum(sizes)} of 60 training rows: no client has the "
        f"classes {', '.join(absent)} (seed 3)."
    ) in shown
    assert "leaves out" not in partitions([config.model_copy(update={"partition": "iid"})], True)


def test_few_held_out_rows_are_told_where_an_arm_chooses_by_them() -> None:
    config = SimulationConfig.from_flat({**SMALL, "train_limit": 80, "holdout": 0.5, "seeds": 1})
    assert "hold out" not in partitions([config], True)
    choosing = config.model_copy(update={"arms": ("plain", "plain+task-head", "aligned:loss")})
    assert (
        "Clients hold out 40 rows in all (seed 0), by which plain+task-head, aligned:loss choose: the "
        "choice may be noise. --set holdout=0.3 gives more." in partitions([choosing], True)
    )
    enough = choosing.model_copy(update={"train_limit": 400})
    assert "hold out" not in partitions([enough], True)


def test_partitions_are_tables_unless_several_are_told_in_brief() -> None:
    config = SimulationConfig.from_flat({**SMALL, "setting": "one", "seeds": "3-4", "train_limit": 18})
    other = config.model_copy(update={"setting": "other", "train_limit": 16})
    for configs, brief in (([config], True), ([config, other], False)):
        shown = partitions(configs, brief)
        assert [shown.count(f"Rows per client: {c.setting}, seed 3") for c in configs] == [1] * len(
            configs
        )
        assert ("seed 4" in shown, "clients have" in shown) == (False, False)
        assert shown.count("Labels: ") == 1
    shown = partitions([config, other, config], True)
    assert "Rows per client" not in shown
    assert shown.count("4 clients have 4 to 5 rows each (seed 3; --dry-run shows more).") == 1
    assert shown.count("4 clients have 4 rows each (seed 3; --dry-run shows more).") == 1
