"""The baseline: every strategy runs on tiny data, without a network."""

import pandas
import pytest

from tests.examples.test_examples import (
    BASELINE,
    SIZES,
    Run,
    reviews,
    save_model,
    save_rows,
)

STRATEGIES = ["+fit", "head-only", "fedavg", "fedavg+fit", "fedprox", "fedrot"]


@pytest.fixture
def settings(tmp_path):
    """A random model and reviews of two classes, as settings of the baseline."""
    save_model(tmp_path / "model", "BertModel", **SIZES)
    for split, size in (("train", 160), ("test", 40)):
        save_rows(tmp_path / "data" / f"{split}.csv", *reviews(size))
    given = {"dataset": "data", "model": "model", "results": "rows.csv"}
    names = " ".join(f'{name}="{tmp_path / own}"' for name, own in given.items())
    return (
        f"{names} num-classes=2 trained-layers=1 num-server-rounds=1 "
        "learning-rate-fedrot=1e-3"
    )


def test_every_strategy_gives_a_row(tmp_path, settings):
    with Run(tmp_path) as run:
        log = run.simulated(
            BASELINE, 4, f'{settings} strategies="{",".join(STRATEGIES)}"'
        )
    rows = pandas.read_csv(tmp_path / "rows.csv")
    assert [*rows["strategy"]] == STRATEGIES, log
    found = rows.set_index("strategy")["macro_f1"]
    # Without training the fitted head tells the classes apart; one round on four
    # clients does not.
    assert found["+fit"] > 0.9
    assert found["fedrot"] > 0.9
    assert found["head-only"] < 0.9
    assert log.count("aggregate_train: Received 2 results") == 3, log


@pytest.mark.long
@pytest.mark.timeout(900)
def test_it_runs_unchanged_on_a_superlink_with_two_supernodes(tmp_path, settings):
    with Run(tmp_path) as run:
        run.serve()
        log = run.deployed(BASELINE, f'{settings} strategies="fedavg+fit"')
    assert pandas.read_csv(tmp_path / "rows.csv")["macro_f1"].item() > 0.9, log


def test_the_page_has_the_means_of_its_rows():
    rows = pandas.read_csv(BASELINE / "results.csv")
    page = (BASELINE / "README.md").read_text(encoding="utf-8")
    assert {*rows["strategy"]} == {*STRATEGIES}
    for (data, strategy), own in rows.groupby(["dataset", "strategy"])["macro_f1"]:
        assert f"| {data} | `{strategy}` | {own.mean():.3f} ± {own.std():.3f} |" in page
