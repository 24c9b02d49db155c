"""The baseline: it can be published, and every strategy runs on tiny data, without a network."""

from __future__ import annotations

import csv
import re
import shutil
import zipfile
from pathlib import Path

import pandas
import pytest

from tests.deployment.federation import ROOT
from tests.examples.test_examples import TEXTS, Run, save_tokenizer

BASELINE = ROOT / "baselines" / "label-skew-text"
STRATEGIES = ["+fit", "head-only", "fedavg", "fedavg+fit", "fedprox", "fedrot"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model and reviews of two classes, as settings of the baseline."""
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("tiny")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(vocab_size=save_tokenizer(folder / "model"), hidden_size=32, **sizes)
    BertModel(config).save_pretrained(folder / "model")
    (folder / "data").mkdir()
    for split, size in (("train", 160), ("test", 40)):
        with (folder / "data" / f"{split}.csv").open("w", newline="") as file:
            rows = ((f"{TEXTS[n % 2]} {n} times", n % 2) for n in range(size))
            csv.writer(file).writerows([("text", "label"), *rows])
    names = f'dataset="{folder / "data"}" model="{folder / "model"}" results="{folder / "rows.csv"}"'
    return f"{names} num-classes=2 trained-layers=1 num-server-rounds=1 learning-rate-fedrot=1e-3"


def test_the_app_can_be_published(tmp_path: Path) -> None:
    app = shutil.copytree(BASELINE, tmp_path / "app", ignore=shutil.ignore_patterns("__pycache__"))
    with Run(tmp_path) as run:
        run.run("build", f"flwr build --app {app}")
    (fab,) = tmp_path.glob("*.fab")
    modules = {f"label_skew_text/{path.name}" for path in BASELINE.glob("label_skew_text/*.py")}
    assert modules | {"LICENSE", "README.md"} <= {*zipfile.ZipFile(fab).namelist()}


def test_every_strategy_gives_a_row(tmp_path: Path, settings: str) -> None:
    with Run(tmp_path) as run:
        log = run.simulated(BASELINE, 4, f'{settings} strategies="{",".join(STRATEGIES)}"')
    rows = pandas.read_csv(re.findall(r'results="([^"]*)"', settings)[0])
    assert [*rows["strategy"]] == STRATEGIES, log
    found = rows.set_index("strategy")["macro_f1"]
    # Without training the fitted head tells the classes apart; one round on four clients does not.
    assert found["+fit"] > 0.9
    assert found["fedrot"] > 0.9
    assert found["head-only"] < 0.9
    assert log.count("aggregate_train: Received 2 results") == 3, log


def test_the_page_has_the_means_of_its_rows() -> None:
    rows = pandas.read_csv(BASELINE / "results.csv")
    page = (BASELINE / "README.md").read_text(encoding="utf-8")
    assert {*rows["strategy"]} == {*STRATEGIES}
    for (data, strategy), own in rows.groupby(["dataset", "strategy"])["macro_f1"]:
        assert f"| {data} | `{strategy}` | {own.mean():.3f} ± {own.std():.3f} |" in page
