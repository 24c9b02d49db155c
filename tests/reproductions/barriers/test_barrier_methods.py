"""Ways to match two tiny models, and what is reported of the line between them."""

from __future__ import annotations

import copy
import io
import itertools
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from transformers import GPT2Config, GPT2LMHeadModel

from fedrot import FedrotError, canonical, random_equivalent, symmetry_of
from fedrot.interpolation import Barrier
from fedrot.simulations.barrier import barrier_methods, barrier_report
from fedrot.simulations.barrier.barrier_lines import (
    BarrierLine,
    lines_of,
    measure,
    training_batches,
    write_rows,
)
from fedrot.simulations.barrier.barrier_methods import METHODS, match, methods_for, with_state
from fedrot.simulations.barrier.barrier_report import markdown, plot, summarise, tables
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation.run_folder import read_rows
from fedrot.simulations.models.build import build_model
from fedrot.simulations.report.plots import save_figure
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.task import Task, task_of
from fedrot.symmetry import WHOLE_MODEL
from reproductions.barriers import methods
from reproductions.learning import LearningOptions
from tests.simulations.commands import SMALL


@pytest.fixture(scope="module", params=["classification", "mlm"])
def task(request: pytest.FixtureRequest) -> Task:
    return task_of(SimulationConfig(task=request.param, **SMALL).to_json())


