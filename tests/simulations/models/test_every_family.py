"""Every command on models works for every family, or says in one line why not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fedrot.symmetry import FAMILIES
from tests import families
from tests.models import randomise
from tests.simulations.commands import invoke

#: A small model by the ``model_type`` of every family: members of ``tests.families`` by name.
MEMBERS = {families.config_of(name).model_type: name for name in reversed(families.MEMBERS)}
TYPES = [kind for family in FAMILIES for kind in family.model_types]

#: Types that ``merge --parts whole`` refuses, with a part of the reason.
REFUSED = {"xglm": "Leave 'residual' out of the parts"}


def _member(kind: str) -> Any:
    if kind in ("distilbert", "xlm-roberta"):
        prefix = {"distilbert": "DistilBert", "xlm-roberta": "XLMRoberta"}[kind]
        sizes = (
            {"dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 20} if kind == "distilbert" else {}
        )
        settings = {**families.MEMBERS["bert"].settings, **sizes}
        config = getattr(transformers, f"{prefix}Config")(**settings)
        return getattr(transformers, f"{prefix}ForSequenceClassification")(config)
    member = families.MEMBERS[MEMBERS[kind]]
    # There are ten digits.
    labels = {"num_labels": 10} if kind in ("vit", "deit") else {}
    return replace(member, settings={**member.settings, **labels}).build("eager")


def save(kind: str, seed: int, folder: Path) -> Path:
    randomise(_member(kind).float(), seed).save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(35))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    end = ("[SEP]", 3)
    tokenizer.post_processor = processors.BertProcessing(end, ("[CLS]", 2))
    special = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    tokens = {f"{name}_token": token for name, token in special.items()}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens).save_pretrained(folder)
    return folder


def test_every_type_has_a_model_here() -> None:
    assert {*TYPES} <= {*MEMBERS, "distilbert", "xlm-roberta"}


@pytest.mark.parametrize("kind", [kind for kind in TYPES if MEMBERS.get(kind) in families.KINDS])
def test_every_command(kind: str, tmp_path: Path) -> None:
    a, b = (save(kind, seed, tmp_path / place) for seed, place in enumerate("ab"))
    code, printed = invoke("check", a)
    assert code == 0, printed
    code, printed = invoke("merge", a, b, "--parts", "whole", "--dry-run")
    reason = REFUSED.get(kind, "")
    assert (code, reason in printed) == (2 if reason else 0, True), printed
