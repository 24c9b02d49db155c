"""Commands for saved models: merge, check."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedrot.errors import FedrotError
from fedrot.simulations.cli.commands import FAILED, app, command, complain_in_red, console, say


def is_adapter(folder: str) -> bool:
    """Return whether a folder has a LoRA adapter that PEFT saved."""
    return (Path(folder) / "adapter_config.json").is_file()


@command(app, "fedrot merge models/a models/b --out models/merged --data own.csv")
def merge(
    models: Annotated[list[str], typer.Argument(hidden=True)],
    *,
    out: Annotated[Path | None, typer.Option(help="A new or empty folder.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing.")] = False,
    parts: Annotated[
        str | None, typer.Option(help="whole, none, attention+ffn; else: diagnosed.")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="Such as 1,3; default: equal.")] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD", help="A field that may differ; repeatable."),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Evaluate on a file, folder or hub name.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data.")] = None,
    text_column: Annotated[str | None, typer.Option(help="Text, words or image.")] = None,
    label_column: Annotated[str | None, typer.Option(help="Label or tags.")] = None,
    fit_head: Annotated[bool, typer.Option("--fit-head", help="Fit the task head to the data.")] = False,
    method: Annotated[str | None, typer.Option(help="Of adapters: exact (products) or mean.")] = None,
    rank: Annotated[int | None, typer.Option(help="Of adapters; default: the largest.")] = None,
) -> None:
    """Diagnose, align and average saved MODELS: folders, hub names, LoRA adapters."""
    adapters = any(map(is_adapter, models))
    beside = {"--data-dir": data_dir, "--text-column": text_column, "--label-column": label_column}
    _refuse_idle("with --data", data is not None, {**beside, "--fit-head": fit_head})
    _refuse_idle("on LoRA adapters", adapters, {"--method": method, "--rank": rank})
    _refuse_idle("on models, not on LoRA adapters", not adapters, {"--parts": parts, "--data": data})
    if out is None and not dry_run:
        raise ValueError("The result needs a path: give --out, or --dry-run.")
    target, allowed = None if dry_run else out, allow or ()
    with console.status(escape(f"Merging {len(models)} models")):
        if adapters:
            from fedrot.simulations.saved.adapters import merge_adapters

            said = merge_adapters(
                models, target, method=method, rank=rank, weights=weights, allowed=allowed
            )
        else:
            from fedrot.simulations.saved.merge import merge_models

            fields = {
                "data": data,
                **{key[2:].replace("-", "_"): value for key, value in beside.items()},
            }
            said = merge_models(
                models,
                target,
                parts=parts,
                weights=weights,
                allowed=allowed,
                data=fields if data else None,
                fit_head=fit_head,
            )
    for sentence in said:
        say(sentence)
    say(f"Written: {out}" if target else "Dry run: nothing was written.")


def _refuse_idle(where: str, holds: bool, options: dict[str, Any]) -> None:
    """Raise ``FedrotError`` if options are given that have an effect only elsewhere."""
    given = [name for name, value in options.items() if value is not None and value is not False]
    if given and not holds:
        verb, it = ("has", "it") if len(given) == 1 else ("have", "them")
        raise FedrotError(f"{' and '.join(given)} {verb} an effect only {where}. Leave {it} out.")


@command(app, "fedrot check models/a", "fedrot check models/a --parts attention+ffn")
def check(
    model: Annotated[str, typer.Argument(hidden=True)],
    parts: Annotated[
        str | None,
        typer.Option(help="Parts such as attention+ffn, or whole; default: all that can move."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Move a MODEL by random elements of its symmetry group, and check that its outputs stay the same.

    MODEL is the folder of a saved model, or a hub name.

    The exit code is 0 if they do, 1 if they do not, and 2 if the model cannot be checked.
    """
    from fedrot.simulations.saved.check import check_model

    with nullcontext() if as_json else console.status(escape(f"Checking {model}")):
        found = check_model(model, parts)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        (say if found["holds"] else complain_in_red)(found["sentence"])
    if not found["holds"]:
        raise typer.Exit(FAILED)
