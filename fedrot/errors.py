"""Errors that fedrot raises; messages say what was wrong, where, and what to do."""

import re

#: Maximum length of a reason in errors, logs and reports, in characters; it may quote a
#: client.
LONGEST_REASON = 500
#: Control characters except tab and newline, marks of the direction of text, and lone
#: surrogates.
_UNSAFE = re.compile(
    r"[\0-\b\v-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def safe(text: str) -> str:
    """Return a text, which may quote a file, without what could steer a terminal."""
    return _UNSAFE.sub("", text)


def legible(reason: str) -> str:
    """Return a reason on one line; of a long one, both ends are kept.

    It may quote a client.
    """
    if len(reason) > LONGEST_REASON:
        half = LONGEST_REASON // 2
        reason = f"{reason[:half]} ... {reason[5 - half :]}"
    return "".join(c if c.isprintable() else " " for c in reason)


class FedrotError(ValueError):
    """Base class of all errors raised by fedrot."""


class SymmetryError(FedrotError):
    """The architecture is unknown, or tensors differ from the family's description."""


class UpdateError(FedrotError):
    """A client update cannot be used.

    A tensor is missing, extra, misshapen or not finite. The message, which may quote
    the client, is one line of limited length.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(legible(reason))


def refusal(error: Exception) -> str:
    """Return why a reply is dropped, for any error: no reply may end the run."""
    if isinstance(error, FedrotError):
        return str(error)
    return f"Unusable, {type(error).__name__}: {error}"
