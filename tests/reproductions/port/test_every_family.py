"""``port`` and ``canonical`` on a model of every family; what they refuse, they name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import families
from tests.reproductions.commands import invoke
from tests.simulations.models.test_every_family import MEMBERS, TYPES, save
from tests.simulations.test_hostile_files import DAMAGED

_UNFOLDED = "bloom bart albert bert roberta xlm-roberta camembert deberta deberta-v2 distilbert electra"
_UNFOLDED += " modernbert mpnet gemma3_text xglm clip_vision_model"
#: What is refused, by command and ``model_type``, with a part of the reason.
REFUSED = {
    "canonical": dict.fromkeys(_UNFOLDED.split(), "cannot be folded"),
    "port": {"xglm": "Port it with --match none"},
}


@pytest.mark.parametrize("kind", [kind for kind in TYPES if MEMBERS.get(kind) in families.KINDS])
def test_both_commands(kind: str, tmp_path: Path) -> None:
    a, b, c = (save(kind, seed, tmp_path / place) for seed, place in enumerate("abc"))
    commands = {
        "canonical": ("canonical", a, tmp_path / "canonical"),
        "port": ("port", a, b, c, "--out", tmp_path / "ported"),
    }
    for name, command in commands.items():
        code, printed = invoke(*command)
        reason = REFUSED[name].get(kind, "")
        assert code == (2 if reason else 0), (name, printed)
        assert reason in printed


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_model_is_named(damage: str, tmp_path: Path) -> None:
    a, b = (save("bert", seed, tmp_path / place) for seed, place in enumerate("ab"))
    (b / "model.safetensors").write_bytes(DAMAGED[damage])
    code, printed = invoke("port", a, b, a, "--out", tmp_path / "out")
    assert (code, f"{b}" in printed) == (2, True), printed
    assert not (tmp_path / "out").exists()
