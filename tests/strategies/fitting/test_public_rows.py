"""A head from noisy sums of sites with an epsilon, through requests and answers."""

import pytest
import torch
from flwr.app import ArrayRecord

from fedrot.errors import FedrotError
from fedrot.strategies import (
    FedRot,
    Privacy,
    PublicRows,
    report_sites,
)
from fedrot.strategies.client.answer_record import Record
from fedrot.strategies.fitting.class_priors import class_priors
from fedrot.strategies.wire.fitting_messages import NOISY_SUMS
from fedrot.task_head.noisy.noisy_fit import fit_to_noisy_sums
from fedrot.task_head.noisy.noisy_sums import noisy_sums
from fedrot.task_head.noisy.public_features import Clipping, public_features
from tests.strategies.fakes import grid_of, tensors_of
from tests.strategies.fitting.classifiers import (
    ALL_ROWS,
    KINDS,
    OUTPUTS,
    SINGLE,
    WIDTH,
    edited,
)
from tests.strategies.fitting.site_cases import figures_of, logits_of


def site(kind, rows, privacy=ALL_ROWS):
    return kind.client(rows, rows, privacy=privacy)


def public_of(kind):
    rows = {n: v for n, v in kind.rows(77, 200).items() if n != "labels"}
    return PublicRows(kind.build, lambda: [rows])


def noisy(folder, name):
    return Privacy(record=folder / f"{name}.jsonl", epsilon=8.0)


def accuracy(tensors):
    rows = SINGLE.rows(500, 300)
    logits = logits_of(SINGLE, tensors, rows)
    return figures_of(SINGLE, logits, rows["labels"])["accuracy"]


@pytest.mark.parametrize("name", ["single", "adapter", "pooled"])
def test_without_noise_the_head_is_that_of_one_place(name):
    kind = KINDS[name]
    pairs = [rows for rows, _ in kind.pairs()]
    sites = [site(kind, rows) for rows in pairs]
    fitted = kind.fitted(sites, public=public_of(kind))
    model = kind.build()
    features = public_features(model, public_of(kind).batches(), kind.head)
    # No site has more than 1.5 times the rows of the median one.
    total = noisy_sums(model, pairs, kind.head, features.clipping, 0.0)
    weight, bias, priors = fit_to_noisy_sums(total, features)
    tensors = tensors_of(fitted.arrays)
    assert torch.allclose(
        tensors[f"{kind.head}.weight"].double(), weight, atol=1e-5, rtol=1e-4
    )
    assert torch.allclose(tensors[f"{kind.head}.bias"].double(), bias, atol=1e-4)
    assert fitted.priors == pytest.approx(priors.tolist(), abs=1e-6)
    others = {n: v for n, v in kind.state().items() if kind.head not in n}
    assert all(torch.equal(tensors[n], v) for n, v in others.items())


def test_sites_with_an_epsilon_answer_once(tmp_path, caplog):
    sites = [
        site(SINGLE, SINGLE.rows(seed, 400), noisy(tmp_path, seed)) for seed in range(3)
    ]
    public = public_of(SINGLE)
    fitted = SINGLE.fitted(sites, public=public)
    assert fitted.fitted
    assert fitted.clients == 3
    assert accuracy(tensors_of(fitted.arrays)) > accuracy(SINGLE.state()) + 0.1
    assert "3 of 3 sites, about 1" in caplog.text
    for seed in range(3):
        (line,) = Record(tmp_path / f"{seed}.jsonl").lines()
        assert line["epsilon"] == pytest.approx(8, rel=1e-5)
        assert line["stage"] == "noisy-sum"
    with pytest.raises(FedrotError, match="spent"):
        SINGLE.fitted(sites, public=public)
    assert len(Record(tmp_path / "0.jsonl").lines()) == 1


def test_nothing_else_is_answered(tmp_path):
    sites = [site(SINGLE, SINGLE.rows(i, 90), noisy(tmp_path, i)) for i in (1, 2)]
    grid, arrays = grid_of(sites), ArrayRecord(SINGLE.state())
    config = SINGLE.config
    with pytest.raises(FedrotError, match=r"public=PublicRows"):
        SINGLE.fitted(sites)
    with pytest.raises(FedrotError, match="noisy sums alone"):
        class_priors(grid, config, timeout=1)
    with pytest.raises(FedrotError, match=r"public=PublicRows"):
        FedRot(config, fit_head=True).start(grid, arrays, num_rounds=1, timeout=1)
    reports = report_sites(
        grid, arrays, config, priors=[1 / OUTPUTS] * OUTPUTS, timeout=1
    )
    assert (reports.withheld, reports.rows) == (2, [])
    assert not (tmp_path / "1.jsonl").exists()


