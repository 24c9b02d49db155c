"""Registration of commands: options from settings models, help in plain text, errors as one line."""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial, wraps
from importlib.util import find_spec
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import click
import typer
from click.core import ParameterSource
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.segment import Segment
from typer.core import TyperCommand

from fedrot.errors import safe
from fedrot.simulations import INSTALL


class _Console(Console):
    """Prints the controls of Rich, and none of a name."""

    def render(self, *args: Any, **options: Any) -> Iterator[Segment]:
        for segment in super().render(*args, **options):
            yield segment if segment.control else segment._replace(text=safe(segment.text))


#: Console without markup, because names, paths and extras may contain brackets and colons.
console = _Console(markup=False, emoji=False)

#: First words of a command line.
PROGRAM = ["fedrot"]

#: Exit codes: 0 done, 1 the run failed, 2 bad input, 130 interrupted.
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


#: What to do about errors of the operating system, by error number.
_ADVICE = {
    errno.ENOSPC: "Free some space, or choose another place.",
    errno.EDQUOT: "Free some space, or choose another place.",
    errno.EROFS: "Choose another place.",
    errno.EACCES: "Change its permissions, or choose another place.",
    errno.EPERM: "Change its permissions, or choose another place.",
    errno.ENAMETOOLONG: "Choose a shorter name.",
}

Function = Callable[..., None]


def command(
    app: typer.Typer,
    *lines: str,
    name: str | None = None,
    fields: type[BaseModel] | None = None,
    renamed: Mapping[str, str] | None = None,
    leave_out: Collection[str] = (),
    panels: Mapping[str, Collection[str]] | None = None,
    advice: Mapping[str, str] | None = None,
) -> Callable[[Function], Function]:
    """Register a function as a command of ``app``, ``guarded`` against expected errors.

    Args:
        lines: example command lines, shown at the end of the help.
        name: the command's name; default: the function's name.
        fields: settings model. Each of its fields becomes an option. The function's parameter
            ``settings`` receives a dictionary from field names to values.
        renamed: options whose name differs from that of their field, by field.
        leave_out: fields without an option.
        panels: the fields of each panel of the help; the others are in the panel "Options".
        advice: what an error about an unknown option suggests, by option.
    """

    def register(function: Function) -> Function:
        hints = get_type_hints(function, include_extras=True)
        own = [
            p.replace(annotation=hints[p.name], kind=Parameter.KEYWORD_ONLY)
            for p in signature(function).parameters.values()
        ]
        options = list(_options(fields, renamed or {}, leave_out, panels or {})) if fields else []
        parameters = [q for p in own for q in (options if p.name == "settings" else [p])]

        @wraps(function)
        def run(**values: Any) -> None:
            values = {name: _at_home(value) for name, value in values.items()}
            if options:
                values["settings"] = {option.name: values.pop(option.name) for option in options}
            complain = complain_in_json if values.get("as_json") else None
            guarded(partial(function, **values), complain)

        # Typer reads the parameters from here.
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        cls = type("Command", (Command,), {"advice": advice or {}})
        app.command(name, cls=cls, epilog=examples(*lines))(run)
        return run

    return register


def _at_home(value: Any) -> Any:
    """Expand a leading ``~/``, which shells do not expand in ``--out=~/runs``."""
    if isinstance(value, list):
        return [_at_home(item) for item in value]
    if isinstance(value, (str, Path)) and str(value).startswith("~/"):
        return type(value)(os.path.expanduser(value))
    return value


def _options(
    model: type[BaseModel],
    renamed: Mapping[str, str],
    leave_out: Collection[str],
    panels: Mapping[str, Collection[str]],
) -> Iterator[Parameter]:
    """Yield the fields of a model as parameters of Typer.

    A tuple becomes a text option. Its default is the items joined by commas, or the number of items if
    they are numbers. An empty default becomes None.
    """
    for name, field in model.model_fields.items():
        if name in leave_out:
            continue
        leaves = _leaves(field.annotation)
        kind: Any = next((kind for kind in (bool, int, float, Path) if kind in leaves), str)
        default = field.default
        if isinstance(default, tuple):
            kind, default = str, str(len(default)) if kind is int else ",".join(default)
        if default in ("", None):
            kind, default = kind | None, None
        spelt = renamed.get(name, "--" + name.replace("_", "-"))
        panel = next((panel for panel, names in panels.items() if name in names), None)
        hint = Annotated[kind, typer.Option(spelt, help=field.description, rich_help_panel=panel)]
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _leaves(annotation: Any) -> set[Any]:
    """Return the types inside a type: ``int``, ``...`` and ``None`` for ``tuple[int, ...] | None``."""
    parts = get_args(annotation)
    return set().union(*map(_leaves, parts)) if parts else {annotation}


