"""Every arm of the laboratory of heads beside the formula of its paper."""

from __future__ import annotations

import copy
import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.nn.functional import cross_entropy, one_hot
from typer.testing import CliRunner

from fedrot.simulations import pretrained
from fedrot.task_head.choice import SHRINKAGES
from fedrot.task_head.fit import fitted_task_heads
from reproductions.heads import __main__, cell, closed
from reproductions.heads.arms import ARMS, Arm
from reproductions.heads.federation import PROBE_RATES, PROBE_ROUNDS, Federation, epoch
from reproductions.heads.rounds import average, candidates, play
from tests.reproductions.bert import BERT, small_federation

RESULTS = Path(__file__).parents[2] / "docs" / "results"
torch.manual_seed(0)
LABELS = torch.tensor([0, 1, 2, 4] * 15)  # no row of class 3
FEATURES = torch.randn(60, 7) + one_hot(LABELS, 7)


@pytest.fixture
def federation():
    return small_federation()


@pytest.mark.parametrize("pooling", ["mean", "pooler"])
def test_heads_read_what_bert_gives(federation, pooling):
    rows = np.arange(40, 60)
    other = copy.deepcopy(BERT)
    with torch.no_grad():
        other.encoder.layer[3].output.dense.weight.mul_(2)
        ids = torch.from_numpy(federation.cell.ids[rows])
        found = other(ids, attention_mask=ids > 0)
    states = [state[row > 0].mean(0) for state, row in zip(found[0], ids, strict=True)]
    wanted = found.pooler_output if pooling == "pooler" else torch.stack(states)
    flat = Federation(federation.cell, other, 2, pooling).start
    reader = Federation(federation.cell, copy.deepcopy(BERT), 2, pooling)
    read = reader.features(flat, rows)
    torch.testing.assert_close(read, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "arm", [Arm(0.01), Arm(0.01, pull=0.5), Arm(0.1, scaffold=True, sgd=True)]
)
def test_an_epoch_is_that_of_torch_and_scaffold_has_its_option_two(arm):
    x = torch.randn(50, 3)
    labels = torch.randint(3, (50,))
    start = torch.randn(9)
    order = np.arange(50)
    shift = torch.randn(9) if arm.scaffold else torch.zeros(9)

    def loss(flat, places):
        return cross_entropy(x[places] @ flat.view(3, 3), labels[places])

    end, gradient = epoch(loss, start, order, arm, shift)
    weights = nn.Parameter(start.clone())
    kind = torch.optim.SGD if arm.sgd else torch.optim.Adam
    optimiser = kind([weights], lr=arm.rate)
    for batch in np.split(order, [16, 32, 48]):
        optimiser.zero_grad()
        pull = arm.pull / 2 * (weights - start).square().sum()
        (loss(weights, batch) + pull + (weights * shift).sum()).backward()
        optimiser.step()
    torch.testing.assert_close(end, weights.detach(), atol=1e-5, rtol=1e-5)
    if arm.scaffold:  # c_i - c + (start - end) / (steps rate)
        second = (start - end) / (4 * arm.rate) - shift
        torch.testing.assert_close(gradient, second, atol=1e-5, rtol=1e-4)


