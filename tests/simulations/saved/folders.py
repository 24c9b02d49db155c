"""Saved models of the tests, and how their files are changed."""

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import fedrot
from tests import families
from tests import models as made
from tests.simulations.commands import run

WEIGHTS = "model.safetensors"
PICKLES = {
    WEIGHTS: "pytorch_model.bin",
    "adapter_model.safetensors": "adapter_model.bin",
}


def with_state(model, tensors):
    other = copy.deepcopy(model)
    other.load_state_dict(tensors)
    return other


def near(model, scale=0.1):
    """The model after a little training, tied tensors still tied."""
    trained = made.near(dict(model.named_parameters()), scale, 1)
    return with_state(model, {**model.state_dict(), **trained})


def scrambled(model, parts=("attention", "ffn")):
    symmetry = fedrot.symmetry_of(model.config, model.state_dict())
    return with_state(
        model, fedrot.random_equivalent(model.state_dict(), symmetry, 3, parts)
    )


def model_of(name, seed=0):
    if name in families.MEMBERS:
        return families.model_of(name, families.state_of(name, seed)).float()
    return made.fresh_model(name, seed=seed).float()


def saved(model, folder, **options):
    model.save_pretrained(folder, **options)
    return folder


def change(folder, function, file=WEIGHTS):
    tensors = {name: t.clone() for name, t in load_file(folder / file).items()}
    save_file(function(tensors), folder / file, metadata={"format": "pt"})


def configure(folder, file="config.json", **changes):
    """Change fields of a configuration; dictionaries are changed inside."""
    settings = json.loads((folder / file).read_text())
    for name, value in changes.items():
        inside = isinstance(value, dict) and isinstance(settings.get(name), dict)
        settings[name] = {**settings[name], **value} if inside else value
    (folder / file).write_text(json.dumps(settings))


def nested(inside, folder):
    """Move a folder's files into one inside of it, beside one that is no model."""
    away = folder.with_name("away")
    folder.rename(away)
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    away.rename(folder / inside)


class _Code(str):
    """What a pickle could do: it creates a file of this name."""

    def __reduce__(self):
        return Path.touch, (Path(self),)


def hostile(file, folder):
    """Replace the weights by a pickle that runs code."""
    tensors = load_file(folder / file)
    torch.save({**tensors, "x": _Code(folder / "ran")}, folder / PICKLES[file])
    (folder / file).unlink()


def refused(words, spoilt, *line):
    """Run a command, which has to fail with these words, name a folder and leave
    nothing behind.
    """
    assert str(spoilt) in run(*line, code=2, says=words)
    assert not (spoilt.parent / "out").exists()
    assert not (spoilt / "ran").exists()


def tokenizer(folder, size=40, **renamed):
    words = ["[PAD]", "[UNK]", *(f"w{i}" for i in range(size - 2))]
    numbers = {renamed.get(word, word): number for number, word in enumerate(words)}
    found = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=found, unk_token="[UNK]").save_pretrained(
        folder
    )
