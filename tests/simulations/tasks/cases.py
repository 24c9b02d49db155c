"""A small experiment of every task and kind of labels, and saved models of every
precision.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers

from fedrot.simulations.data.tokenizers import bundled_tokenizer
from fedrot.simulations.experiment import OF_SMALL_MODEL, Experiment
from fedrot.simulations.models import build_model
from fedrot.simulations.tasks.training import task_of

torch.set_num_threads(1)

SMALL = {
    "train_limit": 70,
    "test_limit": 40,
    "depth": 1,
    "width": 16,
    "heads": 2,
    "max_length": 24,
    "clients": 2,
    "batch_size": 8,
}
ROWS = 48
_TEXTS = [
    f"a {'good' if row % 2 else 'bad'} story {'of men ' * (row % 5)}{row}"
    for row in range(ROWS)
]
_SENTENCES = (
    ("Anna Smith lives in Paris", "B-PER I-PER O O B-LOC"),
    ("the weather was nice", "O O O O"),
    ("New York is not London", "B-LOC I-LOC O O B-LOC"),
    ("Bob laughed", "B-PER O"),
)
_TAGGED = [_SENTENCES[row % 4] for row in range(ROWS)]
#: Columns of files.
FILES = {
    "regression": {
        "text": _TEXTS,
        "label": [0.5 + row % 2 + row / 100 for row in range(ROWS)],
    },
    "multi": {
        "text": _TEXTS,
        "x": [row % 2 == 0 for row in range(ROWS)],
        "y": [row % 3 == 0 for row in range(ROWS)],
    },
    "seen": {
        "text": _TEXTS,
        "label": [("joy", "fear")[row % 2] for row in range(ROWS)],
    },
    "other": {
        "text": _TEXTS[::-1],
        "label": [("fear", "anger", "joy")[row % 3] for row in range(ROWS)],
    },
    "tags": {
        "tokens": [words.split() for words, _ in _TAGGED],
        "ner_tags": [tags.split() for _, tags in _TAGGED],
    },
}


@cache
def data_dir():
    folder = Path(mkdtemp(prefix="fedrot-cases-"))
    for name, columns in FILES.items():
        split = ["test" if row % 4 == 3 and row > 8 else "train" for row in range(ROWS)]
        folder.joinpath("ner").mkdir(exist_ok=True)
        place = folder / "ner" if name == "tags" else folder
        pq.write_table(pa.table({**columns, "split": split}), place / f"{name}.parquet")
    return folder


#: What differs from ``SMALL``, by case: one or more of each task, and every
#: architecture of it.
CASES = {
    "bert": {},
    "distilbert": {"architecture": "distilbert"},
    "gpt2": {"architecture": "gpt2"},
    "llama": {"architecture": "llama"},
    "multi": {"data": "multi"},
    "regression": {"data": "regression"},
    "domains": {"data": "seen,other"},
    "mlm bert": {"task": "mlm"},
    "mlm distilbert": {"task": "mlm", "architecture": "distilbert"},
    "clm gpt2": {"task": "clm"},
    "clm llama": {"task": "clm", "architecture": "llama"},
    "ner bert": {"task": "ner", "data": "tags"},
    "ner distilbert": {"task": "ner", "data": "tags", "architecture": "distilbert"},
    "image": {"task": "image"},
}


def experiment_of(case, **changes):
    """Return the experiment of a case; limits are for data sets that are not files of
    ``FILES``.
    """
    given = {**SMALL, **CASES[case], **changes}
    if given.get("model"):
        given = {
            key: value for key, value in given.items() if key not in OF_SMALL_MODEL
        }
    if "data" in CASES[case]:
        given |= {"data_dir": data_dir(), "train_limit": None, "test_limit": None}
    return Experiment(**given)


def task_for(case, **changes):
    return task_of(experiment_of(case, **changes).to_json())


def changed(task, **fields):
    """Return a task whose experiment has other fields; the data stay."""
    return replace(task, experiment=task.experiment.model_copy(update=fields))


def model_for(task, seed=0):
    return build_model(task.experiment, task.data, seed)


#: Small models to save: class of transformers, and its configuration.
SIZES = {
    "vocab_size": 6000,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
}
VISION = {
    name: SIZES[name] for name in SIZES if name.startswith(("hidden", "num", "inter"))
}


def save(folder, config, auto="AutoModel", dtype=torch.float32, tokenizer=True):
    """Save a random model in a precision, with the bundled tokenizer."""
    torch.manual_seed(0)
    getattr(transformers, auto).from_config(config).to(dtype).save_pretrained(folder)
    if tokenizer:
        special = {
            f"{name}_token": f"[{name.upper()}]"
            for name in ("pad", "mask", "cls", "sep", "unk")
        }
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=bundled_tokenizer(), **special
        ).save_pretrained(folder)
    return folder


def parts(model):
    """Return copies of a model's tensors by name."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
