"""Models: small ones, saved ones of every precision, adapters, packages, and files that
are refused.
"""

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fedrot.errors import FedrotError
from fedrot.lora import adapter_tensors
from fedrot.simulations import models
from fedrot.simulations.data.tokenizers import bundled_tokenizer
from fedrot.simulations.models import build_model, settings_of
from fedrot.simulations.pretrained import PACKAGED, loading, pad_id_of, source_of
from fedrot.simulations.tasks.task_registry import TASKS
from fedrot.strategies import PooledClassifier
from fedrot.strategies.wire.arrays import from_arrays, to_arrays
from fedrot.strategies.wire.loaded_model import tensors_of
from tests.simulations.tasks.cases import (
    SIZES,
    experiment_of,
    model_for,
    parts,
    save,
    task_for,
)
from tests.simulations.tensors import equal

TOKENS = bundled_tokenizer().get_vocab_size()
#: What a small model has beside common sizes, by architecture.
EXPECTED = {
    "bert": dict.fromkeys(
        ("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.25
    ),
    "distilbert": dict.fromkeys(
        ("dropout", "attention_dropout", "seq_classif_dropout"), 0.25
    ),
    "gpt2": {
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.25),
        "tie_word_embeddings": False,
        "bos_token_id": 2,
        "eos_token_id": 3,
    },
    "llama": {
        "intermediate_size": 128,
        "attention_dropout": 0.25,
        "tie_word_embeddings": False,
    },
    "vit": {
        "patch_size": 2,
        "image_size": 8,
        "num_channels": 1,
        "intermediate_size": 192,
    },
}


@pytest.mark.parametrize(
    "architecture",
    {name: 0 for traits in TASKS.values() for name in traits.architectures},
)
def test_a_small_model_has_the_sizes_that_were_asked_for(architecture):
    case = "image" if architecture == "vit" else architecture
    settings = settings_of(
        experiment_of(case, depth=3, width=48, heads=6, max_length=24, dropout=0.25),
        SimpleNamespace(shape=(8, 8, 1)),
    )
    expected = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 6}
    if architecture != "vit":
        expected |= {
            "vocab_size": TOKENS,
            "max_position_embeddings": 24,
            "pad_token_id": 0,
        }
    expected |= {"model_type": architecture, **EXPECTED[architecture]}
    assert {name: getattr(settings, name) for name in expected} == expected
    task = task_for(case)
    first, same, other = (parts(model_for(task, seed)) for seed in (5, 5, 6))
    assert equal(first, same)
    assert not equal(first, other)


def test_rows_are_padded_with_the_padding_or_the_end_of_texts():
    for pad, end, expected in (
        (0, 5, 0),
        (None, 5, 5),
        (None, [7, 8], 7),
        (None, None, 0),
    ):
        settings = SimpleNamespace(pad_token_id=pad, eos_token_id=end)
        assert pad_id_of(settings) == expected


def test_patches_divide_an_image_into_about_as_many_as_they_have_pixels():
    for side, patch in {1: 1, 7: 1, 9: 3, 12: 3, 28: 4, 32: 4, 64: 8}.items():
        settings = settings_of(
            experiment_of("image"), SimpleNamespace(shape=(side, side, 3))
        )
        assert (settings.patch_size, settings.num_channels) == (patch, 3)


LLAMA = transformers.LlamaConfig(**SIZES, num_key_value_heads=1)
BERT = transformers.BertConfig(**SIZES)
LORA = {"lora": {"r": [2, 3], "target_modules": "all-linear", "lora_alpha": 6}}
#: Configuration, class, case and changes of models that are saved in 16 bits.
SAVED = {
    "bert": (BERT, "AutoModel", "bert", {}),
    "bert, adapter": (BERT, "AutoModel", "bert", LORA),
    "bert of masks": (BERT, "AutoModelForMaskedLM", "mlm bert", {}),
    "bert of tags, adapter": (BERT, "AutoModel", "ner bert", LORA),
    "llama": (LLAMA, "AutoModelForCausalLM", "clm llama", {}),
    "llama, adapter": (LLAMA, "AutoModelForCausalLM", "clm llama", LORA),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.bfloat16) for name in SAVED), ("bert", torch.float64)],
)
def test_training_does_not_depend_on_the_precision_of_a_file(name, dtype, tmp_path):
    """In float32 it has the values of the file, and goes to the server and back."""
    config, auto, case, changes = SAVED[name]
    folder = save(tmp_path, config, auto, dtype)
    saved = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {dtype}
    model = model_for(task_for(case, model=str(folder), architecture="", **changes))
    assert {own.dtype for own in model.parameters()} == {torch.float32}
    fresh = parts(model)
    tensors = tensors_of(model)
    received = {
        name: t + 1 for name, t in from_arrays(to_arrays(tensors, None)).items()
    }
    models.load_tensors(model, received)
    assert equal(tensors_of(model), received)
    # What was taken is a copy.
    assert not any(
        torch.equal(own, received[key]) for key, own in tensors.items() if len(own)
    )
    # The values are those of the file.
    stored = {
        key: saved[name].float()
        for key in fresh
        for name in saved
        if key.endswith(name)
    }
    assert stored
    assert equal(fresh, stored)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return save(tmp_path_factory.mktemp("pretrained"), BERT, "AutoModelForMaskedLM")


def built(
    folder,
    case="bert",
    rank=None,
    seed=3,
    **changes,
):
    task = task_for(case, model=str(folder), architecture="", **changes)
    return build_model(task.experiment, task.data, seed, rank)


