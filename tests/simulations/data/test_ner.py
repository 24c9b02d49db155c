"""Named-entity recognition: tags, their places among word pieces, and the F1 of whole entities."""

from __future__ import annotations

import copy
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.data import sources
from fedrot.simulations.data.encoding import IGNORED, bundled_tokenizer, encode_tags, first_pieces
from fedrot.simulations.data.sources import DataError, Source
from fedrot.simulations.data.texts import TagSplit, load_tag_data
from fedrot.simulations.models.build import build_model
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.scores import entity_scores
from fedrot.simulations.tasks.task import Task, task_of

TAGS = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
NUMBER = {tag: number for number, tag in enumerate(TAGS)}

SENTENCES = (
    ("Anna Smith lives in Paris", "B-PER I-PER O O B-LOC", "news"),
    ("the weather was nice", "O O O O", "mail"),
    ("New York is not London", "B-LOC I-LOC O O B-LOC", "mail"),
    ("Bob laughed", "B-PER O", "news"),
)


def write(folder: Path, name: str = "mine", copies: int = 6, **columns: object) -> None:
    """Training rows are ``copies`` of the sentences, held-out rows one."""
    rows = [sentence for _ in range(copies + 1) for sentence in SENTENCES]
    table: dict[str, object] = {
        "tokens": [text.split() for text, _, _ in rows],
        "ner_tags": [tags.split() for _, tags, _ in rows],
        "split": ["train"] * (4 * copies) + ["test"] * 4,
        "domain": [domain for _, _, domain in rows],
    }
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({**table, **columns}), folder / f"{name}.parquet")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    folder = tmp_path_factory.mktemp("tagged")
    write(folder / "ner")
    config = SimulationConfig(
        task="ner", data="mine", data_dir=folder, partition="column:domain",
        clients=2, layers=1, width=32, heads=2, max_length=16, dropout=0, batch_size=8, lr=5e-3,
    )  # fmt: skip
    return task_of(config.to_json())


def numbers(tags: str) -> np.ndarray:
    return np.array([NUMBER[tag] for tag in tags.split()], dtype=np.int64)


def tagged(*rows: tuple[str, str]) -> TagSplit:
    words = [tuple(text.split()) for text, _ in rows]
    return TagSplit(np.zeros((len(rows), 2)), {}, words, [numbers(tags) for _, tags in rows])


def test_tags_become_numbers_and_rows_are_labelled_by_what_occurs(task: Task) -> None:
    data = task.data
    assert data.tags == TAGS
    assert (data.kind, data.label_names) == ("multi", ("LOC", "PER"))
    assert data.metrics == ("f1", "precision", "recall")
    assert data.train.labels[:4].tolist() == [[1, 1], [0, 0], [1, 0], [0, 1]]
    assert data.train.tags[0].tolist() == [3, 4, 0, 0, 1]
    assert [len(rows) for rows in task.clients(seed=0)] == [12, 12]
    domains = task.data.train.columns["domain"]
    assert [{domains[row] for row in rows} for rows in task.clients(0)] == [{"mail"}, {"news"}]


def test_ner_can_also_be_divided_by_entity_type(task: Task) -> None:
    config = task.config.model_copy(update={"partition": "pathological:1", "clients": 3})
    parts = task_of(config.to_json()).clients(seed=0)
    kinds = [{tuple(row) for row in task.data.train.labels[part]} for part in parts]
    # By the first type that occurs; rows without an entity are a class of their own.
    assert sorted(map(sorted, kinds)) == [[(0, 0)], [(0, 1)], [(1, 0), (1, 1)]]


def test_only_the_first_piece_of_a_word_bears_its_tag() -> None:
    tokenizer = bundled_tokenizer()
    # A word of several pieces, one that the tokenizer cuts at its hyphen, and one without a piece.
    split = tagged(("zzyzx well-known \u200d Rome", "B-PER O I-PER B-LOC"))
    encoded = encode_tags(split, tokenizer, 32, 0)
    pieces = [tokenizer.id_to_token(i) for i in encoded.ids[0]]
    assert (pieces[0], pieces[-1]) == ("[CLS]", "[SEP]")
    assert len(pieces) > 7
    at = [i for i, tag in enumerate(encoded.tags[0]) if tag != IGNORED]
    assert encoded.tags[0][at].tolist() == [NUMBER["B-PER"], NUMBER["O"], NUMBER["B-LOC"]]
    assert encoded.places[0].tolist() == [0, 1, 3]
    assert at[0] == 1
    assert pieces[at[1]].startswith("w")
    assert not any(pieces[i].startswith("##") for i in at)


