"""Output of the commands: help in plain text, and errors as one line with an exit code."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import click
import typer
from click.core import ParameterSource
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand

#: Prints without markup: brackets in names, paths and extras are text.
console = Console(markup=False)

#: Exit codes: 0 done, 1 the run failed, 2 bad input, 130 interrupted.
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


class Command(TyperCommand):
    """A command with help in plain text; Typer reads help as markup and would drop brackets."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = escape(self.help or "")
        for parameter in self.params:
            # Some versions of click drop the help of Typer's arguments; it is read again.
            parameter.help = escape(parameter.help or self._declared(parameter.name))

    def _declared(self, name: str | None) -> str:
        hints = get_type_hints(self.callback, include_extras=True)
        _, *declared = get_args(hints.get(name or "")) or (None,)
        return next((found.help for found in declared if found.help), "")


def examples(*commands: str) -> str:
    """Return the end of a command's help: command lines, one per line."""
    return escape("\n\n".join(("Examples:" if len(commands) > 1 else "Example:", *commands)))


def guarded(run: Callable[[], None], complain: Callable[[str], None] | None = None) -> None:
    """Run a command; an expected error becomes one line on the terminal and an exit code.

    An option without an effect beside the others is an error, too; see ``effects``.
    """
    complain = complain or complain_in_red
    context = click.get_current_context()
    given = _given(context)
    try:
        _refuse_idle(context, given)
        run()
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except ValidationError as error:
        for problem in error.errors():
            field = str(next(iter(problem["loc"]), "configuration"))
            where = ".".join(map(str, problem["loc"])) or field
            complain(f"Error in {given.get(field, where)}: {problem['msg']}")
        raise typer.Exit(BAD_INPUT) from None
    except (OSError, ValueError) as error:
        complain(f"Error: {error}")
        raise typer.Exit(BAD_INPUT) from None
    except RuntimeError as error:
        complain(f"Error: {error}")
        raise typer.Exit(FAILED) from None


def _given(context: click.Context) -> dict[str, str]:
    """Return the parameters on the command line, by name, as the user writes them."""
    return {
        str(p.name): p.opts[-1] if isinstance(p, click.Option) else str(p.name).upper()
        for p in context.command.params
        if context.get_parameter_source(str(p.name)) is ParameterSource.COMMANDLINE
    }


def _refuse_idle(context: click.Context, given: dict[str, str]) -> None:
    from fedrot.simulations.cli.effects import refuse_idle

    refuse_idle(str(context.command.name), context.params, given)


def say(message: str) -> None:
    """Print a sentence without highlighting numbers and paths."""
    console.print(message, highlight=False)


def complain_in_red(message: str) -> None:
    """Print an error."""
    console.print(message, style="red", highlight=False)


def complain_in_json(message: str) -> None:
    """Print an error as JSON."""
    typer.echo(json.dumps({"error": message}))


def command_line() -> str:
    """Return the command as the user typed it."""
    return shlex.join(["fedrot", *sys.argv[1:]])


def names(text: str | None) -> list[str]:
    """Split a text at commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]
