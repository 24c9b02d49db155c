"""Registration of commands, and their errors as one line and an exit code."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import click
from pydantic import ValidationError
from rich.console import Console
from rich.segment import Segment
from typer import Exit, Option, Typer
from typer.core import TyperCommand

import fedrot
from fedrot.errors import safe
from fedrot.simulations import INSTALL


class _Console(Console):
    """Prints the controls of Rich, and none of a name."""

    def render(self, *args: Any, **options: Any) -> Iterator[Segment]:
        for segment in super().render(*args, **options):
            if not segment.control:
                segment = segment._replace(text=safe(segment.text))
            yield segment


#: Console without markup, because names, paths and extras may contain brackets and
#: colons, and without highlighted numbers and paths.
console = _Console(markup=False, emoji=False, highlight=False)

#: First words of a command line.
PROGRAM = ["fedrot"]

#: Exit codes beside 0: the run failed, bad input, interrupted.
FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130

Function = Callable[..., None]

#: Help is plain text: markup would drop brackets, and panels would not fit a screen.
app = Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog="Examples:\n\nfedrot simulate --data mine.csv --out runs/mine",
)


def _version(asked: bool) -> None:
    if asked:
        console.print(f"fedrot {fedrot.__version__}")
        raise Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Which average of your clients' models helps? Averages of transformers,
    compared.
    """


class _Command(TyperCommand):
    """A command whose expected errors are one line and an exit code.

    Its help is plain text.
    """

    def get_help(self, ctx: click.Context) -> str:
        # Typer escapes brackets as if they were markup.
        return super().get_help(ctx).replace("\\[", "[")

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (Exit, click.ClickException):
            raise
        except KeyboardInterrupt:
            raise Exit(INTERRUPTED) from None
        except ModuleNotFoundError as error:
            name = error.name or ""
            if name.startswith("fedrot."):
                raise
            reason = f"This command needs {name}. {INSTALL}" if name else error
            complain_in_red(f"Error: {reason}")
        except ValidationError as error:
            for detail in error.errors():
                where = ".".join(map(str, detail["loc"])) or "the settings"
                reason = detail["msg"].removeprefix("Value error, ")
                complain_in_red(f"Error in {where}: {reason}")
        except RuntimeError as error:
            complain_in_red(f"Error: {error}")
            raise Exit(FAILED) from None
        except (OSError, ValueError) as error:
            reason = str(error)
            if isinstance(error, OSError) and error.filename is not None:
                reason = f"'{error.filename}': {error.strerror}."
            complain_in_red(f"Error: {reason}")
        raise Exit(BAD_INPUT)


def command(app: Typer, *lines: str) -> Callable[[Function], Function]:
    """Register a function as a command of ``app``.

    Its help ends with these example command lines.
    """
    return app.command(cls=_Command, epilog="\n\n".join(("Examples:", *lines)))


def complain_in_red(message: str) -> None:
    console.print(message, style="red")


def refuse_taken(folder: Path | None, option: str) -> None:
    """Raise ``FileExistsError`` if a folder of an option is there and not empty."""
    if folder and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(
            f"'{folder}' exists and is not an empty folder. Choose another {option}."
        )


def command_line() -> str:
    """Return the command as the user typed it."""
    return shlex.join([*PROGRAM, *sys.argv[1:]])