@pytest.fixture(scope="module")
def model(task: Task) -> torch.nn.Module:
    return build_model(task.config, task.data, seed=0)


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is learned in 600 steps is tested elsewhere; here it is enough that something is."""
    monkeypatch.setattr(methods, "LearningOptions", partial(LearningOptions, steps=5))


def test_batches_for_methods_are_those_of_training(task: Task, model: torch.nn.Module) -> None:
    batches = training_batches(task, model, 100)
    assert sum(len(batch["input_ids"]) for batch in batches) == 100
    assert all("labels" in batch for batch in batches)
    masked = sum(int((batch["input_ids"] == 4).sum()) for batch in batches)
    assert (masked > 0) == (task.config.task == "mlm")
    again = training_batches(task, model, 100)
    assert all(torch.equal(x["input_ids"], y["input_ids"]) for x, y in zip(batches, again, strict=True))


def test_labels_are_not_shown_where_activations_are_collected(
    task: Task, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []
    original = barrier_methods.collect_activations

    def spy(anchor: Any, client: Any, batches: Any, *args: Any, **kwargs: Any) -> Any:
        batches = list(batches)
        seen.extend(set(batch) for batch in batches)
        return original(anchor, client, batches, *args, **kwargs)

    monkeypatch.setattr(barrier_methods, "collect_activations", spy)
    symmetry, batches = symmetry_of(model.config, model.state_dict()), training_batches(task, model, 64)
    for name in methods_for(symmetry):
        match(METHODS[name], model, model, symmetry, batches)
    assert {"input_ids", "attention_mask", "token_type_ids"} in seen
    assert {"input_ids", "attention_mask"} in seen
    assert not any("labels" in names for names in seen)


def test_whole_model_methods_undo_a_random_equivalent(task: Task, model: torch.nn.Module) -> None:
    symmetry = symmetry_of(model.config, model.state_dict())
    client = copy.deepcopy(model)
    client.load_state_dict(random_equivalent(model.state_dict(), symmetry, seed=3, parts=WHOLE_MODEL))
    batches = training_batches(task, model, 64)
    for name in ("whole", "whole+probe", "whole+data"):
        line = measure(name, model, client, symmetry, task, batches, points=3)
        assert line.after < 1e-6 * line.before
        assert line.barrier.barrier == pytest.approx(0, abs=1e-5)
    vanilla = measure("vanilla", model, client, symmetry, task, batches, points=3)
    assert vanilla.barrier.at(0) == pytest.approx(vanilla.barrier.at(1), abs=1e-4, rel=1e-4)


def test_methods_that_rotate_the_stream_undo_a_rotation_of_it() -> None:
    task = task_of(SimulationConfig(task="clm", architecture="gpt2", **SMALL).to_json())
    model = build_model(task.config, task.data, seed=0)
    symmetry, batches = symmetry_of(model.config, model.state_dict()), training_batches(task, model, 64)
    folded = canonical(model.state_dict(), symmetry)
    client = with_state(model, random_equivalent(folded, symmetry.rotated, 3, WHOLE_MODEL))
    names = [name for name in methods_for(symmetry) if METHODS[name].canonical]
    assert len(names) >= 8
    for name in names:
        line = measure(name, model, client, symmetry, task, batches, points=3)
        assert line.barrier.barrier == pytest.approx(0, abs=1e-3), name
        # What is learned may lie elsewhere, as long as the loss of the average stays.
        assert line.after < 1e-2 * line.before or name == "stream+learned"


def test_models_that_cannot_be_rotated_are_refused(task: Task, model: torch.nn.Module) -> None:
    symmetry, batches = symmetry_of(model.config, model.state_dict()), training_batches(task, model, 64)
    assert not any(METHODS[name].canonical for name in methods_for(symmetry))
    with pytest.raises(FedrotError, match="cannot be rotated"):
        measure("stream", model, model, symmetry, task, batches, points=3)
    tied = GPT2LMHeadModel(GPT2Config(vocab_size=12, n_layer=1, n_head=2, n_embd=8, n_positions=4))
    symmetry = symmetry_of(tied.config, tied.state_dict())
    with pytest.raises(FedrotError, match="tie_word_embeddings=False"):
        measure("stream", tied, tied, symmetry, task, batches, points=3)


def test_missing_labels_are_refused_by_methods_that_learn(task: Task, model: torch.nn.Module) -> None:
    symmetry, batches = symmetry_of(model.config, model.state_dict()), training_batches(task, model, 64)
    missing = [{**batch, "labels": batch["labels"].float().fill_(math.nan)} for batch in batches]
    with pytest.raises(FedrotError, match="need all labels of every row"):
        match(METHODS["learned"], model, model, symmetry, missing)


def test_neither_model_is_changed(task: Task, model: torch.nn.Module) -> None:
    client = build_model(task.config, task.data, seed=1)
    before = [copy.deepcopy(m.state_dict()) for m in (model, client)]
    symmetry, batches = symmetry_of(model.config, model.state_dict()), training_batches(task, model, 64)
    for name in methods_for(symmetry):
        measure(name, model, client, symmetry, task, batches, points=3)
    for m, state in zip((model, client), before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in m.state_dict().items())


def test_a_method_may_refine_the_client(
    task: Task, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = build_model(task.config, task.data, seed=1)
    symmetry, batches = symmetry_of(model.config, model.state_dict()), training_batches(task, model, 64)
    moved = match(METHODS["whole"], model, client, symmetry, batches)
    seen: list[Any] = []

    def refine(anchor: Any, aligned: Any, *_: object) -> dict[str, torch.Tensor]:
        seen.append(aligned.state_dict())
        return {name: tensor.clone() for name, tensor in anchor.state_dict().items()}

    monkeypatch.setitem(METHODS, "refined", replace(METHODS["whole"], refine=refine))
    line = measure("refined", model, client, symmetry, task, batches, points=3)
    assert len({row["loss"] for row in line.barrier.rows}) == 1
    assert line.after == 0
    assert all(torch.equal(state[name], moved[name]) for state in seen for name in moved)


# Summaries


def line(cell: str, pair: str, method: str, *losses: float) -> BarrierLine:
    positions = tuple(np.linspace(0, 1, len(losses)).tolist())
    rows = tuple({"accuracy": 1 - loss, "loss": loss} for loss in losses)
    return BarrierLine(cell, pair, method, 2.0, 10.0, 5.0, Barrier(positions, rows))


def test_means_and_intervals_are_over_pairs() -> None:
    lines = [
        line("c", "0-1", "whole", 0.1, 0.2, 0.1),
        line("c", "2-3", "whole", 0.1, 0.4, 0.1),
        line("c", "0-1", "vanilla", 0.1, 0.5, 0.1),
        line("c", "2-3", "vanilla", 0.1, 0.7, 0.1),
    ]
    vanilla, whole = summarise(lines)
    assert (vanilla.method, whole.method, whole.pairs, whole.headline) == (
        "vanilla",
        "whole",
        2,
        "accuracy",
    )
    assert whole.barrier.mean == pytest.approx(0.2)
    # The mean of the ratios 0.1 / 0.4 and 0.3 / 0.6; t(0.975, 1) = 12.706, sd / sqrt(2) = 0.125.
    assert whole.share.mean == pytest.approx(0.375)
    assert whole.share.ci_high == pytest.approx(0.375 + 12.706 * 0.125, rel=1e-4)
    assert vanilla.share.mean == 1
    assert whole.middle.mean == pytest.approx(0.7)
    assert [end.mean for end in whole.ends] == pytest.approx([0.9, 0.9])
    assert whole.distance.mean == 0.5
    assert "| c | accuracy | 2 | whole | 0.200 [-1.071, 1.471] |" in markdown([whole])


def test_where_the_ends_differ_the_mean_and_the_worse_one_are_told_apart() -> None:
    (summary,) = summarise([line("c", "0-1", "vanilla", 0.1, 0.6, 0.3)])
    assert summary.barrier.mean == pytest.approx(0.6 - 0.2)
    assert summary.above.mean == pytest.approx(0.6 - 0.3)
    assert [end.mean for end in summary.ends] == pytest.approx([0.9, 0.7])
    assert summary.seconds.mean == 2


def test_the_anchor_is_where_the_line_begins(task: Task, model: torch.nn.Module) -> None:
    client = build_model(task.config, task.data, seed=1)
    symmetry = symmetry_of(model.config, model.state_dict())
    found = measure("vanilla", model, client, symmetry, task, [], points=3)
    everything = np.arange(len(task.test))
    for position, end in ((0.0, model), (1.0, client)):
        alone = training.evaluate(end, task, task.test, everything)
        assert found.barrier.at(position) == pytest.approx(alone, abs=1e-6)
    assert found.barrier.at(0.0)["loss"] != pytest.approx(found.barrier.at(1.0)["loss"], abs=1e-5)


def test_a_share_needs_a_vanilla_barrier() -> None:
    (alone,) = summarise([line("c", "0-1", "whole", 0.1, 0.2, 0.1)])
    assert math.isnan(alone.share.mean)
    flat = [line("c", "0-1", "vanilla", 0.1, 0.1, 0.1), line("c", "0-1", "whole", 0.1, 0.2, 0.1)]
    assert all(math.isnan(summary.share.mean) for summary in summarise(flat))
    assert markdown([alone]).splitlines()[-1].count(" - ") == 1


def test_diverged_models_stay_in_rows_and_summary(tmp_path: Path) -> None:
    lines = [
        line("c", "0-1", "vanilla", 0.1, math.nan, 0.1),
        line("c", "0-1", "whole", 0.1, math.inf, 0.1),
    ]
    write_rows(tmp_path / "rows.jsonl", lines)
    assert "NaN" not in (tmp_path / "rows.jsonl").read_text()
    again = lines_of(read_rows(tmp_path))
    assert all(math.isnan(ln.barrier.at(0.5)["loss"]) for ln in again)
    assert "| c | accuracy | 1 | vanilla | - | - | - |" in markdown(summarise(again))


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_names_the_metric_at_the_middle_and_at_both_ends(width: int) -> None:
    (table,) = tables(summarise([line("c", "", name, 0.2, 0.5, 0.4) for name in METHODS]))
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue().splitlines()
    assert "loss barrier and accuracy" in shown[0]
    assert "accuracy" in " ".join(text for text in shown if text.startswith("┃"))
    cells = [text.replace("│", " ").split() for text in shown if text.startswith("│")]
    rows = {name: values for name, *values in cells}
    assert rows.keys() == set(METHODS)
    # Loss barrier, share of vanilla, accuracy at the middle, accuracy of both ends.
    assert all(row[:5] == ["0.200", "1.000", "0.500", "0.800,", "0.600"] for row in rows.values())


@pytest.mark.parametrize("count", [1, 2, 7, 9, len(METHODS)])
def test_the_picture_breaks_the_row_of_methods(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []

    def save(figure: Any, path: Path) -> Path:
        figures.append(figure)
        return save_figure(figure, path)

    monkeypatch.setattr(barrier_report, "save_figure", save)
    names = list(METHODS)[:count]
    lines = [line("c", pair, name, 0.1, 0.4, 0.2) for name in names for pair in ("0-1", "2-3")]
    with Image.open(plot(tmp_path / "barrier.png", lines)) as picture:
        assert picture.width <= 1600
    panels = [ax for ax in figures[0].axes if ax.lines]
    titles = [ax.get_title("left") for ax in panels if ax.get_title("left")]
    assert titles == (names[1:] or names)
    assert len(panels) == 2 * len(titles)
    places = [ax.get_window_extent() for ax in panels]
    across = Counter(round(place.y0) for place in places)
    assert max(across.values()) <= 8
    # Wide enough to see a curve, none over another.
    assert min(place.width for place in places) > 150
    assert not any(a.overlaps(b) for a, b in itertools.combinations(places, 2))
    for first in (0.1, 0.9):  # the loss and the accuracy of the first model
        assert len({ax.get_ylim() for ax in panels if ax.lines[0].get_ydata()[0] == first}) == 1
