"""The code in the documentation runs."""

import importlib
import logging
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.clientapp import ClientApp
from peft import LoraConfig
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
)
from typer.main import get_command

from fedrot.aggregation import aggregations, registry
from fedrot.collect.statistics import STATISTIC_KINDS
from fedrot.simulations import strategy
from fedrot.simulations.cli.app import app
from fedrot.simulations.federation import cells
from fedrot.simulations.federation.grids import local_clients
from fedrot.strategies import LabelledRows, answer_with_sums
from tests.simulations.commands import run
from tests.simulations.saved.folders import tokenizer
from tests.strategies.fakes import FakeGrid, reply, tensors_of

DOCS = Path(__file__).parents[2] / "docs"

#: Python that readers see, and what it needs first, which stands in a comment.
_CODE = re.compile(
    r"^(?:```python|<!-- setup)\n(.*?)^(?:```|-->)$", flags=re.DOTALL | re.MULTILINE
)
#: Pages with tests of their own below.
_TESTED = {
    "how-to/own-model.md",
    "how-to/serve.md",
    "how-to/statistics.md",
    "symptoms.md",
}
#: What pages print.
_PRINTED = {
    "explanation/stream.md": r"canonical=False: [3-9]\d\.\d% of the distance left\n"
    r"canonical=True: 0\.0% of the distance left\n",
    "explanation/chance.md": r"noise: found \d\.\d%, chance \d\.\d%\n"
    r"turned: found 99\.\d%, .*\n",
    "how-to/saved-models.md": r"Clients are in different coordinates.*\n",
}


def _code(page):
    return _CODE.findall((DOCS / page).read_text(encoding="utf-8"))


def _executed(page, count):
    """Run the Python of a page as one script, and return its names."""
    blocks = _code(page)
    assert len(blocks) == count
    torch.manual_seed(0)
    scope = {
        "__name__": "page",
        "grid": FakeGrid(dict.fromkeys((1, 2, 3), _unchanged)),
    }
    for block in blocks:
        exec(compile(block, page, "exec"), scope)
    return scope


def _unchanged(message):
    """Answer as a client that learned nothing."""
    return reply(message, tensors_of(message.content["arrays"]), 10)


_PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize(
    "page", [page for page in _PAGES if _code(page) and page not in _TESTED]
)
def test_the_python_of_every_page_runs(
    page,
    tmp_path,
    monkeypatch,
    capsys,
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(strategy, "KINDS", dict(strategy.KINDS))
    monkeypatch.setattr(cells, "RUNS", dict(cells.RUNS))
    _executed(page, len(_code(page)))
    assert re.fullmatch(
        _PRINTED.get(page, ".*"), capsys.readouterr().out, flags=re.DOTALL
    )


def _batches():
    return [{"input_ids": torch.randint(40, (60, 8)), "labels": torch.arange(60) % 6}]


@pytest.mark.parametrize("page", ["../README.md", "symptoms.md"])
def test_every_block_of_the_front_pages_runs(page, tmp_path, monkeypatch):
    """With what the pages call the reader's own: an app, a grid, a model, and the
    commands' files.
    """
    monkeypatch.chdir(tmp_path)
    config = BertConfig(
        vocab_size=40,
        num_labels=6,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = BertForSequenceClassification(config)
    app = ClientApp()
    for folder in ("my-encoder", "path/to/encoder", "models/a", "models/b"):
        model.save_pretrained(folder)
        tokenizer(tmp_path / folder)
    rows = "\n".join(f"w{n % 30},LABEL_{n % 6},c{n % 3}" for n in range(90))
    Path("mine.csv").write_text(f"text,label,client\n{rows}\n", encoding="utf-8")

    def client(message):
        if message.metadata.message_type in ("train", "evaluate"):
            return _unchanged(message)
        return app(message, Context(1, 1, {}, RecordDict(), {}))

    own = {
        "app": app,
        "grid": FakeGrid({1: client, 2: client}),
        "model": model,
        "build_model": lambda: BertForSequenceClassification(config),
        "training": _batches,
        "held_out": _batches,
        "peft_config": LoraConfig(
            target_modules=["query"], modules_to_save=["classifier"]
        ),
        "ArrayRecord": ArrayRecord,
        "AutoModelForSequenceClassification": AutoModelForSequenceClassification,
    }
    if page == "symptoms.md":  # Its first entry links to this call.
        answer_with_sums(
            app, lambda *_: LabelledRows(own["build_model"], _batches, _batches)
        )
    text = (DOCS / page).read_text(encoding="utf-8")
    for kind, block in re.findall(
        r"^```(\w+)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE
    ):
        if kind == "toml":
            assert (
                "fedrot" in tomllib.loads(block)["tool"]["uv"]["exclude-dependencies"]
            )
        elif kind == "bash":
            for program, *command in map(shlex.split, block.splitlines()):
                assert program in ("fedrot", "pip")
                if program == "fedrot":
                    run(*command, *(["--dry-run"] if command[0] == "simulate" else []))
        else:
            after = (
                re.sub(r"^(-.*\n|[ +])", "", block, flags=re.MULTILINE)
                if kind == "diff"
                else block
            )
            exec(compile(after, page, "exec"), own)


def test_the_page_about_every_site_makes_a_page_of_all_sites(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = "how-to/checkpoints.md"
    _executed(page, len(_code(page)))
    text = (DOCS / page).read_text(encoding="utf-8")
    (command,) = re.findall(
        r"^```bash\nfedrot (report .*)\n```$", text, flags=re.MULTILINE
    )
    run(*shlex.split(command))
    made = Path("rows.html").read_text(encoding="utf-8")
    assert [n for n in (7, 8) if f"accuracy of site {n}" not in made] == []


def test_the_page_about_comparisons_lists_the_named_strategies():
    text = (DOCS / "how-to/compare.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \| (.*) \|$", text, flags=re.MULTILINE)
    assert listed == [(name, own["says"]) for name, own in strategy.NAMED.items()]


def test_the_page_about_commands_lists_all_of_them():
    text = (DOCS / "reference/commands.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `fedrot (\S+)` \|", text, flags=re.MULTILINE)
    assert listed == list(get_command(app).commands)


def test_the_page_about_aggregations_lists_all_of_them():
    text = (DOCS / "how-to/statistics.md").read_text(encoding="utf-8")
    for entry in aggregations():
        if not entry.path.startswith("reproductions."):
            names = (
                ", ".join(f"`{name}`" for name in each)
                for each in (entry.needs, entry.inputs)
            )
            cells = [f"`{entry.name}`", f"`{entry.path}`", *names, entry.meaning]
            assert f"| {' | '.join(cell or '-' for cell in cells)} |" in text
    for kind in STATISTIC_KINDS.values():
        flags = (
            "yes" if flag else "no" for flag in (kind.follows_rotations, kind.collect)
        )
        assert f"| `{kind.name}` | {kind.meaning} | {' | '.join(flags)} |" in text


def test_the_page_about_aggregations_runs(monkeypatch):
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    monkeypatch.setattr(
        "fedrot.collect.statistics.STATISTIC_KINDS", dict(STATISTIC_KINDS)
    )
    scope = _executed("how-to/own-model.md", 3)
    name = "bert.embeddings.word_embeddings.weight"
    last = scope["model"].state_dict()[name]
    merged = scope["merged"][name]
    # Only the last client read token 3; nobody read token 0.
    torch.testing.assert_close(merged[3], last[3])
    torch.testing.assert_close(merged[0], scope["aggregator"].mean.result()[name][0])
    first = 2 * scope["aggregator"].mean.result()[name] - last
    torch.testing.assert_close(merged[2], (2 * first[2] + last[2]) / 3)


def test_the_page_about_serving_gives_one_answer_in_every_form(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = _executed("how-to/serve.md", 13)
    assert scope["wide"].classifier.in_features == 6 * 384
    scores = scope["logits"].softmax(-1).tolist()
    for answer, row in zip(scope["answers"], scores, strict=True):
        served = {entry["label"]: entry["score"] for entry in answer}
        expected = {name: row[number] for number, name in scope["names"].items()}
        assert served == pytest.approx(expected, abs=1e-5)
    batch = AutoTokenizer.from_pretrained("served")(
        scope["texts"], padding=True, return_tensors="pt"
    )
    merged = AutoModelForSequenceClassification.from_pretrained("merged")
    with torch.no_grad():
        found = merged(**batch).logits
        expected = scope["adapted"].eval()(**batch).logits
    torch.testing.assert_close(found, expected)


def test_the_app_of_the_page_about_statistics_runs(
    capsys,
    caplog,
    monkeypatch,
    tmp_path,
):
    """As the three files that the page names."""
    logging.getLogger("flwr").propagate = True
    caplog.set_level(logging.INFO)
    monkeypatch.syspath_prepend(tmp_path)
    files = ("task", "client_app", "server_app")
    for name, block in zip(files, _code("how-to/statistics.md"), strict=False):
        assert block.startswith(f"# {name}.py\n")
        (tmp_path / f"{name}.py").write_text(block, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
    client = importlib.import_module("client_app").client
    server = importlib.import_module("server_app").server
    server(local_clients(client, 3), Context(1, 0, {}, RecordDict(), {}))
    _executed("how-to/statistics.md", 3)
    for name in files:
        monkeypatch.delitem(sys.modules, name)
    found = re.findall(r"round (\d): accuracy (\S+)\n", capsys.readouterr().out)
    assert [number for number, _ in found] == ["0", "1", "2", "3"]
    assert float(found[-1][1]) >= 0.75
    text = (DOCS / "how-to/statistics.md").read_text(encoding="utf-8")
    (line,) = re.findall(
        r"^Statistics: every reply needs .*$", text, flags=re.MULTILINE
    )
    assert f"{line}\n" in caplog.text
