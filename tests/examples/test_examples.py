"""The examples at toy size, by ``flwr run``, in simulation and in a deployment, without
a network.

Flower installs what an app declares when its run starts, unless told not to. It is not
told here: the examples' own ``[tool.uv]`` must be enough, with an empty cache and no
registry.
"""

import contextlib
import csv
import json
import re
import shlex
import shutil
import tomllib
import zipfile
from importlib import resources

import psutil
import pytest
from typer.testing import CliRunner

from tests.deployment.federation import ROOT, Federation

EXAMPLES = ROOT / "examples"
QUICKSTART = EXAMPLES / "quickstart"
INSTITUTIONS = EXAMPLES / "institutions"
SECURE = EXAMPLES / "secure-aggregation"
LANGUAGE = EXAMPLES / "llm-lora"
CLASSIFIER = EXAMPLES / "lora-classifier"
OWN = EXAMPLES / "own-csv"
BASELINE = ROOT / "baselines" / "label-skew-text"
TEXTS = ("a fine film , I liked it", "a dull film , I hated it")


class Run(Federation):
    """A Flower home, ports and a uv cache of their own; nothing that was started
    outlives it.
    """

    def __enter__(self):
        home = self.folder / "flower"
        home.mkdir()
        (home / "config.toml").write_text(
            '[superlink]\ndefault = "local"\n\n'
            '[superlink.local]\naddress = ":local:"\n\n'
            f'[superlink.deployment]\naddress = "127.0.0.1:{self.port}"\n'
            "insecure = true\n"
        )
        return self

    def left(self):
        """Return what still runs, children first: Ray's hide their environment and
        outlive parents.
        """
        found = list(super().left())
        for process in found:
            with contextlib.suppress(psutil.Error):
                yield from process.children(recursive=True)
        yield from found

    def flower(self, name, arguments):
        """Run a Flower command that ends, and return its output; the managed SuperLink
        is our own.
        """
        environment = (
            f"UV_OFFLINE=1 UV_CACHE_DIR={self.folder / 'uv'} "
            f"FLWR_LOCAL_SUPERLINK_HTTP_API_PORT={self.node_ports[0]} "
            f"FLWR_LOCAL_CONTROL_API_PORT={self.node_ports[1]}"
        )
        return self.run(name, f"{environment} {arguments}")

    def simulated(self, app, clients, settings):
        """Return the log of an app that ran to its end in simulation."""
        size = f"num-supernodes={clients} client-resources-num-cpus=1"
        options = (
            f"--stream --federation-config {shlex.quote(size)} -c "
            f"{shlex.quote(settings)}"
        )
        log = self.flower("run", f"flwr run {app} local {options}")
        assert self.status("local") == "finished:completed", log
        return log

    def serve(self, sites):
        """Start a SuperLink and a SuperNode for each site, in one Flower home, as the
        quickstart's page does; each knows its csv.
        """
        offline = f"UV_OFFLINE=1 UV_CACHE_DIR={self.folder / 'uv'}"
        self.start(
            "superlink", f"{offline} flower-superlink --insecure --port {self.port}"
        )
        self.until(self.listens, "the SuperLink listens")
        for node, site in enumerate(sites):
            own = f'csv="{site}" site="site {node}"'
            config = f"partition-id={node} num-partitions={len(sites)} {own}"
            self.start(
                f"node{node}",
                f"flower-supernode --insecure --superlink 127.0.0.1:{self.port} "
                f"--port {self.node_ports[node]} --node-config {shlex.quote(config)}",
            )

    def deployed(self, app, settings):
        """Return the log of an app that ran to its end on the SuperLink that was
        started.
        """
        log = self.flower(
            app.name, f"flwr run {app} deployment --stream -c {shlex.quote(settings)}"
        )
        assert self.status("deployment") == "finished:completed", self.logs()
        return log

    def status(self, connection):
        """Return how all runs ended; ``flwr run`` itself ends with 0 whatever
        happens.
        """
        self.flower("list", f"flwr list {connection} --format json > runs.json")
        text = (self.folder / "runs.json").read_text()
        runs = json.loads(text[text.index("{") :])["runs"]
        return " ".join({run["status"] for run in runs})


