"""Every command on models works for every family, or says in one line why not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
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

#: What is refused, by command and ``model_type``, with a part of the reason.
REFUSED: dict[str, dict[str, str]] = {
    "merge": {"xglm": "Leave 'residual' out of the parts"},
    "barrier": dict.fromkeys(
        ["clip", "clip_text_model", "clip_vision_model", "t5", "mt5", "mistral", "electra"],
        "a class without a task",
    ),
}


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


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    table = {
        "text": [f"w{i % 30} w{(7 * i) % 29} w{(3 * i) % 31}" for i in range(40)],
        "label": [i % 3 for i in range(40)],
        "split": ["train"] * 30 + ["test"] * 10,
    }
    pq.write_table(pa.table(table), folder / "few.parquet")
    return folder


def test_every_type_has_a_model_here() -> None:
    assert {*TYPES} <= {*MEMBERS, "distilbert", "xlm-roberta"}


@pytest.mark.parametrize("kind", [kind for kind in TYPES if MEMBERS.get(kind) in families.KINDS])
def test_every_command(kind: str, data: Path, tmp_path: Path) -> None:
    a, b = (save(kind, seed, tmp_path / place) for seed, place in enumerate("ab"))
    texts = ("--data", "few", "--data-dir", data)
    out = tmp_path / "out"
    commands = {
        "check": ("check", a),
        "merge": ("merge", a, b, "--parts", "whole", "--out", out / "merged"),
        "barrier": (
            *("barrier", a, b, "--out", out / "barrier", "--methods", "vanilla,rotation"),
            *(("--data", "digits") if kind in ("vit", "deit") else texts),
            *("--points", 3, "--test-limit", 10),
        ),
    }
    for name, command in commands.items():
        code, printed = invoke(*command)
        printed = re.sub(r"Writing model shards:.*?it/s\]", "", printed)
        reason = REFUSED.get(name, {}).get(kind)
        assert code == (2 if reason else 0), (name, printed)
        if reason:
            assert reason in printed
            assert printed.count("Error: ") == 1
            assert len(printed) < 700