def test_discriminants_and_ridges_are_those_of_sklearn():
    total = closed.sums_of(FEATURES, LABELS, 5)
    logits = closed.scores(FEATURES, fitted_task_heads(total, SHRINKAGES))
    # In units of deviations inside the classes, both shrink to the identity.
    means = torch.stack([FEATURES[label == LABELS].mean(0) for label in LABELS])
    standard = FEATURES / (FEATURES - means).square().mean(0).sqrt()
    assert not (logits.argmax(-1) == 3).any()
    for found, shrinkage in zip(
        logits[..., [0, 1, 2, 4]].softmax(-1), SHRINKAGES, strict=True
    ):
        lda = LinearDiscriminantAnalysis("lsqr", shrinkage=shrinkage).fit(
            standard, LABELS
        )
        np.testing.assert_allclose(found, lda.predict_proba(standard), atol=1e-6)
    weight, bias = closed.of_fedrot(total, SHRINKAGES)
    # A class without rows has no direction.
    assert not weight[:, 3].any()
    assert not (closed.scores(FEATURES, (weight, bias)).argmax(-1) == 3).any()
    spread = 60 * FEATURES.double().var(0, correction=0).mean()
    for found, strength in zip(
        closed.scores(FEATURES, closed.ridge(total)), closed.RIDGES, strict=True
    ):
        ridge = Ridge(float(strength * spread)).fit(
            FEATURES, one_hot(LABELS, 5).double()
        )
        np.testing.assert_allclose(found, ridge.predict(FEATURES), atol=1e-5)


def test_fedcof_and_fedncm_by_loops():
    client = torch.arange(60) % 7 // 2
    wanted = torch.zeros(7, 7).double()
    centres = []
    for c in LABELS.unique():
        holders = client[c == LABELS]
        x = FEATURES[c == LABELS].double()
        centres.append(x.mean(0))
        of_client = [x[holders == k] for k in holders.unique()]
        for rows in of_client:
            m = rows.mean(0) - centres[-1]
            scale = len(x) / 60 * len(rows) / (len(of_client) - 1)
            wanted += scale * torch.outer(m, m)
    means = torch.stack(centres)
    found = closed.from_means(FEATURES, LABELS, client, 5)
    torch.testing.assert_close(
        found.gram / 60 - means.mT @ means / 4, wanted
    )  # 15 rows of each class
    weight, bias = closed.nearest_mean(closed.sums_of(FEATURES, LABELS, 5))
    torch.testing.assert_close(
        weight[0, [0, 1, 2, 4]], means / means.norm(dim=1, keepdim=True)
    )
    assert not bias.any()


def test_ccvr_is_near_the_posterior():
    labels = torch.tensor([0, 1, 1] * 500)
    x = torch.randn(1500, 2) + 1.5 * labels[:, None]
    logits = closed.scores(x, closed.drawn(x, labels, 2, 0, rows=20000))[0]
    wanted = LinearDiscriminantAnalysis().fit(x, labels).predict_proba(x)
    np.testing.assert_allclose(logits.softmax(-1), wanted, atol=0.04)


def test_the_probe_is_fedavg_of_the_head_alone(federation):
    own = federation.cell
    read = federation.features(federation.start, np.arange(230))

    def loss(flat, rows):
        logits = read[rows] @ flat[:72].view(3, 24).T + flat[72:]
        return cross_entropy(logits, federation.labels[rows])

    flat = federation.start[-75:]
    arm = Arm(PROBE_RATES[2])
    for number in range(PROBE_ROUNDS):
        ends = [
            len(rows) * epoch(loss, flat, rows, arm)[0]
            for rows in own.batches(-1 - number)
        ]
        flat = sum(ends) / len(own.training)
    weight, bias = federation.heads("probe", read[own.training])
    torch.testing.assert_close(
        torch.cat([weight[2].flatten(), bias[2]]), flat, atol=1e-4, rtol=1e-3
    )


def test_the_best_candidate_and_temperature_are_taken():
    loss = partial(cross_entropy, target=LABELS)
    head = (9 * torch.randn(3, 5, 7), torch.randn(3, 5))
    best, losses = closed.calibrated(FEATURES, LABELS, head)
    tried = [
        loss(x / t) for x in closed.scores(FEATURES, head) for t in closed.TEMPERATURES
    ]
    assert losses.mean() == pytest.approx(float(min(tried)))
    np.testing.assert_allclose(
        losses, loss(closed.scores(FEATURES, best), reduction="none")
    )


