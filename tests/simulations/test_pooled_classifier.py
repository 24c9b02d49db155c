"""Sentence-transformers models are classified by their own pooling, as one model like
any other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional

import fedrot
from fedrot.errors import FedrotError
from fedrot.simulations.models import build_model, model_config
from fedrot.simulations.pooled_classifier import PooledForSequenceClassification
from fedrot.simulations.pretrained import source_of
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.training import Task, check_model, task_of
from fedrot.task_head.fit import fitted_task_head, with_task_head
from fedrot.task_head.names import task_head_of
from fedrot.task_head.sums import collect_classes
from tests.simulations.tasks.cases import SIZES, experiment_of, parts, save
from tests.simulations.tensors import equal

#: Encoders by ``model_type``.
ENCODERS = {
    "bert": transformers.BertConfig(**SIZES),
    "roberta": transformers.RobertaConfig(**SIZES),
    "albert": transformers.AlbertConfig(**SIZES, embedding_size=16),
    "llama": transformers.LlamaConfig(**SIZES),
}
MEAN = {"pooling_mode_mean_tokens": True}
CLS = {"pooling_mode_cls_token": True}
TRANSFORMER = ("sentence_transformers.models.Transformer", "")
POOLING = ("sentence_transformers.models.Pooling", "1_Pooling")
NORMALIZE = ("sentence_transformers.models.Normalize", "2_Normalize")


def pooled(
    folder: Path, pooling: Any = MEAN, config: Any = ENCODERS["bert"], **options: Any
) -> Path:
    """Save a sentence-transformers model; ``modules`` and ``auto`` are options."""
    auto = options.get("auto", "AutoModel")
    save(folder, config, auto, options.get("dtype", torch.float32))
    modules = options.get("modules", (TRANSFORMER, POOLING, NORMALIZE))
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": kind}
        for i, (kind, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def task_with(model: object, **changes: Any) -> Task:
    settings = {"model": str(model), "architecture": "", "test_limit": 20, **changes}
    return task_of(experiment_of("bert", **settings).to_json())


def built(task: Task, seed: int = 0) -> Any:
    return build_model(task.experiment, task.data, seed)


def features_of(model: Any, batch: Any) -> torch.Tensor:
    """Return what the classifier reads."""
    read = []
    handle = model.classifier.register_forward_pre_hook(
        lambda _, given: read.append(given[0])
    )
    with torch.no_grad(), handle:
        model.eval()(**batch)
    return read[0]


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_pooled_model_has_the_symmetry_of_its_family(kind, tmp_path):
    """Moved by random elements its outputs stay, and a head fitted from clients' sums
    goes into it.
    """
    task = task_with(pooled(tmp_path, config=ENCODERS[kind], dtype=torch.bfloat16))
    model = built(task)
    config = model_config(task.experiment, task.data)
    state = model.state_dict()
    assert {own.dtype for own in model.parameters()} == {torch.float32}
    assert type(model) is PooledForSequenceClassification
    assert {name.split(".")[0] for name in state} == {
        model.base_model_prefix,
        "classifier",
    }
    assert model.config.model_type == kind
    symmetry = fedrot.symmetry_of(config, state)
    assert {"attention", "ffn"} <= {group.part for group in symmetry.groups}
    assert fedrot.check_function(model, config, symmetry) < 1e-9
    check_model(task, model)
    # The seed draws the classifier alone.
    same, other = (parts(built(task, seed)) for seed in (0, 1))
    assert equal(same, state)
    assert [n for n in state if not torch.equal(other[n], state[n])] == [
        "classifier.weight"
    ]
    head = task_head_of(config, state)
    assert head == "classifier"
    batches = list(training.step_batches(task, model, np.arange(70), 70, 16, 0))
    sums = [collect_classes(model, own, head) for own in (batches[:3], batches[3:])]
    weight, bias = fitted_task_head(sums[0] + sums[1])
    before = training.evaluate(model, task, task.train, np.arange(70))
    model.load_state_dict(with_task_head(state, head, weight, bias))
    after = training.evaluate(model, task, task.train, np.arange(70))
    assert after["accuracy"] > before["accuracy"]


@pytest.mark.parametrize("version", ["as packaged", "saved again"])
def test_features_are_sentence_transformers_own(version, tmp_path):
    """Theirs are normalised. Version 6 writes another configuration than that of the
    package.
    """
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(source_of("minilm"), device="cpu")
    model = "minilm"
    if version == "saved again":
        theirs.save(str(tmp_path))
        model = str(tmp_path)
    task = task_with(model, max_length=200)
    rows = np.arange(12)
    features = features_of(built(task), task.test.batch(rows))
    texts = [task.data.test.inputs[row] for row in rows]
    expected = theirs.encode(texts, convert_to_tensor=True)
    torch.testing.assert_close(
        functional.normalize(features), expected, atol=1e-5, rtol=0
    )
    assert (features.norm(dim=1) - 1).abs().min() > 0.1


@pytest.mark.parametrize(
    "pooling", [MEAN, CLS, {"pooling_mode": "cls"}, {"pooling_mode": ["mean"]}, {}]
)
def test_the_pooling_is_that_of_the_folder(pooling, tmp_path):
    task = task_with(pooled(tmp_path, pooling))
    model = built(task)
    batch = task.test.batch(np.arange(9))
    tokens = (
        transformers.AutoModel.from_pretrained(tmp_path)
        .eval()(**batch)
        .last_hidden_state
    )
    expected = tokens[:, 0]
    if "cls" not in str(pooling):
        lengths = batch["attention_mask"].sum(1)
        rows = zip(tokens, lengths, strict=True)
        expected = torch.stack([row[:length].mean(0) for row, length in rows])
        assert len(set(lengths.tolist())) > 3
    torch.testing.assert_close(
        features_of(model, batch), expected, atol=1e-5, rtol=1e-4
    )
    # Without a mask every token is one of the text.
    one = {"input_ids": batch["input_ids"][:1, : int(batch["attention_mask"][0].sum())]}
    torch.testing.assert_close(
        features_of(model, one)[0], expected[0], atol=1e-5, rtol=1e-4
    )
    labels = torch.arange(9) % 7
    out = model(**batch, labels=labels)
    torch.testing.assert_close(out.loss, functional.cross_entropy(out.logits, labels))


def test_other_tasks_and_saved_classifiers_are_as_ever(tmp_path):
    task = task_of(experiment_of("mlm bert", model="minilm", architecture="").to_json())
    assert type(built(task)).__name__ == "BertForMaskedLM"
    config = transformers.BertConfig(**SIZES, num_labels=7)
    folder = pooled(tmp_path, config=config, auto="AutoModelForSequenceClassification")
    assert type(built(task_with(folder))).__name__ == "BertForSequenceClassification"


DENSE = ("sentence_transformers.models.WordWeights", "2_Weights")
T5 = transformers.T5Config(
    vocab_size=6000, d_model=32, num_layers=1, num_heads=2, d_ff=64, d_kv=16
)
#: Pooling, options of ``pooled``, and a part of the error.
REFUSED = {
    "max": ({"pooling_mode_max_tokens": True}, {}, "pooling pooling_mode_max_tokens;"),
    "max, version 6": ({"pooling_mode": "max"}, {}, "pooling max;"),
    "both, version 6": ({"pooling_mode": ["cls", "max"]}, {}, "pooling cls and max;"),
    "a number": ({"pooling_mode": 3}, {}, "pooling 3;"),
    "a module between": (
        MEAN,
        {"modules": (TRANSFORMER, DENSE, POOLING)},
        "Transformer, WordWeights",
    ),
    "no transformer": (
        MEAN,
        {"modules": (("models.StaticEmbedding", ""),)},
        "StaticEmbedding",
    ),
    "no pooling": (
        MEAN,
        {"modules": (TRANSFORMER, (POOLING[0], "2"))},
        "pooled by mean or cls",
    ),
    "a decoder": (MEAN, {"config": T5}, "is a t5"),
    "no object": ([1], {}, "it holds a list"),
    **{
        text: (MEAN, {"text": text}, "cannot be loaded")
        for text in ("[3]", '[{"type": 3, "path": ""}]')
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_poolings_are_refused_by_name(name, tmp_path):
    pooling, options, said = REFUSED[name]
    folder = pooled(tmp_path, pooling, **options)
    if "text" in options:
        (folder / "modules.json").write_text(options["text"])
    with pytest.raises(FedrotError, match=said) as found:
        built(task_with(folder))
    assert str(tmp_path) in str(found.value)