@pytest.fixture
def run(tmp_path):
    with Run(tmp_path) as run:
        yield run


def save_model(folder, name, **sizes):
    """Save a random model of this class of transformers with the bundled tokenizer."""
    import transformers

    bundled = resources.files("fedrot.simulations.data") / "bundled" / "tokenizer.json"
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(bundled), pad_token="[PAD]"
    )
    tokenizer.save_pretrained(folder)
    model = getattr(transformers, name)
    settings = model.config_class(vocab_size=len(tokenizer), **sizes)
    model(settings).save_pretrained(folder)
    return folder


def save_rows(file, *rows):
    """Write rows in a folder that it makes; return the folder."""
    file.parent.mkdir(exist_ok=True)
    with file.open("w", newline="") as opened:
        csv.writer(opened).writerows(rows)
    return file.parent


def reviews(count):
    """Return a header and reviews of two classes."""
    texts = ((f"{TEXTS[n % 2]} {n} times", n % 2) for n in range(count))
    return [("text", "label"), *texts]


#: Sizes of a small BERT.
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A model of random weights and 400 reviews, as settings of the quickstart."""
    folder = tmp_path_factory.mktemp("toy")
    model = save_model(
        folder / "model",
        "BertForSequenceClassification",
        **SIZES,
        max_position_embeddings=32,
    )
    data = save_rows(folder / "data" / "train.csv", *reviews(400))
    names = f'model-name="{model}" dataset-name="{data}"'
    return f"{names} max-length=32 num-server-rounds=1"


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    """The csv of two sites, of 120 and of sixty reviews."""
    folder = tmp_path_factory.mktemp("sites")
    for name, count in (("north", 120), ("south", 60)):
        header, *rows = reviews(count)
        named = [(text, ("bad", "good")[label]) for text, label in rows]
        save_rows(folder / f"{name}.csv", header, *named)
    return [folder / "north.csv", folder / "south.csv"]


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """A language model of random weights and some instructions, as settings of its
    example.
    """
    folder = tmp_path_factory.mktemp("language")
    model = save_model(
        folder / "model",
        "GPT2LMHeadModel",
        n_embd=32,
        n_layer=1,
        n_head=2,
        n_positions=64,
    )
    rows = [("Say how you liked it.", text) for text in TEXTS * 12]
    data = save_rows(folder / "data" / "train.csv", ("instruction", "output"), *rows)
    return (
        f'model.name="{model}" static.dataset.name="{data}" strategy.method="exact" '
        "train.max-steps=3 train.seq-length=32"
    )


def aligned_once(log):
    """Check a log: two replies were aligned, and both clients evaluated the average."""
    assert re.search(r"Round 1: .*2 (replies )?accepted", log), log
    assert re.search(r"Round 1: .*rotation", log), log
    assert "accuracy" in log, log


def test_the_quickstart_runs_in_simulation_and_fits_the_task_head_as_its_page_says(
    run, toy, tmp_path
):
    app = tmp_path / "app"
    shutil.copytree(
        QUICKSTART, app, ignore=shutil.ignore_patterns("__pycache__", "*.fab")
    )
    page = (QUICKSTART / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(
        r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE
    )
    client, server = (
        app / "huggingface_example" / f"{side}_app.py" for side in ("client", "server")
    )
    client.write_text(
        f"{client.read_text(encoding='utf-8')}\n\n{block}", encoding="utf-8"
    )
    added = re.findall(r"^\+( .*\n)", page, flags=re.MULTILINE)[-1]
    code = server.read_text(encoding="utf-8")
    line = "        model.config,\n"
    assert code.count(line) == 1
    server.write_text(code.replace(line, f"{line}{added}"), encoding="utf-8")
    log = run.simulated(app, 2, toy)
    aligned_once(log)
    # Two clients choose by twenty rows each, and report on twenty others.
    assert re.search(r"Before round 1, 2 clients, 40 held-out rows", log), log


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_all_run_unchanged_on_a_superlink_with_two_supernodes(
    run, toy, language, sites
):
    """One federation for all: every request to a node starts a process, and these are
    slow.
    """
    run.serve(sites)
    aligned_once(run.deployed(QUICKSTART, toy))
    log = run.deployed(CLASSIFIER, f'{toy} lora-ranks="2+4" fraction-evaluate=0.0')
    assert "factors of 4 modules have no mean: their ranks differ" in log, log
    log = run.deployed(LANGUAGE, f"{language} num-server-rounds=1")
    assert "Round 1: 2 adapters: this average is " in log, log
    log = run.deployed(INSTITUTIONS, "width=32 rows=100 epochs=1")
    assert re.findall(r"loss of (.+):", log)[2:] == [
        "plain average",
        "aligned average",
    ], log
    log = run.deployed(SECURE, "clients=2 rows=60 num-server-rounds=1")
    assert re.search(r"loss before: [\d.]+, after 1 rounds: [\d.]+", log), log
    log = run.deployed(OWN, f'{model_of(toy)} labels="bad,good" num-server-rounds=1')
    assert rows_of_sites(log) == {"site 0": 24, "site 1": 12}, log


@pytest.mark.long
def test_three_supernodes_have_a_row_each_and_a_line_in_the_report(
    run, toy, sites, tmp_path
):
    out = tmp_path / "out"
    run.serve([*sites, sites[0]])
    settings = f'{model_of(toy)} labels="bad,good" num-server-rounds=1 out="{out}"'
    log = run.deployed(OWN, settings)
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    tested = {row["site"]: row["rows"] for row in rows if row.get("stage") == "site"}
    assert tested == {"site 0": 24, "site 1": 12, "site 2": 24}, log
    run.run("report", f"fedrot report {out / 'rows.jsonl'}")
    page = (out / "rows.html").read_text(encoding="utf-8")
    assert all(site in page for site in tested)


def model_of(settings):
    """Return the setting of the model's name."""
    return next(part for part in settings.split() if part.startswith("model-name"))