class Command(TyperCommand):
    """A command with help in plain text. Typer parses help as markup, which drops brackets.

    Attributes:
        advice: what an error about an unknown option suggests, by option.
    """

    advice: Mapping[str, str] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = escape(self.help or "")
        for parameter in self.params:
            # Some versions of click drop the help of Typer's arguments; it is read again.
            parameter.help = escape(parameter.help or self._declared(parameter.name))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Return the arguments that are left; an error about an unknown option has its ``advice``."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name
            if name not in self.advice:
                raise
            raise click.NoSuchOption(name, None, [self.advice[name]], ctx) from error

    def _declared(self, name: str | None) -> str:
        hints = get_type_hints(self.callback, include_extras=True)
        _, *declared = get_args(hints.get(name or "")) or (None,)
        return next((found.help for found in declared if found.help), "")


def examples(*commands: str) -> str:
    """Return the examples at the end of a command's help, one command line each."""
    return escape("\n\n".join(("Examples:" if len(commands) > 1 else "Example:", *commands)))


def guarded(run: Callable[[], None], complain: Callable[[str], None] | None = None) -> None:
    """Run a command. An expected error becomes one line on the terminal and an exit code.

    An option on the command line that has no effect is an error, too; see ``effects``.
    """
    from fedrot.simulations.cli.effects import refuse_idle

    complain = complain or complain_in_red
    context = click.get_current_context()
    named = given(context)
    try:
        refuse_idle(str(context.command.name), context.params, named)
        run()
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except ModuleNotFoundError as error:
        name = error.name or ""
        if name.startswith("fedrot."):
            raise
        complain(f"Error: This command needs {name}. {INSTALL}" if name else f"Error: {error}")
        raise typer.Exit(BAD_INPUT) from None
    except ValidationError as error:
        for problem in error.errors():
            field = str(next(iter(problem["loc"]), "configuration"))
            where = ".".join(map(str, problem["loc"])) or field
            complain(f"Error in {named.get(field, where)}: {problem['msg']}")
        raise typer.Exit(BAD_INPUT) from None
    except (OSError, ValueError, RuntimeError) as error:
        complain(f"Error: {_in_words(error)}")
        raise typer.Exit(BAD_INPUT if isinstance(error, OSError | ValueError) else FAILED) from None


def need(*modules: str) -> None:
    """Raise ``ModuleNotFoundError`` if one of these modules is not installed."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(f"This command needs {', '.join(missing)}. {INSTALL}")


def _in_words(error: Exception) -> str:
    """Return an error's message; for the operating system's errors: file, reason and what to do."""
    if not isinstance(error, OSError) or error.filename is None:
        return str(error)
    advice = _ADVICE.get(error.errno or 0, "")
    return f"'{error.filename}': {error.strerror}. {advice}".rstrip()


def given(context: click.Context) -> dict[str, str]:
    """Return the parameters that are on the command line: their spelling there, by name."""
    return {
        str(p.name): p.opts[-1] if isinstance(p, click.Option) else str(p.name).upper()
        for p in context.command.params
        if context.get_parameter_source(str(p.name)) is ParameterSource.COMMANDLINE
    }


def say(message: str) -> None:
    """Print a sentence without highlighting numbers and paths."""
    console.print(message, highlight=False)


def complain_in_red(message: str) -> None:
    console.print(message, style="red", highlight=False)


def complain_in_json(message: str) -> None:
    typer.echo(json.dumps({"error": message}))


def command_line() -> str:
    """Return the command as the user typed it."""
    return shlex.join([*PROGRAM, *sys.argv[1:]])


def names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]