def test_a_round_averages_half_of_the_clients_and_central_is_one_client(
    federation,
):
    own = federation.cell
    start = federation.start
    rng = np.random.default_rng([5, 3, 1])
    variates = [torch.zeros_like(start)] * 9
    clients = rng.choice(8, 4, replace=False).tolist()
    batches = own.batches(1)
    arm = ARMS["fedlc"]
    total = torch.zeros_like(start)
    for k in clients:  # FedLC: logits minus n_kc^(-1/4)
        counts = own.counts[k].tolist()
        shift = [-(n**-0.25) if n else -100.0 for n in counts]
        loss = partial(federation.loss, offset=torch.tensor(shift))
        total += len(batches[k]) * epoch(loss, start, batches[k], arm)[0]
    wanted = total / own.counts[clients].sum()
    found = average(federation, arm, start, [*variates], 1)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    average(federation, ARMS["scaffold"], start, variates, 1)
    torch.testing.assert_close(torch.stack(variates[:8]).mean(0), variates[8])
    assert {k for k in range(8) if variates[k].any()} == {*clients}
    rows = rng.permutation(np.concatenate(batches))
    arm = ARMS["central"]
    assert average(federation, arm, start, variates, 1).equal(
        epoch(federation.loss, start, rows, arm)[0]
    )


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_plays(federation, name):
    arm = ARMS[name]
    first = federation.evaluate(federation.start, arm.start)
    # Far too large a rate.
    told = list(play(federation, replace(arm, rate=0.3 * (arm.rate > 0)), 2))
    assert [row["round"] for row in told] == ([1, 2] if arm.rate else [0])
    assert {*__main__.METRICS} <= told[-1].keys()
    losses = [first.losses.mean(), *(row["held_loss"] for row in told)]
    assert np.isfinite(losses).all()
    assert not arm.old or (np.diff(losses) <= 0).all()
    found = candidates(federation, arm, first, 2 * first.flat, True)
    body = slice(-federation.size)
    assert [*found] == ["old"] * arm.old + [f"{step:g}" for step in arm.steps]
    for step in arm.steps:  # a fitted head, with its temperature, goes with its body
        model = found[f"{step:g}"]
        torch.testing.assert_close(model.flat[body], (1 + step) * first.flat[body])
        loss = float(federation.loss(model.flat, federation.cell.held_out))
        assert arm.fit == "never" or loss == pytest.approx(
            model.losses.mean(), abs=1e-4
        )


@pytest.mark.parametrize("skew", [0, 0.1])
def test_a_cell_divides_all_rows_and_knows_its_worst_client(skew):
    labels = np.arange(500) % 2
    client = cell.divided(np.arange(400) % 2, skew, 11)
    found = cell.Cell(
        np.ones((500, 4), dtype=np.int64), np.full(500, 4), labels, client, 11
    )
    sizes = np.bincount(client)
    assert found.counts.sum(1).tolist() == [n - round(n / 4) for n in sizes]
    assert sorted([*found.training, *found.held_out, *found.test]) == [*range(500)]
    guess = np.random.default_rng(1).integers(0, 2, 100)
    recall = np.array([(guess[c::2] == c).mean() for c in range(2)])
    own = [recall[labels[:400][client == k]] for k in range(8)]
    assert found.worst(guess) == pytest.approx(
        min(x.mean() for x in own if len(x) >= 20)
    )


def invoked(*line):
    """Return what a command prints on a wide terminal, with single spaces."""
    result = CliRunner().invoke(
        __main__.app,
        [*map(str, line)],
        env={"COLUMNS": "200"},
        catch_exceptions=False,
    )
    return " ".join(result.output.split())


