"""Commands for saved models: merge, check, diagnose."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from rich.markup import escape

from fedrot.simulations.cli.commands import FAILED, command, complain_in_red, console, given, say
from fedrot.simulations.cli.root import app
from fedrot.simulations.merge.merge_settings import AdapterMergeSettings, MergeSettings, is_adapter


@command(
    app,
    "fedrot merge models/a models/b --out models/merged",
    "fedrot merge models/a models/b --parts whole --dry-run",
    "fedrot merge adapters/a adapters/b --out adapters/merged",
    fields=MergeSettings,
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
    settings: dict[str, Any],
    rank: Annotated[
        int | None,
        typer.Option(
            min=1, help="For adapters: rank of the result; default: the largest rank of the adapters."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Merge, but write nothing.")] = False,
) -> None:
    """Align saved models to the first, merge them, and write the result as a model.

    LoRA adapters are averaged, and the result is written as an adapter.
    """
    if any(map(is_adapter, map(Path, models))):
        method = settings["method"] if "method" in given(click.get_current_context()) else "exact"
        asked = AdapterMergeSettings(method=method, rank=rank, weights=settings["weights"])
        _merge_adapters([Path(model) for model in models], out, asked, dry_run=dry_run)
        return
    from fedrot.simulations.merge import merge_scores
    from fedrot.simulations.merge.merging import merge as merge_models
    from fedrot.simulations.merge.merging import movements, movements_table

    with console.status(escape(f"{settings['method']} of {len(models)} models")):
        found = merge_models(models, out, MergeSettings(**settings), dry_run=dry_run)
    console.print(movements_table(found))
    for sentence in movements(found):
        say(sentence)
    if found.scores is not None:
        for table in merge_scores.tables(found.scores):
            console.print(table)
        say(merge_scores.verdict(found.scores))
    for note in found.notes:
        say(f"Note: {note}")
    say(f"Written: {found.out}" if found.out else "Dry run: nothing was written.")


def _merge_adapters(
    adapters: list[Path], out: Path | None, settings: AdapterMergeSettings, *, dry_run: bool
) -> None:
    from fedrot.simulations.merge import adapter_merging

    if out is None and not dry_run:
        raise ValueError("The result needs a path: give --out, or --dry-run.")
    report = adapter_merging.merge_adapters(adapters, None if dry_run else out, settings)
    say(f"{report}.")
    say("Dry run: nothing was written." if dry_run else f"Written: {out}")


@command(app, "fedrot check models/a", "fedrot check --list")
def check(
    model: Annotated[str | None, typer.Argument(help="Folder of a saved model, or a hub name.")] = None,
    parts: Annotated[
        str | None,
        typer.Option(help="Parts such as attention+ffn, or whole; default: all parts that can move."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    list_families: Annotated[bool, typer.Option("--list", help="List the supported families.")] = False,
) -> None:
    """Move a model by random elements of its symmetry group, and check that its outputs stay the same.

    The exit code is 0 if they do, 1 if they do not, and 2 if the model cannot be checked.
    """
    from fedrot.simulations.check.checking import check_model, families_table, tables, verdict
    from fedrot.simulations.merge.merging import options_of
    from fedrot.symmetry import FAMILIES

    if list_families:
        if as_json:
            listed = {f.name: {"model_types": f.model_types, "stream": f.stream} for f in FAMILIES}
            typer.echo(json.dumps({"families": listed}))
        else:
            console.print(families_table(FAMILIES))
        return
    if model is None:
        raise ValueError("Give a model to check, or --list.")
    chosen = None if parts is None else options_of(parts).parts
    with nullcontext() if as_json else console.status(escape(f"Checking {model}")):
        found = check_model(model, chosen)
    if as_json:
        typer.echo(json.dumps(asdict(found)))
    else:
        for table in tables(found):
            console.print(table)
        for part, reason in found.refused.items():
            say(f"Part '{part}' cannot be moved: {reason}")
        for note in found.notes:
            say(f"Note: {note}")
        (say if found.holds else complain_in_red)(verdict(found))
    if not found.holds:
        raise typer.Exit(FAILED)


@command(
    app,
    "fedrot diagnose models/base models/client-0 models/client-1",
    "fedrot diagnose runs/mine",
    "fedrot diagnose alignment.jsonl",
)
def diagnose(
    what: Annotated[
        list[str],
        typer.Argument(
            help="A run folder, or the rows file that a strategy wrote; or a base model and the models "
            "that were trained from it: folders or hub names."
        ),
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Find out whether clients are in different coordinates, and which average to use."""
    from fedrot.simulations.diagnose.diagnosing import (
        diagnose_models,
        diagnose_run,
        merge_command,
        tables,
    )

    with nullcontext() if as_json else console.status(escape(f"Diagnosing {what[0]}")):
        one = len(what) == 1
        found = diagnose_run(Path(what[0])) if one else [diagnose_models(what)]
    if as_json:
        typer.echo(json.dumps({"diagnoses": [each.to_dict() for each in found]}))
        return
    for each in found:
        for table in tables(each):
            console.print(table)
    for each in found:
        say(": ".join(filter(None, [each.title, each.diagnosis.sentence])))
    if len(what) == 2:
        say(f"'{what[0]}' was used as the base.")
    if not one:
        # On one line, so that it can be copied.
        console.print(
            f"Command for this merge: {merge_command(found[0], what)}", soft_wrap=True, highlight=False
        )
