"""``fedrot merge --data``: models of known accuracy, and heads that are fitted."""

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

from fedrot.strategies.pooled_classifier import PooledClassifier, PooledClassifierConfig
from tests.simulations.commands import run
from tests.simulations.data.files import write
from tests.simulations.saved.folders import (
    WEIGHTS,
    change,
    configure,
    model_of,
    saved,
    scrambled,
)
from tests.simulations.saved.folders import tokenizer as tokenized


@pytest.fixture
def own(tmp_path):
    """Texts that name their class by words of its own; one in five is held out."""
    file = tmp_path / "own.csv"
    rows = ["text,mood"]
    for name, word, count in (("a", 0, 100), ("b", 3, 60), ("c", 6, 40)):
        rows += [f"w{word} w{word + 1} w{20 + n % 9},{name}" for n in range(count)]
    file.write_text("\n".join(rows))
    return file


def model(folder, *biases, **settings):
    """A classifier that answers every text with the class of the largest bias."""
    tokenized(saved(model_of("bert-classifier"), folder))
    head = {
        "classifier.weight": torch.zeros(3, 32),
        "classifier.bias": torch.tensor(biases),
    }
    change(folder, lambda tensors: {**tensors, **head})
    configure(folder, **settings)
    return folder


def judged(*line):
    return run("merge", *line).removeprefix("The merged model is ")


def test_a_worse_an_equal_and_a_better_mean_are_said_first(own, tmp_path):
    """A fitted head is written if it is better on rows to which it is not fitted."""
    a = model(tmp_path / "a", 1, 0, 0)
    b = model(tmp_path / "b", 0, 1.5, 0)
    line = (a, b, "--data", own, "--label-column", "mood")
    said = judged(*line, "--out", tmp_path / "plain")
    first = (
        f"worse than the best single one: accuracy 0.300 against 0.500 ('{a}') on 40 "
        "held-out rows."
    )
    keep = f"{first} Keep '{a}', or try other --parts. --fit-head fits the task head"
    assert said.startswith(keep), said
    assert f"The outputs of '{a}' are, by position, a, b, c:" in said
    assert "--data" in run("merge", a, b)
    assert " 0.300 0.154 0.391 1.103 1.419 merged 0.300 " in said
    assert (tmp_path / "plain" / WEIGHTS).exists()
    assert judged(*line, "--weights", "2,1").startswith(
        "as good as the best single one"
    )
    out = tmp_path / "out"
    said = judged(*line, "--fit-head", "--out", out)
    better = "better than the best single one: accuracy 1.000 against 0.500"
    assert said.startswith(better), said
    assert "on 32 other rows" in said
    # Nothing is advised that was done.
    assert "Keep" not in said
    assert "--fit-head" not in said
    before = load_file(a / WEIGHTS)
    after = load_file(out / WEIGHTS)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"classifier.weight", "classifier.bias"}
    assert "The task head is its own at temperature 1.00" in judged(
        out, out, *line[2:], "--fit-head"
    )


def test_outputs_are_those_of_the_data_in_any_order(own, tmp_path):
    """Also a fitted head is written in the order of the model's outputs, not of the
    data's classes.
    """
    labels = {"id2label": {"0": "C", "1": "a", "2": "b"}}
    a = model(tmp_path / "a", 0, 1, 0, **labels)
    b = model(tmp_path / "b", 1.5, 0, 0, **labels)
    line = (a, b, "--data", own, "--label-column", "mood")
    said = judged(*line)
    assert "accuracy 0.200 against 0.500" in said
    assert "by position" not in said
    judged(*line, "--fit-head", "--out", tmp_path / "out")
    found = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "out")
    words = transformers.AutoTokenizer.from_pretrained(a)(
        "w0 w1 w25", return_tensors="pt"
    )
    with torch.no_grad():
        assert int(found(words["input_ids"]).logits.argmax()) == 1
    for folder in (a, b):
        configure(folder, id2label={"0": "x"})
    said = run("merge", *line, code=2, says="the classes a, b, c; the outputs of")
    assert "x, a, b" in said


