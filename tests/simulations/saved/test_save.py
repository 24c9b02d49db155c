"""``fedrot simulate --save``: the model of the folder is the one that was measured."""

import json
from math import log
from pathlib import Path

import pytest
from transformers import LlamaConfig, pipeline

from fedrot.simulations.experiment import Experiment
from fedrot.simulations.tasks.training import task_of
from tests.simulations.commands import SMALL, run, settings, values
from tests.simulations.tasks.cases import SIZES
from tests.strategies.test_pooled_classifier import LAST, folder_of

TINY = {**SMALL, "width": 16, "clients": 2, "seeds": "3,5", "rounds": 1, "lr": 0.01}
LORA = 'lora={r = 2, target_modules = ["query"]}'
#: Options, and the class of the saved model; a decoder has left no segments.
KINDS = {
    "bert": ({}, "BertForSequenceClassification"),
    "distilbert": (
        {"architecture": "distilbert"},
        "DistilBertForSequenceClassification",
    ),
    "pooled": ({"model": "pooled"}, "PooledClassifier"),
    "adapter": (
        {"model": "minilm", "lora": LORA.partition("=")[2]},
        "PooledClassifier",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_saved_model_is_the_one_that_was_measured(kind, tmp_path, monkeypatch):
    """With the first seed; by a pipeline on the texts of the test rows."""
    monkeypatch.chdir(tmp_path)
    changes, name = KINDS[kind]
    given = {**TINY, **changes}
    if "model" in changes:
        folder_of(Path("pooled"), LAST, LlamaConfig(**SIZES))
        for size in ("depth", "width", "heads"):
            del given[size]
    line = ["simulate", "--out", "run", "--workers", 1, *settings(given)]
    line += ["--set", "strategies=fedavg,head_only"]
    run(*line)
    printed = run(*line, "--save", "served")
    saved = json.loads(Path("served/config.json").read_text())
    assert saved["architectures"] == [name]
    experiment = Experiment.from_flat({**given, "strategies": "fedavg,head_only"})
    data = task_of(experiment.to_json()).data
    ask = pipeline("text-classification", model="served", top_k=None)
    answers = ask([*data.test.inputs], truncation=True)
    losses = []
    for answer, label in zip(answers, data.test.labels, strict=True):
        scores = {entry["label"]: entry["score"] for entry in answer}
        losses.append(-log(scores[str(data.label_names[label])]))
    (strategy,) = [name for name in ("fedavg", "head_only") if f"3 · {name}" in printed]
    priors = saved.get("fedrot", {}).get("priors", [])
    assert len(priors) == (len(data.label_names) if strategy == "head_only" else 0)
    measured = values(Path("run"))[strategy, 3, 1, "loss"]
    assert sum(losses) / len(losses) == pytest.approx(measured, rel=1e-4)
    run(*line, "--save", "served", code=2, says="Choose another --save")


def test_one_model_is_saved_and_not_that_of_another_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("two.toml").write_text('[[experiment]]\nname = "a"\n[[experiment]]\nname="b"')
    line = ["simulate", "two.toml", "--out", "run", "--save", "served"]
    run(*line, code=2, says="has 2 experiments")
    for out, save in (("run", "run"), ("run", "run/cells/model"), ("run/a", "run")):
        line = ["simulate", "--out", out, "--save", save]
        run(*line, code=2, says="one folder, or one is inside")
    assert not Path("run").exists()