@pytest.mark.parametrize("prefix", ["", "backbone."])
def test_a_body_that_would_be_random_is_refused(prefix, pretrained, tmp_path):
    tensors = load_file(pretrained / "model.safetensors")
    del tensors["bert.encoder.layer.0.attention.self.query.weight"]
    tensors = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    for file in pretrained.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        FedrotError, match=rf"'{tmp_path}' has no tensor 'bert\..*it would be random"
    ):
        built(tmp_path)


def test_quantised_weights_are_refused(pretrained, monkeypatch):
    real = transformers.AutoModelForSequenceClassification.from_pretrained

    def quantised(*name, **options):
        model, found = real(*name, **options)
        layer = model.bert.encoder.layer[0].output.dense
        layer.weight = torch.nn.Parameter(
            layer.weight.to(torch.uint8), requires_grad=False
        )
        return model, found

    monkeypatch.setattr(
        transformers.AutoModelForSequenceClassification, "from_pretrained", quantised
    )
    with pytest.raises(FedrotError, match="is quantised"):
        built(pretrained)


def test_a_new_task_head_is_said(pretrained, monkeypatch):
    said = []
    monkeypatch.setattr(logging.getLogger("flwr"), "info", said.append)
    for case in ("bert", "mlm bert"):
        built(pretrained, case)
    (message,) = said
    assert f"'{pretrained}'" in message
    assert "classifier.bias, classifier.weight" in message


@pytest.mark.parametrize("layers", ["all", "1,2", 1])
def test_a_task_head_reads_the_layers_that_were_asked_for(layers, tmp_path):
    wide = transformers.BertConfig(**{**SIZES, "num_hidden_layers": 3})
    folder = save(tmp_path / "encoder", wide, "AutoModelForMaskedLM")
    model = built(folder, layers=layers)
    assert type(model) is PooledClassifier
    expected = {"all": [-3, -2, -1], "1,2": [-3, -2], 1: [-3]}[layers]
    assert (model.config.pooling, model.config.layers) == ("mean", expected)
    model.save_pretrained(tmp_path / "classifier")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(
        tmp_path / "classifier"
    )
    again = built(tmp_path / "classifier")
    assert again.config.layers == expected
    assert equal(parts(again), parts(model))
    with pytest.raises(FedrotError, match="task head"):
        built(tmp_path / "classifier", layers=layers)


def test_an_adapter_is_as_it_was_asked_for_on_one_base(pretrained):
    """The task head, which the pretrained model lacks, is drawn alike for all seeds."""
    switches = {"use_rslora": True, "use_dora": True, "lora_dropout": 0.25}
    lora = {
        "r": [2, 4],
        "target_modules": ["query", "value"],
        "lora_alpha": 6,
        **switches,
    }
    found = built(pretrained, lora=lora).peft_config["default"]
    wanted = {
        **lora,
        "r": 4,
        "target_modules": {"query", "value"},
        "task_type": "SEQ_CLS",
    }
    assert {name: getattr(found, name) for name in wanted} == wanted
    plain = {"lora": {"r": 3, "target_modules": "all-linear"}}
    model = built(pretrained, **plain)
    first = parts(model)
    same, other = (parts(built(pretrained, seed=seed, **plain)) for seed in (3, 4))
    factors = {name for name in first if "lora_A" in name}
    adapted = {name.split(".lora_A")[0].split(".")[-1] for name in factors}
    assert adapted == {"query", "key", "value", "dense"}
    drawn = {name for name in first if not torch.equal(first[name], other[name])}
    assert drawn == factors
    assert equal(first, same)
    wide = built(pretrained, rank=5, **plain).state_dict()
    assert {len(wide[name]) for name in drawn} == {5}
    assert tensors_of(model).keys() == adapter_tensors(model).keys()


def test_an_adapter_that_cannot_be_is_refused(pretrained, monkeypatch):
    refused = {
        "target_modules": "cannot adapt this BertFor",
        "targets": "unexpected keyword",
    }
    for name, said in refused.items():
        with pytest.raises(FedrotError, match=said):
            built(pretrained, lora={"r": 2, name: ["c_attn"]})
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(FedrotError, match="lora needs PEFT"):
        built(pretrained, lora={"r": 2})


def test_a_packaged_model_is_the_folder_in_its_package(tmp_path, monkeypatch):
    files = {file.name for file in Path(source_of("minilm")).iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
    assert source_of("google/bert") == "google/bert"
    monkeypatch.setitem(PACKAGED, "minilm", ("no_such_package", ""))
    with pytest.raises(FedrotError, match="extra 'minilm'"):
        source_of("minilm")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "minilm").mkdir()
    assert source_of("minilm") == "minilm"


@pytest.mark.parametrize(
    ("model", "error", "said"),
    [
        ("m", KeyError("x"), "'m' cannot be loaded: KeyError: 'x'. There is no folder"),
        (
            "minilm",
            OSError("no\n  file"),
            "'minilm' cannot be loaded: OSError: no file. Check that its",
        ),
        (
            "m",
            RuntimeError("set `ignore_mismatched_sizes` to True"),
            "as many classes as the data",
        ),
        ("m", ValueError("set `trust_remote_code=True`"), "never runs a model's code"),
    ],
)
def test_errors_of_loading_are_one_sentence(model, error, said):
    with pytest.raises(FedrotError, match=said), loading(model):
        raise error