@pytest.mark.parametrize("name", ["gpt2", "bert-mlm-untied", "t5-gated"])
def test_other_tasks(name, own, tmp_path):
    first = model_of(name)
    a = saved(first, tmp_path / "a")
    b = saved(scrambled(first), tmp_path / "b")
    tokenized(a, w37="[MASK]")
    line = (a, b, "--data", own)
    if name != "t5-gated":
        said = judged(*line)
        assert said.startswith("as good as the best single one: ")
        assert (f"Keep '{a}'" in said, "--fit-head" in said) == (True, False)
        assert "perplexity" in judged(*line, "--parts", "none")
    words = "is a T5For" if name == "t5-gated" else "--fit-head is for classifiers"
    run("merge", *line, "--fit-head", code=2, says=words)


def test_tags_and_images(tmp_path):
    """The tag O is the last output; a fitted head of tags counts every word as a
    row.
    """
    pictures = tmp_path / "pictures"
    words = [["w1", "w2", f"w{n}"] for n in range(9, 35)]
    marks = [["B-X", "I-X", "O"]] * len(words)
    tags = write(tmp_path / "tags.jsonl", tokens=words, ner_tags=marks)
    config = model_of("bert-classifier").config
    config.update({"id2label": {0: "B-X", 1: "I-X", 2: "B-Y", 3: "O"}})
    for place in "ab":
        torch.manual_seed(0)
        tagger = transformers.BertForTokenClassification(config)
        torch.nn.init.zeros_(tagger.classifier.weight)
        tagger.classifier.bias.data = torch.tensor([0.0, 0, 2, 1])
        tokenized(saved(tagger, tmp_path / place))
    said = judged(tmp_path / "a", tmp_path / "b", "--data", tags, "--fit-head")
    assert said.startswith("better than the best single one: f1 1.000 against 0.000"), (
        said
    )
    for name in ("x", "y", "z"):
        (pictures / name).mkdir(parents=True)
        for n in range(10):
            Image.new("RGB", (16, 16), 9 * n).save(pictures / name / f"{n}.png")
    a = saved(model_of("vit"), tmp_path / "vit")
    said = judged(a, a, "--data", pictures)
    assert said.startswith("as good as the best single one: accuracy 0.333"), said


def test_long_texts_are_cut_for_a_pooled_classifier(own, tmp_path):
    text = "w1 " * 99
    own.write_text("\n".join(["text,mood", *(f"{text},{name}" for name in "abc" * 9)]))
    inner = model_of("bert-classifier").config
    assert inner.max_position_embeddings < 99
    classifier = PooledClassifier(PooledClassifierConfig(inner, num_labels=3))
    tokenized(saved(classifier, tmp_path))
    run("merge", tmp_path, tmp_path, "--data", own, "--label-column", "mood")


def test_several_labels_scores_and_weights_without_a_bias(tmp_path):
    """A decoder's head has no bias; booleans are several labels, numbers are scores."""
    fifth, seventh = np.arange(100) % 5, np.arange(100) % 7
    texts = [f"w{n % 5} w{10 + n % 7} w{n % 3}" for n in range(100)]
    many = write(
        tmp_path / "many.csv", text=texts, x=fifth < 2, y=fifth > 0, z=seventh < 3
    )
    scores = write(tmp_path / "scores.csv", text=texts, label=fifth + 0.5)
    several = {
        "id2label": {0: "z", 1: "y", 2: "x"},
        "problem_type": "multi_label_classification",
    }
    for data, changes in ((many, several), (scores, {"id2label": {0: "score"}})):
        for place in ("a", "b"):
            config = model_of("gpt2-classifier").config
            config.update(changes)
            torch.manual_seed(0)
            saved(transformers.GPT2ForSequenceClassification(config), tmp_path / place)
            tokenized(tmp_path / place)
        said = judged(tmp_path / "a", tmp_path / "b", "--data", data, "--fit-head")
        assert said.startswith("better than the best single one:")
        assert "The task head is a fitted one" in said
