"""Tokenizers: the bundled one, and those of pretrained models."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from fedrot.simulations.data.read import refuse
from fedrot.simulations.pretrained import loading, tokenizer_of
from fedrot.simulations.scenario import Scenario

_BUNDLED = Path(__file__).with_name("bundled")


@lru_cache(maxsize=1)
def bundled_tokenizer() -> Tokenizer:
    """Return the package's uncased WordPiece tokenizer, trained on GoEmotions.

    Texts become ``[CLS] A [SEP]``, pairs ``[CLS] A [SEP] B [SEP]`` with type ids 0 and
    1. The object is shared: copy it before enabling padding or truncation. See
    ``tests/simulations/data/wordpiece.py``.
    """
    return Tokenizer.from_file(str(_BUNDLED / "tokenizer.json"))


def tokenizer_for(scenario: Scenario) -> Tokenizer:
    """Return the bundled tokenizer, or that of the pretrained model."""
    if scenario.model is None:
        return bundled_tokenizer()
    return fast_tokenizer(scenario).backend_tokenizer


def fast_tokenizer(scenario: Scenario) -> Any:
    """Return the tokenizer of a scenario as one of transformers."""
    from transformers import AutoTokenizer

    if scenario.model is None:
        return AutoTokenizer.from_pretrained(_BUNDLED)
    tokenizer = tokenizer_of(scenario.model)
    with loading(scenario.model):
        # Without files of a tokenizer, transformers makes an empty one.
        if set(tokenizer.get_vocab()).issubset(tokenizer.all_special_tokens):
            refuse(
                f"model '{scenario.model}'",
                "has no tokenizer",
                "save tokenizer.json beside it",
            )
        return tokenizer
