"""What sums tell of single rows: the attack of docs/explanation/privacy.md, and rows
that are rebuilt.
"""

import re
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from fedrot.strategies import LabelledRows, Privacy
from fedrot.task_head.outputs import SINGLE
from fedrot.task_head.sums import collect_classes, from_triangle
from tests.families import model_of
from tests.fedrot.oracles import gap
from tests.fedrot.task_head.classifiers import LAST, batch_for, rows_of

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "privacy.md"
WIDTH = 384


@pytest.fixture(scope="module")
def attack():
    """Return what the page's code defines."""
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    torch.manual_seed(0)
    scope = {}
    exec(block, scope)
    return scope


def area(scores, others):
    """Return how often a row of the first has a lower score than one of the others."""
    return float((scores < others.unsqueeze(1)).double().mean())


def test_the_pages_attack_knows_150_rows_and_the_row_of_the_next_round(attack):
    assert attack["area"] > 0.99
    scores = attack["scores"]
    # Of rows that the client has not, it knows none.
    assert 0.4 < area(scores[150:250], scores[250:]) < 0.6
    assert gap(attack["row"], attack["features"][150]) < 1e-5


def test_two_rows_of_a_class_among_single_rows_are_rebuilt(attack):
    torch.manual_seed(0)
    rows = torch.randn(7, WIDTH).double()
    rows[:2, 0] = torch.arange(2)
    sent = attack["sent_by_client"](rows, torch.tensor([0, 0, 1, 2, 3, 4, 5]))
    assert gap(sent["sums"][1:], rows[2:]) < 1e-6
    # 2 G - s s^T of the two is twice the scatter: single rows have none.
    square = 2 * from_triangle(sent["scatter"].double(), WIDTH)
    values, vectors = torch.linalg.eigh(square)
    difference = values[-1].sqrt() * vectors[:, -1]
    found = (sent["sums"][0] + torch.stack([difference, -difference])) / 2
    assert gap(found[found[:, 0].argsort()], rows[:2]) < 1e-5


def packed(model, batch, privacy):
    """Return what a client with this setting sends."""
    kept = privacy.kept(LabelledRows(lambda: model, lambda: [batch], list), SINGLE)
    return collect_classes(model, kept.training(), LAST["bert"]).packed()


def test_a_single_row_is_sent_as_its_features_and_not_with_the_minimum():
    model = model_of("bert")
    batch = batch_for("bert", 24)
    batch["labels"] = torch.tensor([2, *[0, 1] * 11, 0])
    features, *_ = rows_of(model, [batch], "bert")
    bare = packed(model, batch, Privacy(1, 1))
    assert gap(bare["sums"][2], torch.from_numpy(features[0])) < 1e-6
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][0] = batch["input_ids"][1]
    assert gap(packed(model, other, Privacy(1, 1))["sums"], bare["sums"]) > 1e-3
    sent, unlike = (packed(model, rows, Privacy()) for rows in (batch, other))
    assert sent["counts"].tolist() == [12, 11, 0]
    for name, tensor in sent.items():
        assert torch.equal(tensor, unlike[name])


def body_that_looks_for(word):
    """Return a BERT whose features are 0 for all texts without a word.

    Units come in pairs with a sum of 0, so that no norm mixes them: one tells what a
    text says, one is a mark of the word, one is constant, one is for the features.
    """
    config = BertConfig(
        vocab_size=50,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=1,
    )
    model = BertForSequenceClassification(config).eval().requires_grad_(False)
    for name, tensor in model.named_parameters():
        tensor.fill_(float("LayerNorm.weight" in name))
    words = model.bert.embeddings.word_embeddings.weight
    words[:, 0] = torch.randn(50)
    words[word, 2] = 5
    words[:, 4] = 3
    words[:, 1::2] = -words[:, ::2]
    (layer,) = model.bert.encoder.layer
    # Attention without queries is the mean of a text's tokens.
    layer.attention.self.value.weight.fill_diagonal_(1)
    layer.attention.output.dense.weight.fill_diagonal_(1)
    # Far below 0 without the mark, the neuron is 0.
    layer.intermediate.dense.weight[0, :3:2] = torch.tensor([1.0, 140])
    layer.intermediate.dense.bias.fill_(-15)
    layer.output.dense.weight[6:, 0] = torch.tensor([1.0, -1])
    model.bert.pooler.dense.weight[:, 6] = torch.randn(8)
    return model


def test_a_body_can_be_made_that_sums_one_row_of_many():
    torch.manual_seed(0)
    model = body_that_looks_for(7)
    texts = torch.randint(10, 50, (40, 8))
    texts[23, 5] = 7
    batch = {"input_ids": texts, "labels": torch.arange(40) % 2}
    features, *_ = rows_of(model, [batch], "bert")
    sent = packed(model, batch, Privacy())
    assert sent["counts"].tolist() == [20, 20]
    assert features[23].max() > 0.1
    assert gap(sent["sums"][1], torch.from_numpy(features[23])) < 1e-6
    texts[23, 6] = 11
    assert gap(packed(model, batch, Privacy())["sums"][1], sent["sums"][1]) > 1e-3
