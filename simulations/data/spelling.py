"""``seen`` and ``reading``: a name without what a person does not see in it."""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal

from fedrot.simulations.data.read import clean

_SHAPELESS = re.compile("[\ufe00-\ufe0f\u034f\u115f\u1160\u3164\uffa0]")
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?(e[+-]?\d+)?", re.ASCII)
_WORDS = {"true": "1", "yes": "1", "false": "0", "no": "0"}
#: Minus and the slashes of fractions, and marks that stand for quotation marks.
_SIGNS = str.maketrans("\u2212\u2044\u2215", "-//", "'\"`\xb4\u02bc\u2032\u201a\u201e")


def seen(text: str) -> str:
    """Return a text in lower case without spaces and characters that are not seen."""
    unseen = ("Cc", "Cf", "Zs", "Zl", "Zp")
    letters = [letter for letter in text if unicodedata.category(letter) not in unseen]
    return _SHAPELESS.sub("", clean("".join(letters).casefold()))


def reading(name: str) -> object:
    """Return a number, or the letters of a text in lower case."""
    text = unicodedata.normalize("NFKC", name.translate(_SIGNS))
    # Once more: fractions such as one half have got a slash of their own.
    text = seen("".join(map(_sign, text.translate(_SIGNS))))
    text = _WORDS.get(text, text)
    if _NUMBER.fullmatch(text):
        return Decimal(text)
    return text.replace("-", "") or name


def _sign(letter: str) -> str:
    """Return a dash as "-", a digit as 0 to 9, "_" and quotation marks as nothing."""
    kind = unicodedata.category(letter)
    if kind in ("Pc", "Pi", "Pf"):
        return ""
    return "-" if kind == "Pd" else str(unicodedata.decimal(letter, letter))
