"""Commands for saved models: merge, check."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Annotated

from rich.markup import escape
from typer import Argument, Exit, Option

from fedrot.errors import FedrotError, SymmetryError
from fedrot.simulations.cli.commands import (
    FAILED,
    app,
    command,
    complain_in_red,
    console,
    refuse_taken,
)


@command(app, "fedrot merge models/a models/b --out models/merged --data own.csv")
def merge(
    models: Annotated[list[str], Argument(hidden=True)],
    *,
    out: Annotated[
        Path | None, Option(help="A new or empty folder; default: none.")
    ] = None,
    parts: Annotated[
        str | None, Option(help="whole, none, attention+ffn or diagnosed.")
    ] = None,
    weights: Annotated[str | None, Option(help="Such as 1,3; default: equal.")] = None,
    allow: Annotated[
        list[str] | None, Option(help="A field that may differ; repeatable.")
    ] = None,
    data: Annotated[
        str | None, Option(help="Evaluate on a file, folder or hub name.")
    ] = None,
    text_column: Annotated[str | None, Option(help="Text, words or image.")] = None,
    label_column: Annotated[str | None, Option(help="Label or tags.")] = None,
    base: Annotated[
        str | None, Option(help="What was fine-tuned; data choose a scale.")
    ] = None,
    fit_head: Annotated[
        bool, Option("--fit-head", help="Fit the task head to the data.")
    ] = False,
    rank: Annotated[
        int | None, Option(min=1, help="Of adapters; default: the largest.")
    ] = None,
) -> None:
    """Diagnose, align and average saved MODELS: folders, hub names, LoRA adapters.

    With --base, the base plus 0, 0.3, 0.5, 0.7, 1 or 1.3 times the mean change is
    written: the one with the lowest loss on held-out rows of --data. Tensors that the
    base lacks, such as a task head, are averaged.
    """
    adapters = any((Path(model) / "adapter_config.json").is_file() for model in models)
    columns = {"text_column": text_column, "label_column": label_column}
    useless: dict[str, object] = {"--rank": rank}
    if adapters:
        useless = {"--parts": parts, "--data": data}
    if not data:
        useless |= {**columns, "--base": base, "--fit-head": fit_head}
    idle = [name for name, value in useless.items() if value]
    if idle:
        raise FedrotError(
            f"Here, {' and '.join(idle)} would have no effect: --rank is for LoRA "
            "adapters, --parts and --data are for models, and --base, --fit-head and "
            "columns need --data. Leave it out."
        )
    refuse_taken(out, "--out")
    numbers = _weights(weights, len(models))
    allowed = allow or []
    with console.status(escape(f"Merging {len(models)} models")):
        from fedrot.simulations.saved.merging import merge_adapters, merge_models

        if adapters:
            sentences = merge_adapters(models, out, numbers, allowed, rank)
        else:
            sentences = merge_models(
                models,
                out,
                numbers,
                allowed,
                parts,
                {"data": data, **columns} if data else {},
                fit_head,
                base,
            )
    for sentence in sentences:
        console.print(sentence)
    console.print(
        f"Written: {out}" if out else "Nothing was written; --out writes the average."
    )


def _weights(text: str | None, count: int) -> list[float]:
    """Read one weight per model, by default 1."""
    weights = [1.0] * count
    if text is not None:
        try:
            weights = [float(number) for number in text.split(",")]
        except ValueError:
            weights = []
    positive = all(0 < weight < inf for weight in weights)
    if count < 2 or len(weights) != count or not positive:
        raise FedrotError(
            f"The weights of {count} models are {text}. Give two or more models and, "
            "separated by commas, a positive weight for each."
        )
    return weights


@command(app, "fedrot check models/a", "fedrot check models/a --parts attention+ffn")
def check(
    model: Annotated[str, Argument(hidden=True)],
    parts: Annotated[
        str | None, Option(help="attention+ffn, whole; default: all.")
    ] = None,
) -> None:
    """Move a MODEL by random elements of its symmetry group, and check that its outputs
    stay the same.

    MODEL is the folder of a saved model, or a hub name.

    The exit code is 0 if they do, 1 if they do not, and 2 if the model cannot be
    checked.
    """
    from fedrot.check import check_function
    from fedrot.simulations.saved.load import about, load
    from fedrot.simulations.saved.merging import options_of
    from fedrot.symmetry import PARTS, symmetry_of

    with console.status(escape(f"Checking {model}")):
        saved = load(model)
        with about(model):
            config = saved.model.config
            symmetry = symmetry_of(config, saved.tensors)
            if parts:
                chosen = options_of(parts).parts
            else:
                movable = {group.part for group in symmetry.groups}
                chosen = tuple(part for part in PARTS if part in movable)
            if not symmetry.select(chosen):
                raise FedrotError(
                    f"It has no groups of the parts {', '.join(chosen) or '(none)'}."
                )
            checked = [symmetry]
            if "residual" in chosen and symmetry.can_rotate:
                checked.append(symmetry.rotated)
            try:
                for moved in checked:
                    change = check_function(saved.model, config, moved, chosen)
            except SymmetryError as error:
                complain_in_red(str(error))
                raise Exit(FAILED) from None
    console.print(
        f"The function is preserved: outputs change by at most {change:.1e} of their "
        "size."
    )
