"""Several data sets as the domains of one task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

import reproductions.arms  # noqa: F401
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.data.domains import load_domains
from fedrot.simulations.data.partition import key_names, partition_keys
from fedrot.simulations.data.sources import DataError
from fedrot.simulations.data.texts import load_text_data
from fedrot.simulations.models.build import build_model
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.task import Task, task_of
from tests.simulations.commands import options_of
from tests.simulations.data.test_data import write
from tests.simulations.federation.test_arms import ask, initial
from tests.simulations.in_process import simulated

WORDS = ("sunny", "gloomy", "furious", "shy")
SMALL: dict[str, Any] = {"layers": 1, "width": 16, "heads": 2, "max_length": 16, "clients": 2}


def corpus(path: Path, labels: tuple[str, ...], seed: int) -> None:
    """Write 60 rows whose words tell their labels; every label occurs in both splits."""
    rng = np.random.default_rng(seed)
    which = np.arange(60) % len(labels)
    rng.shuffle(which)
    texts = [f"{WORDS[WORDS.index(labels[w])]} day {i} of {path.stem}" for i, w in enumerate(which)]
    columns = {label: [bool(w == place) for w in which] for place, label in enumerate(labels)}
    write(path, text=texts, **columns, split=["train"] * 45 + ["test"] * 15)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    corpus(tmp_path / "news.parquet", ("sunny", "gloomy"), 0)
    corpus(tmp_path / "talk.parquet", ("gloomy", "furious", "shy"), 1)
    corpus(tmp_path / "books.parquet", ("furious", "sunny"), 2)
    return tmp_path


@pytest.fixture
def task(folder: Path) -> Task:
    settings = {**SMALL, "data": "news,talk", "unseen_data": "books", "partition": "column:domain"}
    config = SimulationConfig.from_flat({**settings, "data_dir": folder, "seeds": 1, "lr": 1e-2})
    return task_of(config.to_json())


def test_labels_are_united_by_name_and_unknown_where_a_domain_has_none(folder: Path) -> None:
    data = load_domains(["news", "talk"], folder, ["books"])
    assert data.label_names == ("sunny", "gloomy", "furious", "shy")
    assert (len(data.train), len(data.test)) == (90, 45)
    for split in (data.train, data.test):
        for domain, text, labels in zip(split.columns["domain"], split.texts, split.labels, strict=True):
            known = {"news": (0, 1), "talk": (1, 2, 3), "books": (0, 2)}[str(domain)]
            assert set(np.flatnonzero(~np.isnan(labels))) == set(known)
            assert data.label_names[int(np.nanargmax(labels))] == text.split()[0]
    assert data.metrics == ("macro_f1", "unseen_macro_f1", "f1_news", "f1_talk", "f1_books")


def test_how_labels_were_taken_is_said_of_every_domain(folder: Path) -> None:
    named = ("news", "talk", "books")
    said = [load_text_data(name, folder).said for name in named]
    assert len({*said}) == 3
    assert load_domains(named[:2], folder, named[2:]).said == " ".join(said)


def test_one_data_set_is_a_domain_beside_unseen_ones(folder: Path) -> None:
    settings = {**SMALL, "data": "news", "unseen_data": "books", "data_dir": folder, "seeds": 1}
    data = task_of(SimulationConfig.from_flat(settings).to_json()).data
    assert data.metrics == ("macro_f1", "unseen_macro_f1", "f1_news", "f1_books")


def test_unknown_labels_are_no_classes_of_a_partition() -> None:
    labels = np.array([[np.nan, 1, 0], [0, np.nan, 1], [np.nan, 0, 0]], dtype=np.float32)
    assert partition_keys(labels).tolist() == [1, 2, 3]
    assert key_names(labels, ("a", "b", "c")) == ("a", "b", "c", "none")


def test_unknown_labels_have_no_part_in_the_loss(task: Task) -> None:
    model = build_model(task.config, task.data, 0).eval()
    rows = np.array([0, 60])
    batch = task.objective.batch(task.train, rows, np.random.default_rng(0))
    logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits.detach()
    by_hand = []
    for row, line in zip(batch["labels"], logits, strict=True):
        for label, logit in zip(row, line, strict=True):
            if not torch.isnan(label):
                by_hand.append(-torch.nn.functional.logsigmoid(logit if label else -logit))
    assert len(by_hand) == 2 + 3
    loss = task.objective.loss(model, batch)
    assert torch.allclose(loss, torch.stack(by_hand).mean())
    loss.backward()
    assert all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in model.parameters())


def test_every_domain_is_scored_by_its_own_labels(task: Task) -> None:
    model = build_model(task.config, task.data, 0)
    training.train(model, task, np.arange(90), 0, epochs=20)
    found = training.evaluate(model, task, task.test, np.arange(45))
    with torch.no_grad():
        logits = model.eval()(**task.objective.batch(task.test, np.arange(45), None)).logits.numpy()  # type: ignore[arg-type]
    scores = {}
    for domain, known in {"news": [0, 1], "talk": [1, 2, 3], "books": [0, 2]}.items():
        own = np.array(task.test.domains) == domain  # type: ignore[attr-defined]
        truth, guess = task.test.labels[own][:, known], logits[own][:, known] > 0
        scores[domain] = f1_score(truth, guess, average="macro", zero_division=0)
        assert found[f"f1_{domain}"] == pytest.approx(scores[domain])
    assert found["macro_f1"] == pytest.approx((scores["news"] + scores["talk"]) / 2)
    assert found["unseen_macro_f1"] == pytest.approx(scores["books"])
    assert found["macro_f1"] > 0.5
    few = training.evaluate(
        model, task, task.test, np.flatnonzero(np.array(task.test.domains) == "talk")
    )  # type: ignore[attr-defined]
    assert set(few) == {"macro_f1", "f1_talk", "loss"}
    # The loss is that of the domains with training rows.
    news = training.evaluate(
        model, task, task.test, np.flatnonzero(np.array(task.test.domains) == "news")
    )  # type: ignore[attr-defined]
    assert found["loss"] == pytest.approx((few["loss"] + news["loss"]) / 2)


def test_clients_send_the_rows_of_the_head_whose_labels_they_know(task: Task) -> None:
    received = initial(task.config)
    head = ("classifier.weight", "classifier.bias")
    for client, known in enumerate([[True, True, False, False], [False, True, True, True]]):
        update, statistics = ask(task.config, received, client, statistics="gram")
        assert {name: mask.tolist() for name, mask in statistics["trained"].items()} == dict.fromkeys(
            head, known
        )
        assert statistics["gram"]
        for name in head:
            same = (update[name] == received[name]).reshape(4, -1).all(dim=1)
            assert same.tolist() == [not row for row in known]


def test_every_aggregation_merges_domains(folder: Path, tmp_path: Path) -> None:
    options = options_of(SMALL)
    arms = ["plain", "aligned", "plain/regmean", "plain/fisher", "plain#0+1"]
    common = ("--partition", "column:domain", "--rounds", 1, "--seeds", 1, "--data-dir", folder)
    simulated(
        tmp_path / "run",
        *("simulate", *options, *common, "--data", "news,talk", "--set", "unseen_data=books"),
        *("--arms", ",".join(arms), "--set", "holdout=0", "--local-epochs", 8, "--lr", 0.01),
    )
    lines = (tmp_path / "run" / "rows.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["round"] == 1]
    losses = {r["arm"]: r["value"] for r in rows if r["scope"] == "central" and r["metric"] == "loss"}
    assert list(losses) == arms
    assert losses["plain#0+1"] == losses["plain"]
    assert all(np.isfinite(r["value"]) for r in rows if r["scope"] == "central")


@pytest.mark.parametrize(
    ("names", "unseen", "message"),
    [
        (["news", "news"], [], "'news' is named twice"),
        (["news", "talk"], ["talk"], "'talk' is named twice"),
        (["news", "scores"], [], "'scores' has scores or pairs of texts"),
        (["news", "pairs"], [], "'pairs' has scores or pairs of texts"),
        (["news", "numbers"], [], "the classes of 'numbers' are numbers"),
        (["news", "sub/news.parquet"], [], "two domains have the same file name"),
        (["news"], ["other"], "'other' has none of the labels sunny, gloomy; it has furious, shy"),
    ],
)
def test_what_is_no_domain_is_named(
    names: list[str], unseen: list[str], message: str, folder: Path
) -> None:
    write(folder / "scores.parquet", text=["a"] * 10, label=[i / 3 for i in range(10)])
    write(folder / "pairs.parquet", sentence1=["a"] * 10, sentence2=["b"] * 10, label=["x", "y"] * 5)
    write(folder / "numbers.parquet", text=["a"] * 10, label=[0, 1] * 5)
    (folder / "sub").mkdir()
    corpus(folder / "sub" / "news.parquet", ("sunny", "gloomy"), 4)
    corpus(folder / "other.parquet", ("furious", "shy"), 3)
    with pytest.raises(DataError, match=message):
        load_domains(names, folder, unseen)


def test_learning_with_unknown_labels_is_refused() -> None:
    with pytest.raises(ValueError, match="evidence 'learned' needs one data set, not several domains"):
        SimulationConfig.from_flat({"data": "a,b", "arms": "plain,aligned~learned"})


@pytest.mark.parametrize("task", ["mlm", "clm", "image"])
def test_unseen_data_are_for_classification(task: str) -> None:
    with pytest.raises(ValueError, match=f"unseen_data is for task 'classification', not for '{task}'"):
        SimulationConfig.from_flat({"task": task, "unseen_data": "books"})


def test_the_loss_of_a_table_is_that_of_domains_with_training_rows(task: Task) -> None:
    """The mean of theirs, each alike; of unseen domains alone it is their own."""
    model = build_model(task.config, task.data, 0).eval()
    with torch.no_grad():
        model.classifier.weight.mul_(50)
        model.classifier.bias.copy_(torch.tensor([1.0, -1.0, 0.5, 2.0]))
    domains = np.array(task.test.domains)  # type: ignore[attr-defined]
    with torch.no_grad():
        logits = model(**task.objective.batch(task.test, np.arange(45), None)).logits.double()  # type: ignore[arg-type]
    truth = torch.from_numpy(task.test.labels).double()
    each = torch.where(truth.isnan(), torch.nan, torch.nn.functional.softplus(logits) - truth * logits)
    mean = {
        name: float(each[torch.from_numpy(domains == name)].nanmean())
        for name in ("news", "talk", "books")
    }
    assert len({round(loss, 3) for loss in mean.values()}) == 3

    def loss(*names: str) -> float:
        return training.evaluate(model, task, task.test, np.flatnonzero(np.isin(domains, names)))["loss"]

    seen = (mean["news"] + mean["talk"]) / 2
    assert loss("news", "talk", "books") == pytest.approx(seen, rel=1e-5)
    assert loss("news", "books") == pytest.approx(mean["news"], rel=1e-5)
    assert loss("books") == pytest.approx(mean["books"], rel=1e-5)


def test_domains_may_have_any_number_of_labels_and_their_own_limits(tmp_path: Path) -> None:
    split = ["train"] * 8 + ["test"] * 4
    glad, sad = [True, True, False] * 4, [True, False, False] * 4
    write(
        tmp_path / "many.parquet", text=[f"{row}" for row in range(12)], glad=glad, sad=sad, split=split
    )
    (tmp_path / "files").mkdir()
    lines = "".join(f"line {row},{('sad', '1')[row % 2]}\n" for row in range(20))
    (tmp_path / "files" / "other.csv").write_text("text,label\n" + lines)
    unseen = "".join(f"line {row},{('sad', 'unheard')[row % 2]}\n" for row in range(20))
    (tmp_path / "files" / "unseen.csv").write_text("text,label\n" + unseen)
    names, others = ["many", "files/other.csv"], ["files/unseen.csv"]
    data = load_domains(names, tmp_path, others, train_limit=6, test_limit=3)
    assert data.name == "many,files/other.csv"
    assert data.label_names == ("glad", "sad", "1")
    assert data.train.columns["domain"] == ["many"] * 6 + ["files/other.csv"] * 6
    assert data.test.columns["domain"] == [name for name in (*names, *others) for _ in range(3)]
    for text, labels in zip(data.train.texts[:6], data.train.labels, strict=False):
        assert labels[:2].tolist() == [glad[int(text)], sad[int(text)]]
        assert np.isnan(labels[2])
    assert data.metrics[2:] == ("f1_many", "f1_other", "f1_unseen")
    # Both files were divided, the table was not.
    assert [part in data.note for part in ("many", "other.csv", "unseen.csv")] == [False, True, True]
    # A label that no domain with training rows has is left out.
    assert set(np.flatnonzero(~np.isnan(data.test.labels[-3:]).all(axis=0))) == {1}


def test_names_of_domains_may_have_spaces_around(folder: Path) -> None:
    settings = {**SMALL, "data": "news, talk", "unseen_data": " books ,", "data_dir": folder}
    data = task_of(SimulationConfig.from_flat({**settings, "seeds": 1}).to_json()).data
    assert (data.domains, data.unseen) == (("news", "talk"), ("books",))  # type: ignore[attr-defined]
    one = SimulationConfig.from_flat({**SMALL, "data": "news", "unseen_data": " ", "data_dir": folder})
    assert task_of(one.to_json()).data.kind == "single"


def test_a_diverged_model_has_no_scores(task: Task) -> None:
    model = build_model(task.config, task.data, 0)
    with torch.no_grad():
        model.classifier.bias[0] = np.nan
    found = training.evaluate(model, task, task.test, np.arange(45))
    assert tuple(found) == (*task.data.metrics, "loss")
    assert np.isnan(list(found.values())).all()