def rows_of_sites(log):
    """Return the number of test rows by site, from the last lines of a log."""
    found = re.findall(r"([\w ]+): test rows: ([\d.]+)", log)
    return {site: float(rows) for site, rows in found}


def test_every_site_has_a_csv_and_figures_of_its_own(run, toy, sites, tmp_path):
    from transformers import AutoModelForSequenceClassification

    out = tmp_path / "out"
    log = run.simulated(
        OWN,
        2,
        f'{model_of(toy)} labels="bad,good" data-folder="{sites[0].parent}" '
        f'num-server-rounds=1 out="{out}"',
    )
    assert rows_of_sites(log) == {"north": 24, "south": 12}, log
    # One in five rows chooses the head; no other row does.
    assert re.search(r"Before round 1, 2 clients, 36 held-out rows", log), log
    rows = (out / "rows.jsonl").read_text()
    assert "north: accuracy" in rows
    assert '"site": "north", "rows": 24' in rows
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert model.config.id2label == {0: "bad", 1: "good"}
    assert len(model.config.fedrot["priors"]) == 2
    assert (out / "tokenizer_config.json").exists()


@pytest.mark.long
def test_institutions_meet_once(run):
    log = run.simulated(INSTITUTIONS, 3, "width=32 rows=100 epochs=1")
    losses = dict(re.findall(r"loss of (.+): ([\d.]+)", log))
    alone = [f"institution {number}" for number in range(3)]
    assert list(losses) == [*alone, "plain average", "aligned average"], log
    assert all(0 < float(loss) < 3 for loss in losses.values())
    assert losses["plain average"] != losses["aligned average"]


@pytest.mark.long
def test_clients_align_under_secure_aggregation(run):
    log = run.simulated(SECURE, 3, "rows=60 num-server-rounds=1")
    found = re.search(r"loss before: ([\d.]+), after 1 rounds: ([\d.]+)", log)
    assert found, log
    assert float(found[2]) < float(found[1]) - 0.01


