"""``compare_saved_models``: the loss barrier between two saved models, written to a folder."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from fedrot._io import replacing, write_json, write_text
from fedrot.errors import FedrotError
from fedrot.simulations.barrier.barrier_lines import BarrierLine, measure, training_batches, write_rows
from fedrot.simulations.barrier.barrier_methods import (
    METHODS,
    check_methods,
    methods_for,
)
from fedrot.simulations.barrier.barrier_settings import BarrierSettings
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation.run_folder import versions
from fedrot.simulations.models import saved_model
from fedrot.simulations.models.alike import check_alike, check_ties, label_elsewhere
from fedrot.simulations.models.model_files import first_names, refuse_filled
from fedrot.simulations.models.saved_model import SavedModel
from fedrot.simulations.tasks.objectives import OBJECTIVES, task_name
from fedrot.simulations.tasks.task import Task, check_usable, task_of

#: Maximum number of training rows for methods that use data, and of tokens per text.
_ROWS, _LONGEST = 2048, 64


def compare_saved_models(
    a: Path, b: Path, out: Path, settings: BarrierSettings, command: str, console: Console
) -> list[BarrierLine]:
    """Measure the line between two saved models with every method; print and write the results.

    ``b`` is aligned to ``a``. ``out`` gets ``config.json``, ``versions.json``, ``rows.jsonl``,
    ``summary.md`` and ``barrier.png``, all or none of them.

    Raises:
        FedrotError: bad input; the message names the setting or the model.
        FileExistsError: ``out`` is not empty.
    """
    from fedrot.simulations.barrier.barrier_report import markdown, plot, summarise, tables
    from fedrot.symmetry import symmetry_of

    points = settings.points
    named = [name.strip() for name in (settings.methods or "").split(",")]
    asked = check_methods([name for name in named if name] or METHODS)
    if points < 3 or points % 2 == 0:
        raise FedrotError(f"points is {points}; it must be odd and at least 3, to include the middle.")
    refuse_filled(out)
    task, anchor, client = load_pair(a, b, settings)
    if task.data.note:
        console.print(task.data.note, highlight=False)
    config: Any = anchor.config
    symmetry = symmetry_of(config, anchor.state_dict())
    methods = asked if settings.methods else methods_for(symmetry)
    batches, cell = training_batches(task, anchor, _ROWS), task.config.setting
    lines = []
    for name in methods:
        with console.status(f"{name}: matching, and {points} models to evaluate"):
            line = measure(name, anchor, client, symmetry, task, batches, points=points, cell=cell)
        lines.append(line)
    described = {
        "command": command,
        "models": [str(a.resolve()), str(b.resolve())],
        "points": points,
        "rows": _ROWS,
        "methods": {name: METHODS[name].description for name in methods},
        "settings": task.config.model_dump(mode="json", exclude_defaults=True),
    }
    summaries = summarise(lines)
    out.resolve().parent.mkdir(parents=True, exist_ok=True)
    with replacing(out.resolve()) as folder:
        folder.mkdir()
        write_json(folder / "config.json", described)
        write_json(folder / "versions.json", versions())
        write_rows(folder / "rows.jsonl", lines)
        write_text(folder / "summary.md", markdown(summaries))
        plot(folder / "barrier.png", lines)
    for table in tables(summaries):
        console.print(table)
    console.print(f"Results: {out}")
    return lines


def load_pair(a: Path, b: Path, settings: BarrierSettings) -> tuple[Task, nn.Module, nn.Module]:
    """Load two folders written by ``save_pretrained``, and the data set for their comparison.

    Texts are tokenised with the tokenizer of ``a``, or the bundled one if ``a`` has none.

    Raises:
        FedrotError: a file is missing, the family is not supported, the models differ in
            architecture or vocabulary, or they do not fit the data.
    """
    for folder in (a, b):
        if not folder.is_dir():
            raise FedrotError(f"'{folder}' is not a folder. Give one written by save_pretrained.")
    first, second = pair = [saved_model.open_saved_model(folder) for folder in (a, b)]
    check_alike(first, second)
    texts = hasattr(first.config, "vocab_size")
    if texts:
        saved_model.check_bundled(first)
    own = task_name(first)
    if own is None and settings.task is None and first.config.architectures:
        raise FedrotError(
            f"'{a}' is a {first.model_class.__name__}, a class without a task, and therefore without a "
            f"loss. If its tensors fit a task, give --task: {', '.join(OBJECTIVES)}."
        )
    name = settings.task or own or "classification"
    first.class_for(OBJECTIVES[name].auto_model)  # Raises before data are read that do not fit.
    task = task_of(
        SimulationConfig(
            **settings.model_dump(include={"data_dir", "text_column", "label_column"}),
            task=name,
            data=settings.data or "",
            model=None if texts and first.tokenizer is None else str(a),
            setting=f"{a.name} - {b.name}",
            max_length=min(_LONGEST, saved_model.longest_text(first.config, _LONGEST)),
            test_limit=settings.test_limit,
        ).to_json()
    )
    check_usable(task, first.path)
    anchor, client = (_loaded(model, task) for model in pair)
    check_ties(first, first_names(anchor), second, first_names(client))
    return task, anchor, client


def _loaded(saved: SavedModel, task: Task) -> nn.Module:
    model: Any
    model, missing, _ = saved.load(saved.class_for(task.objective.auto_model))
    if missing:
        raise FedrotError(
            f"'{saved.path}' has no tensor '{missing[0]}' ({len(missing)} missing in all), so it was "
            f"not trained for task '{task.config.task}'. Choose the task of the models' training."
        )
    wanted = copy.deepcopy(model.config)
    task.objective.configure(wanted, task.data)
    if wanted.num_labels != model.config.num_labels:
        raise FedrotError(
            f"'{saved.path}' has {model.config.num_labels} outputs, but {task.data.name} has "
            f"{wanted.num_labels} classes. Choose the data set that the models were trained on."
        )
    if moved := label_elsewhere(saved.config, task.data):
        raise FedrotError(
            f"'{saved.path}': {moved}. Reorder the rows of its head, and its id2label, as in the data, "
            "and save it again."
        )
    return model.float()
