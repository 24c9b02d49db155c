"""Commands for saved models: merge, check."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fedrot.simulations.cli.commands import FAILED, command, complain_in_red, console, say
from fedrot.simulations.cli.root import app


def is_adapter(folder: str) -> bool:
    """Return whether a folder has a LoRA adapter that PEFT saved."""
    return (Path(folder) / "adapter_config.json").is_file()


@command(
    app,
    "fedrot merge models/a models/b --out models/merged",
    "fedrot merge models/a models/b --parts whole --dry-run",
    "fedrot merge adapters/a adapters/b --out adapters/merged",
)
def merge(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Two or more models: folders or hub names; or two or more folders of LoRA adapters of "
            "one base model, saved by PEFT."
        ),
    ],
    *,
    out: Annotated[Path | None, typer.Option(help="A new or empty folder.")] = None,
    parts: Annotated[
        str | None,
        typer.Option(
            help="Parts to align: whole, none, or parts such as attention+ffn; default: as diagnosed."
        ),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="One number per model, separated by commas; default: equal.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="For adapters: exact (the mean of products, truncated to the rank; default) or mean "
            "(of the factors)."
        ),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=1, help="For adapters: rank of the result; default: the largest.")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD", help="A field of configurations that may differ; repeatable."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Merge, but write nothing.")] = False,
) -> None:
    """Diagnose models, align them to the first if that helps, and write their average as a model.

    LoRA adapters are averaged, and the result is written as an adapter.
    """
    if out is None and not dry_run:
        raise ValueError("The result needs a path: give --out, or --dry-run.")
    target = None if dry_run else out
    if any(map(is_adapter, models)):
        from fedrot.simulations.saved_models.merge_adapters import merge_adapters

        method = method or "exact"
        merge_adapters(
            models, target, say, method=method, rank=rank, weights=weights, allowed=allow or ()
        )
    else:
        from fedrot.simulations.saved_models.merge import merge_models

        with console.status(escape(f"Merging {len(models)} models")):
            merge_models(models, target, say, parts=parts, weights=weights, allowed=allow or ())
    say(f"Written: {out}" if target else "Dry run: nothing was written.")


@command(app, "fedrot check models/a", "fedrot check models/a --parts attention+ffn")
def check(
    model: Annotated[str, typer.Argument(help="Folder of a saved model, or a hub name.")],
    parts: Annotated[
        str | None,
        typer.Option(help="Parts such as attention+ffn, or whole; default: all parts that can move."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Move a model by random elements of its symmetry group, and check that its outputs stay the same.

    The exit code is 0 if they do, 1 if they do not, and 2 if the model cannot be checked.
    """
    from fedrot.simulations.saved_models.check import check_model

    with nullcontext() if as_json else console.status(escape(f"Checking {model}")):
        found = check_model(model, parts)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        (say if found["holds"] else complain_in_red)(found["sentence"])
    if not found["holds"]:
        raise typer.Exit(FAILED)
