"""Registration of commands, with options generated from the fields of settings models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from pydantic import BaseModel

from fedrot.simulations.cli.terminal import Command, complain_in_json, examples, guarded

Function = Callable[..., None]


def command(
    app: typer.Typer,
    *lines: str,
    name: str | None = None,
    fields: type[BaseModel] | None = None,
    renamed: Mapping[str, str] | None = None,
    leave_out: Collection[str] = (),
) -> Callable[[Function], Function]:
    """Register a function as a command of ``app``.

    Expected errors become one line and an exit code, see ``guarded``.

    Args:
        lines: command lines, the examples at the end of the help.
        name: of the command; the function's own if None.
        fields: settings model. Each of its fields is an option in place of the function's parameter
            ``settings``, which receives a dictionary from the names of the fields to their values.
        renamed: options that are not called as their field, by field.
        leave_out: fields that are no options.
    """

    def register(function: Function) -> Function:
        hints = get_type_hints(function, include_extras=True)
        own = [
            p.replace(annotation=hints[p.name], kind=Parameter.KEYWORD_ONLY)
            for p in signature(function).parameters.values()
        ]
        options = list(_options(fields, renamed or {}, leave_out)) if fields else []
        parameters = [q for p in own for q in (options if p.name == "settings" else [p])]

        @wraps(function)
        def run(**values: Any) -> None:
            if options:
                values["settings"] = {option.name: values.pop(option.name) for option in options}
            complain = complain_in_json if values.get("as_json") else None
            guarded(partial(function, **values), complain)

        # Typer reads the parameters from here.
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(name, cls=Command, epilog=examples(*lines))(run)
        return run

    return register


def _options(
    model: type[BaseModel], renamed: Mapping[str, str], leave_out: Collection[str]
) -> Iterator[Parameter]:
    """Yield the fields of a model as parameters of Typer.

    Texts in a tuple are separated by commas; numbers in a tuple are given by how many there are. An
    empty default becomes None.
    """
    for name, field in model.model_fields.items():
        if name in leave_out:
            continue
        leaves = set(_leaves(field.annotation))
        kind: Any = next((kind for kind in (int, float, Path) if kind in leaves), str)
        default = field.default
        if isinstance(default, tuple):
            default = len(default) if kind is int else ",".join(default)
        if default in ("", None):
            kind, default = kind | None, None
        spelt = renamed.get(name, "--" + name.replace("_", "-"))
        hint = Annotated[kind, typer.Option(spelt, help=field.description)]
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _leaves(annotation: Any) -> Iterator[Any]:
    """Yield the types that a type is made of, as ``int`` and ``None`` in ``tuple[int, ...] | None``."""
    found = get_args(annotation)
    for part in found:
        yield from _leaves(part)
    if not found:
        yield annotation