def test_words_beyond_the_cut_have_no_place() -> None:
    encoded = encode_tags(tagged(("a b c d e", "O O O B-LOC I-LOC")), bundled_tokenizer(), 5, 0)
    assert encoded.places[0].tolist() == [0, 1, 2]
    assert encoded.words[0].tolist() == [0, 0, 0, 1, 2]
    assert encoded.tags[0].tolist() == [IGNORED, 0, 0, 0, IGNORED]


def test_targets_are_padded_with_what_is_ignored(task: Task) -> None:
    batch = task.objective.batch(task.test, np.array([1, 3]), np.random.default_rng(0))
    assert batch["labels"].shape == batch["input_ids"].shape
    assert (batch["labels"][batch["attention_mask"] == 0] == IGNORED).all()
    assert (batch["labels"] != IGNORED).sum(dim=1).tolist() == [4, 2]


def test_a_word_begins_where_its_number_first_comes() -> None:
    assert first_pieces([None, 0, 0, 1, 3, 3, None]) == {1: 0, 3: 1, 4: 3}


def test_byte_level_words_are_encoded_with_a_space_before() -> None:
    vocabulary = {"\u0120a": 0, "a": 1, "b": 2, "\u0120b": 3}
    tokenizer = Tokenizer(
        models.BPE(vocab={**vocabulary, "\u0120": 4}, merges=[("\u0120", "a"), ("\u0120", "b")])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoded = encode_tags(tagged(("a b", "O B-LOC")), tokenizer, 8, 0)
    assert encoded.ids[0].tolist() == [0, 3]
    assert tokenizer.encode("a").ids == [1], "the tokenizer that was given stays as it is"


#: Truth, prediction, and right, predicted and true entities, counted by hand.
EXAMPLES = {
    "all right": (["B-PER I-PER O B-LOC"], ["B-PER I-PER O B-LOC"], (2, 2, 2)),
    "the end is wrong": (["B-PER I-PER O B-LOC"], ["B-PER O O B-LOC"], (1, 2, 2)),
    "the type is wrong": (["B-PER I-PER O"], ["B-LOC I-LOC O"], (0, 1, 1)),
    "two are taken for one": (["B-PER B-PER O"], ["B-PER I-PER O"], (0, 1, 2)),
    "one is taken for two": (["B-LOC I-LOC O"], ["B-LOC B-LOC O"], (0, 2, 1)),
    "it begins with I": (["O B-PER I-PER"], ["O I-PER I-PER"], (1, 1, 1)),
    "the type changes inside": (["B-PER B-LOC"], ["B-PER I-LOC"], (2, 2, 2)),
    "rows count together": (
        ["B-PER O B-LOC", "O O", "B-LOC I-LOC"],
        ["B-PER O O", "B-PER O", "B-LOC I-LOC"],
        (2, 3, 3),
    ),
    "nothing is found": (["B-PER O"], ["O O"], (0, 0, 1)),
    "there is nothing": (["O O"], ["O O"], (0, 0, 0)),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_entities_are_scored_as_counted_by_hand(name: str) -> None:
    truth, predicted, (right, found, there) = EXAMPLES[name]
    scores = entity_scores(list(map(numbers, truth)), list(map(numbers, predicted)), TAGS)
    assert scores["precision"] == pytest.approx(right / found if found else 0)
    assert scores["recall"] == pytest.approx(right / there if there else 0)
    assert scores["f1"] == pytest.approx(2 * right / (found + there) if found + there else 0)


def test_rows_of_different_lengths_are_no_prediction() -> None:
    with pytest.raises(ValueError, match="different lengths"):
        entity_scores([numbers("O O")], [numbers("O")], TAGS)


class Oracle(torch.nn.Module):
    """Answers with the tags it is given, and with ``O`` where there is none, with a margin of 3."""

    def __init__(self, task: Task, model: torch.nn.Module) -> None:
        super().__init__()
        self.config = model.config
        ids = [tuple(ids) for ids in task.test.ids]  # type: ignore[attr-defined]
        self.tags = dict(zip(ids, task.test.tags, strict=True))  # type: ignore[attr-defined]

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> Any:
        logits = torch.zeros(*input_ids.shape, len(TAGS))
        for row, (ids, length) in enumerate(zip(input_ids, attention_mask.sum(1), strict=True)):
            tags = np.maximum(self.tags[tuple(ids[:length].tolist())], 0)
            logits[row, torch.arange(int(length)), torch.from_numpy(tags)] = 3.0
        return type("Output", (), {"logits": logits})


def test_evaluation_sees_every_word_and_misses_what_is_cut_off(task: Task) -> None:
    model = build_model(task.config, task.data, seed=0)
    found = training.evaluate(Oracle(task, model), task, task.test, np.array([3, 0, 2]))
    assert tuple(found) == ("f1", "precision", "recall", "loss")
    assert found["f1"] == found["precision"] == found["recall"] == 1
    # 3 for the right tag and 0 for four others, at every word.
    assert found["loss"] == pytest.approx(math.log(math.exp(3) + 4) - 3)
    short = task_of(task.config.model_copy(update={"max_length": 6}).to_json())
    found = training.evaluate(Oracle(short, model), short, short.test, np.array([0]))
    assert (found["precision"], found["recall"]) == (1, 0.5), "Paris is beyond the cut"


def test_the_loss_is_the_mean_over_words(task: Task) -> None:
    model = build_model(task.config, task.data, seed=0).eval()
    rows = np.array([0, 1, 3])
    surprises = []
    for row in rows:
        batch = task.objective.batch(task.test, np.array([row]), np.random.default_rng(0))
        (labels,) = batch.pop("labels")
        with torch.no_grad():
            (logits,) = model(**batch).logits.double().log_softmax(dim=-1)
        surprises += [-float(logits[i, tag]) for i, tag in enumerate(labels.tolist()) if tag != IGNORED]
    assert len(surprises) == 11
    found = training.evaluate(model, task, task.test, rows)
    assert found["loss"] == pytest.approx(np.mean(surprises), rel=1e-6)


def test_training_learns_the_entities(task: Task) -> None:
    model = build_model(task.config, task.data, seed=0)
    training.train(model, task, np.arange(len(task.train)), 0, 20)
    found = training.evaluate(model, task, task.test, np.arange(4))
    assert found["f1"] > 0.8
    assert (model.config.id2label, model.config.label2id) == (dict(enumerate(TAGS)), NUMBER)


def test_a_diverged_model_has_no_metrics(task: Task) -> None:
    model = copy.deepcopy(build_model(task.config, task.data, seed=0))
    with torch.no_grad():
        next(iter(model.parameters())).fill_(math.nan)
    found = training.evaluate(model, task, task.test, np.arange(4))
    assert tuple(found) == ("f1", "precision", "recall", "loss")
    assert all(map(math.isnan, found.values()))


def test_rows_without_words_are_passed_over(tmp_path: Path, task: Task) -> None:
    tags = pa.array([["B-PER"], [], [], ["O"]], pa.list_(pa.string()))
    split = ["train", "train", "test", "test"]
    tokens = pa.array([["Anna"], [], [], ["is"]], pa.list_(pa.string()))
    pq.write_table(
        pa.table({"tokens": tokens, "ner_tags": tags, "split": split}), tmp_path / "odd.parquet"
    )
    settings = {"data": "odd", "data_dir": tmp_path, "partition": "iid"}
    odd = task_of(task.config.model_copy(update=settings).to_json())
    assert odd.objective.usable(odd.train, np.arange(2)).tolist() == [0]
    found = training.evaluate(build_model(odd.config, odd.data, 0), odd, odd.test, np.array([0]))
    assert all(map(math.isnan, found.values()))


BAD = {
    "no tokens": (
        {"tokens": None},
        {},
        "no word column 'tokens' or 'words'; columns are ner_tags, split",
    ),
    "no tags": ({"ner_tags": None}, {}, "no tag column 'ner_tags' or 'tags'"),
    "other tags": ({}, {"label_column": "fine"}, "no tag column 'fine'.*with --label-column"),
    "text": ({"tokens": ["Anna", "is"]}, {}, "column 'tokens' holds string; give a list for each row"),
    "missing": ({"tokens": [None, ["is"]]}, {}, "column 'tokens' has missing values"),
    "unequal": ({"tokens": [["Anna"], ["is", "it"]]}, {}, "row 0: 2 words in 'tokens' and 1 tags"),
    "other scheme": (
        {"ner_tags": [["U-PER"], ["O"]]},
        {},
        "tag 'U-PER' in column 'ner_tags' is not BIO",
    ),
    "numbers": ({"ner_tags": [[3], [0]]}, {}, "tag . in column 'ner_tags' is not BIO"),
    "no entity": ({"ner_tags": [["O"], ["O"]]}, {}, "every tag is 'O'"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_tagged_text_is_refused(name: str, tmp_path: Path) -> None:
    columns, options, message = BAD[name]
    table = {"tokens": [["Anna"], ["is"]], "ner_tags": [["B-PER"], ["O"]], "split": ["train", "test"]}
    kept = {key: values for key, values in {**table, **columns}.items() if values is not None}
    pq.write_table(pa.table(kept), tmp_path / "mine.parquet")
    with pytest.raises(DataError, match=message):
        load_tag_data("mine", tmp_path, **options)


def test_numbers_of_a_hub_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    names = ["O", "B-PER", "I-PER"]
    features = datasets.Features(
        {
            "tokens": datasets.List(datasets.Value("string")),
            "ner_tags": datasets.List(datasets.ClassLabel(names=names)),
        }
    )
    split = datasets.Dataset.from_dict(
        {"tokens": [["Anna", "is"]], "ner_tags": [[1, 0]]}, features=features
    )
    monkeypatch.setattr(sources, "_offline", lambda: False)
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_: datasets.DatasetDict(train=split, test=split)
    )
    data = load_tag_data("owner/entities")
    assert (data.tags, data.train.tags[0].tolist()) == (tuple(names), [1, 0])
    assert Source("x", {}).class_names == {}


def test_no_data_come_with_the_task() -> None:
    with pytest.raises(
        ValueError, match=r"there is no bundled data set for task 'ner'; name a data set"
    ):
        SimulationConfig(task="ner")


def test_the_shared_corpora_load() -> None:
    default = Path(__file__).parents[3].parent / "shared" / "data"
    folder = Path(os.environ.get("FEDROT_DATA", default))
    if not (folder / "ner").is_dir():
        pytest.skip("shared/data is not present: set FEDROT_DATA to the folder with ner/")
    data = load_tag_data("ewt", folder)
    assert (len(data.train), len(data.test)) == (12543, 2077)
    assert data.tags == ("O", "B-LOC", "I-LOC", "B-ORG", "I-ORG", "B-PER", "I-PER")
    assert set(data.train.columns["domain"]) == {"answers", "email", "newsgroup", "reviews", "weblog"}
    fine = load_tag_data("wnut17", folder, label_column="original_tags")
    assert "corporation" in fine.label_names


def test_types_are_those_of_both_splits_and_columns_can_be_chosen(tmp_path: Path) -> None:
    words = pa.array([["Anna"], ["is"], ["Rome"]], pa.large_list(pa.string()))
    tags = pa.array([["B-PER"], ["O"], ["B-LOC"]], pa.large_list(pa.string()))
    columns = {"parts": words, "marks": tags, "ner_tags": [["O"]] * 3, "site": ["x", "y", "z"]}
    split = ["train", "train", "test"]
    pq.write_table(pa.table({**columns, "split": split}), tmp_path / "mine.parquet")
    data = load_tag_data("mine", tmp_path, text_column="parts", label_column="marks")
    assert data.tags == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert data.label_names == ("LOC", "PER")
    assert (data.train.words, data.test.words) == ([("Anna",), ("is",)], [("Rome",)])
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([[0, 1], [0, 0]], [[1, 0]])
    assert (data.train.columns, data.note) == ({"ner_tags": [["O"]] * 2, "site": ["x", "y"]}, "")


def test_tagged_rows_without_splits_are_divided_and_limited(tmp_path: Path) -> None:
    rows = {"words": [[str(row)] for row in range(20)], "tags": [["B-X"]] * 20}
    pq.write_table(pa.table(rows), tmp_path / "mine.parquet")
    data = load_tag_data("mine", tmp_path, train_limit=5, test_limit=3)
    assert (len(data.train), len(data.test)) == (5, 3)
    assert "of 20 rows 4 are held out" in data.note


def test_the_row_with_a_tag_too_many_is_named(tmp_path: Path) -> None:
    tokens, tags = [["a"], ["b"], ["c"]], [["B-X"], ["O"], ["O", "O"]]
    table = pa.table({"tokens": tokens, "ner_tags": tags, "split": ["train", "test", "test"]})
    pq.write_table(table, tmp_path / "mine.parquet")
    with pytest.raises(DataError, match=r"mine \(held-out\), row 1: 1 words in 'tokens' and 2 tags"):
        load_tag_data("mine", tmp_path)


@pytest.mark.parametrize("tag", ["B-", "I", "BPER", "o", ""])
def test_what_is_nearly_a_tag_is_none(tag: str, tmp_path: Path) -> None:
    table = {"tokens": [["a"], ["b"]], "ner_tags": [["B-X"], [tag]], "split": ["train", "test"]}
    pq.write_table(pa.table(table), tmp_path / "mine.parquet")
    with pytest.raises(DataError, match=rf"mine \(held-out\): tag '{tag}' in column 'ner_tags'"):
        load_tag_data("mine", tmp_path)


def test_evaluation_counts_words_of_all_batches_alike(task: Task) -> None:
    """More rows than one batch has: one long row and many short ones."""
    model = build_model(task.config, task.data, seed=0)
    rows = np.array([0] * 80 + [3] * 20)
    whole, long, short = (
        training.evaluate(model, task, task.test, part) for part in (rows, rows[:1], rows[-1:])
    )
    assert long["loss"] != pytest.approx(short["loss"], rel=1e-3)
    expected = (80 * 5 * long["loss"] + 20 * 2 * short["loss"]) / 440
    assert whole["loss"] == pytest.approx(expected, rel=1e-6)
