"""What a model or data cannot do is said before training, with what to change; what
passes, runs.
"""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import transformers

from fedrot.errors import FedrotError
from fedrot.simulations.data.labels import DataSet, Split
from fedrot.simulations.models import build_model
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.training import check_labels, check_model, task_of
from tests.simulations.tasks.cases import SIZES, VISION, experiment_of, save, task_for

PLACES = 16
SHORT = {**SIZES, "max_position_embeddings": PLACES}
_BART = {
    **{
        f"{side}_{name}": 1
        for side in ("encoder", "decoder")
        for name in ("layers", "attention_heads")
    },
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "d_model": 32,
    "forced_eos_token_id": None,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "decoder_start_token_id": 2,
}
_GPT2 = {"vocab_size": 6000, "n_embd": 32, "n_layer": 1, "n_head": 2, "eos_token_id": 3}
_ROBERTA = {**SIZES, "max_position_embeddings": PLACES + 2, "pad_token_id": 1}

#: Families with learned positions for ``PLACES`` tokens.
LEARNED = {
    "bert": transformers.BertConfig(**SHORT),
    "roberta": transformers.RobertaConfig(**_ROBERTA),
    "gpt2": transformers.GPT2Config(**_GPT2, n_positions=PLACES),
    "opt": transformers.OPTConfig(**SHORT, ffn_dim=64, word_embed_proj_dim=32),
    "bart": transformers.BartConfig(
        **_BART, vocab_size=6000, max_position_embeddings=PLACES
    ),
}
LLAMA = transformers.LlamaConfig(**{**SHORT, "pad_token_id": None})


def tried(model, case="bert", **changes):
    """Try a saved model; return the error. If there is none, train a step and
    evaluate.
    """
    settings = {
        "model": str(model),
        "architecture": "",
        "max_length": 64,
        "train_limit": 120,
        **changes,
    }
    try:
        task = task_of(experiment_of(case, **settings).to_json())
        check_labels(task)
        built = build_model(task.experiment, task.data, 0)
        check_model(task, built)
    except FedrotError as error:
        return str(error)
    assert np.isfinite(training.train(built, task, np.arange(8), 0))
    assert all(
        np.isfinite([*training.evaluate(built, task, task.test, np.arange(8)).values()])
    )
    return ""


@pytest.mark.parametrize("family", LEARNED)
def test_texts_longer_than_the_table_of_positions_are_refused(family, tmp_path):
    model = save(tmp_path, LEARNED[family])
    assert "(--max-length)" in tried(model, max_length=PLACES + 1)
    assert tried(model, max_length=PLACES) == ""


def labelled(labels):
    return transformers.BertConfig(**SIZES, num_labels=labels)


CLASSIFIER, TAGGER = (
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
)
BARE = "AutoModel"
WORDS = [
    transformers.BertConfig(**{**SIZES, "vocab_size": words}) for words in (300, 5999)
]
T5 = transformers.T5Config(
    vocab_size=6000,
    d_model=32,
    num_layers=1,
    num_heads=2,
    d_ff=64,
    d_kv=16,
    eos_token_id=5999,
)
#: Configuration, class to save, case, and a part of the error; without one the model
#: runs.
MODELS = {
    "few embeddings": (WORDS[0], BARE, "bert", "a trial step on training rows failed"),
    "few embeddings for masks": (WORDS[1], BARE, "mlm bert", ""),
    "three labels": (labelled(3), CLASSIFIER, "bert", ""),
    "no head": (labelled(7), BARE, "bert", ""),
    "five tags": (labelled(5), TAGGER, "ner bert", ""),
    "encoder": (LEARNED["bert"], BARE, "clm gpt2", "is an encoder"),
    "gpt2 and masks": (LEARNED["gpt2"], BARE, "mlm bert", "AutoModelForMaskedLM"),
    "gpt2": (LEARNED["gpt2"], BARE, "clm gpt2", ""),
    "bart": (LEARNED["bart"], BARE, "clm gpt2", "it would be random"),
    "llama, positions are computed": (LLAMA, BARE, "clm gpt2", ""),
    "images": (
        transformers.ViTConfig(**VISION, image_size=16, patch_size=4),
        BARE,
        "image",
        "",
    ),
    "what no check foresees": (
        T5,
        BARE,
        "bert",
        "a trial step on training rows failed",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_for_tasks(name, tmp_path):
    config, auto, case, said = MODELS[name]
    found = tried(save(tmp_path, config, auto), case, max_length=PLACES)
    assert (said in found, bool(found)) == (True, bool(said)), found


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    model = save(tmp_path, LEARNED["bert"], tokenizer=False)
    assert "has no tokenizer" in tried(model, max_length=PLACES)


#: Kind, labels of training and of held-out rows, and a part of the error.
LABELS = {
    "one class": ("single", [1, 1], [1], "all rows have one label"),
    "one class of two": ("single", [1, 1], [0], "share no class"),
    "some": ("single", [0, 1], [2, 1], ""),
    "one score": ("regression", [0.5, 0.5], [0.5], "all rows have one label"),
    "other scores": ("regression", [0.5, 0.5], [1.5], ""),
    "several": ("multi", [1, 1], [1], ""),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels_that_teach_nothing_are_refused(name):
    kind, train, test, said = LABELS[name]
    splits = (Split(np.array(labels), {}, ()) for labels in (train, test))
    data = DataSet("a", kind, (), (), *splits)
    with pytest.raises(FedrotError, match=said) if said else nullcontext():
        check_labels(replace(task_for("bert"), data=data))
    check_labels(replace(task_for("mlm bert"), data=data))