@pytest.mark.long
def test_a_language_model_is_tuned_by_adapters(run, language, tmp_path):
    import peft
    from transformers import GPT2LMHeadModel

    saved = tmp_path / "saved"
    log = run.simulated(
        LANGUAGE, 2, f'{language} num-server-rounds=2 train.save-folder="{saved}"'
    )
    for server_round in (1, 2):
        assert f"Round {server_round}: 2 adapters: this average is " in log, log
    model = shlex.split(language)[0].removeprefix("model.name=")
    tuned = peft.PeftModel.from_pretrained(
        GPT2LMHeadModel.from_pretrained(model), saved
    )
    assert tuned.peft_config["default"].r == 8
    factors = [
        tensor for name, tensor in tuned.state_dict().items() if "lora_B" in name
    ]
    assert all(tensor.abs().max() > 0 for tensor in factors)


def test_clients_of_different_ranks_train_a_classifier(run, toy, tmp_path):
    import peft

    log = run.simulated(
        CLASSIFIER, 2, f'{toy} lora-ranks="2+4" save-folder="{tmp_path / "saved"}"'
    )
    assert "Round 1: 2 adapters: this average is " in log, log
    assert "factors of 4 modules have no mean: their ranks differ" in log, log
    assert "accuracy" in log, log
    assert peft.PeftConfig.from_pretrained(tmp_path / "saved").r == 4


APPS = [QUICKSTART, OWN, INSTITUTIONS, SECURE, LANGUAGE, CLASSIFIER]


@pytest.mark.parametrize("app", APPS, ids=lambda app: app.name)
def test_every_dependency_is_taken_from_beside_flower(app):
    project = tomllib.loads((app / "pyproject.toml").read_text())
    declared = {
        re.split(r"[\[<>=!~; ]", text)[0] for text in project["project"]["dependencies"]
    }
    assert set(project["tool"]["uv"]["exclude-dependencies"]) == declared


@pytest.mark.parametrize("app", [*APPS, BASELINE], ids=lambda app: app.name)
def test_flwr_build_bundles_it_within_the_limits_of_flowers_hub(
    app, tmp_path, monkeypatch
):
    from flwr.cli.app import app as flwr

    monkeypatch.chdir(tmp_path)
    copy = shutil.copytree(
        app, tmp_path / app.name, ignore=shutil.ignore_patterns("__pycache__", ".*")
    )
    built = CliRunner().invoke(flwr, ["build", "--app", str(copy)])
    assert built.exit_code == 0, built.output
    (bundle,) = tmp_path.glob("*.fab")
    with zipfile.ZipFile(bundle) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    # What the hub does not take, such as images, Flower leaves out.
    own = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert set(files) == own - {"results.csv"} | {".info/CONTENT"}
    assert len(files) <= 1000
    assert max(map(len, files.values())) <= 1e6
    assert sum(map(len, files.values())) <= 1e7
    assert files["LICENSE"] == (ROOT / "LICENSE").read_bytes()
    keys = (
        ["title", "url", "labels", "dataset"]
        if app == BASELINE
        else ["tags", "dataset", "framework"]
    )
    matter = "---\n" + "".join(f"{key}: .+\n" for key in keys) + "---\n\n# "
    assert re.match(matter, files["README.md"].decode())
    declared = tomllib.loads(files["pyproject.toml"].decode())["tool"]["flwr"]["app"]
    assert declared["fab-format-version"] == 1
    assert (
        f"flwr=={declared['flwr-version-target']}\n"
        in (ROOT / "constraints.txt").read_text()
    )


def test_the_readme_shows_every_line_that_turns_fedavg_into_fedrot():
    """Undone, its lines leave a server without fedrot."""
    readme = (QUICKSTART / "README.md").read_text()
    diff, _ = re.findall(r"```diff\n(.*?)```", readme, flags=re.DOTALL)
    server = (QUICKSTART / "huggingface_example" / "server_app.py").read_text()
    for line in re.findall(r"^\+(.*)\n", diff, flags=re.MULTILINE):
        assert server.count(f"{line}\n") == 1
        server = server.replace(f"{line}\n", "")
    code = server.partition('"""')[2].partition('"""')[2]
    assert "fedrot" not in code.lower()