def test_a_cell_is_loaded_and_repeated(tmp_path, monkeypatch):
    tokenizer = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel({f"w{n}": n for n in range(40)}, "w0")).save(str(tokenizer))
    BERT.save_pretrained(tmp_path)
    folders = {"minilm": str(tmp_path)}
    monkeypatch.setattr(pretrained, "source_of", lambda name: folders.get(name, name))
    other = tmp_path / "other"
    BERT.save_pretrained(other)
    shutil.copy(tokenizer, other)
    monkeypatch.setattr(cell, "ROWS", 160)
    number = np.random.default_rng(0).integers(1, 40, 600)
    table = pd.DataFrame({f"label {c}": number % 3 == c for c in range(3)})
    table.loc[::7, ["label 0", "label 1"]] = True  # some have two classes
    table["text"] = [f"w{n}" for n in number]
    table["split"] = np.array(["train", "validation", "test"])[np.arange(600) % 5 // 2]
    (tmp_path / "emotion").mkdir()
    table.to_parquet(tmp_path / "emotion" / "isear.parquet")
    assert [part.tolist() for part in cell._encoded(["", "w3"], tokenizer)] == [
        [[0] * 48, [3] + [0] * 47],
        [1, 1],
    ]
    found = cell.load("isear", 0.3, 11, tmp_path, tokenizer)
    assert len(found.test) == sum(i % 7 > 0 and i % 5 > 1 for i in range(600))
    assert (found.ids[:, 0] % 3 == found.labels).all()
    small = cell.load("isear", 0.3, 11, tmp_path, tokenizer, size=90, clients=3)
    assert (len(found.client), len(small.client)) == (160, 90)
    assert (found.clients, small.clients, small.counts.shape) == (8, 3, (3, 3))
    out = tmp_path / "rows.jsonl"
    options = ("--rounds=2", "--layers=2", f"--data-dir={tmp_path}", f"--out={out}")
    for seed in (11, 12):
        invoked("run", "isear", 0.3, seed, "--arms=step0,fedavg", *options)
    rows = pd.read_json(out, lines=True, precise_float=True)
    assert [*zip(rows["seed"], rows["arm"], rows["round"], strict=True)] == [
        (seed, *place)
        for seed in (11, 12)
        for place in (("step0", 0), ("fedavg", 1), ("fedavg", 2))
    ]
    place = {"data": "isear", "skew": 0.3} | __main__.SETTING
    place |= {"layers": 2, "rounds": 2}
    assert rows[[*place]].drop_duplicates().to_dict("records") == [place]
    # Another setting in the same file: the table keeps them apart.
    setting = ("--encoder=other", "--pooling=last", "--read=1,4", "--layers=2")
    setting += ("--size=90", "--tests=50", "--clients=3", "--rounds=1", "--bfloat16")
    files = (f"--encoder={other}", "--arms=fedavg", "--rates=fedavg=0.01", *options[2:])
    invoked("run", "isear", 0.3, 11, *setting, *files)
    row = json.loads(out.read_text().splitlines()[-1])
    told = {"encoder": "other", "pooling": "last", "read": "1,4", "layers": 2}
    told |= {"size": 90, "tests": 50, "clients": 3, "bfloat16": True, "rounds": 1}
    assert row.items() >= (told | {"rate": 0.01, "round": 1}).items()
    shown = invoked("table", out, "--ours=fedavg", *setting)
    assert f"fedavg {row['accuracy']:.3f} {row['macro_f1']:.3f}" in shown
    assert "step0" not in shown
    assert "step0" in invoked("table", out, "--ours=fedavg", *options[:2])


def test_the_tables_of_the_page_are_printed_from_its_rows():
    page = (RESULTS / "heads.md").read_text("utf-8")
    shown = invoked("table", RESULTS / "heads" / "rows.parquet")
    arms = re.findall(r"^\| `([\w.+-]+)`.*?\|(.*)\|$", page, flags=re.MULTILINE)
    # The laboratory has forgotten some arms, and so what they cost.
    assert {arm for arm, _ in arms} >= {"central", "ours-lowest", "scaffold"}
    for arm, figures in arms:
        line = " ".join([arm, *re.sub("[*|]", " ", figures).split()])
        assert line in shown or arm not in ARMS
    # Data, the best rival, its macro F1, ours, and how far ours is ahead of it.
    assert "dair_emotion IID ccvr 0.690 0.729 +0.039 ± 0.010" in shown
