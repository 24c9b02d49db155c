"""The bundled WordPiece tokenizer of models from scratch."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: In the order of their ids, from 0.
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@lru_cache(maxsize=1)
def bundled_tokenizer() -> Tokenizer:
    """Return the tokenizer of the package: 6000 entries, from GoEmotions' training texts.

    It is lower-casing. Single texts become ``[CLS] A [SEP]``, pairs ``[CLS] A [SEP] B [SEP]`` with type
    ids 0 and 1. It is shared: copy it (``Tokenizer.from_str(t.to_str())``) before enabling padding or
    truncation. ``tests/simulations/data/wordpiece.py`` trained it.
    """
    from tokenizers import Tokenizer

    source = resources.files("fedrot.simulations.data") / "bundled" / "tokenizer.json"
    return Tokenizer.from_str(source.read_text(encoding="utf-8"))