@pytest.mark.parametrize("rows", [0, 1])
def test_sites_with_few_rows_answer_in_the_same_form(tmp_path, rows):
    many = site(SINGLE, SINGLE.rows(1, 300), noisy(tmp_path, "many"))
    few = site(SINGLE, SINGLE.rows(2, rows), noisy(tmp_path, rows))
    seen = []
    watched = edited(few, lambda answer: seen.append(answer[NOISY_SUMS]))
    fitted = SINGLE.fitted([many, watched], public=public_of(SINGLE))
    assert fitted.clients == 2
    (sent,) = seen
    assert sent["sums"].shape == (OUTPUTS, WIDTH)
    assert not torch.equal(sent["counts"], sent["counts"].round())


def loud(sums):
    sums |= {name: value * 1e4 for name, value in sums.items()}


def boastful(sums):
    sums["counts"] = sums["counts"] * 1e3


def impossible(sums):
    sums["sums"] = sums["sums"] * 1e3


@pytest.mark.parametrize(
    ("lie", "word"), [(loud, "hide"), (boastful, ""), (impossible, "larger")]
)
def test_one_liar_of_four_does_not_decide(tmp_path, caplog, lie, word):
    honest = [
        site(SINGLE, SINGLE.rows(seed, 400), noisy(tmp_path, seed)) for seed in range(4)
    ]
    liar = edited(honest[3], lambda answer: lie(answer[NOISY_SUMS]))
    fitted = SINGLE.fitted([*honest[:3], liar], public=public_of(SINGLE))
    assert word in caplog.text
    assert accuracy(tensors_of(fitted.arrays)) > 0.5


@pytest.mark.parametrize("name", ["multi", "regression"])
def test_rows_with_several_numbers_are_refused(name):
    kind = KINDS[name]
    sites = [site(kind, kind.rows(1, 50))]
    with pytest.raises(FedrotError, match="problem type"):
        kind.fitted(sites, public=public_of(kind))


def test_errors_of_a_site_with_an_epsilon_say_nothing_of_its_rows(tmp_path):
    rows = {"labels": "Jane Roe"}
    sites = [site(SINGLE, rows, noisy(tmp_path, 1))]
    with pytest.raises(FedrotError) as error:
        SINGLE.fitted(sites, public=public_of(SINGLE))
    assert "its own log" in str(error.value)
    assert "Jane" not in str(error.value)


def test_a_row_changes_no_other_row():
    """Padding and rounding of the others depend on the rows of a batch."""
    model = SINGLE.build()
    embeddings = model.bert.embeddings.word_embeddings.weight.data
    clipping = public_features(model, public_of(SINGLE).batches(), SINGLE.head).clipping
    rows = SINGLE.rows(1, 9)
    rows["attention_mask"][:8, 3:] = 0
    texts = {name: rows[name][:8, :3] for name in ("input_ids", "attention_mask")}
    without = {**texts, "labels": rows["labels"][:8]}
    rows["input_ids"][:8, 3:] = 0
    # A label that is no class is left out.
    rows["labels"][0] = 99
    for words, value, radius in ((0, torch.nan, 1.0), (slice(None), 1.0, 1e-9)):
        embeddings[words] = value
        strange = Clipping(clipping.mean, radius * clipping.radius)
        whole, part = (
            noisy_sums(model, [batch], SINGLE.head, strange, 0.0)
            for batch in (rows, without)
        )
        assert float((whole.sums - part.sums).norm()) <= 1 + 1e-9
        assert float(whole.counts.sum()) == 8
    # Noise hides no labels of tokens, and no row without a mask.
    for odd in ({"labels": rows["input_ids"]}, {"attention_mask": None}):
        with pytest.raises(FedrotError, match="attention_mask"):
            noisy_sums(model, [{**rows, **odd}], SINGLE.head, clipping, 1.0)


def test_public_rows_are_functions():
    with pytest.raises(FedrotError, match="batches"):
        PublicRows(SINGLE.build, [SINGLE.rows(1)])
