"""A SuperLink and four SuperNodes, started as docs/how-to/deploy.md says: three of them
go wrong.
"""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedrot
from tests.deployment.app.scenario.task import (
    BROKEN,
    CLIENTS,
    DYING,
    HONEST,
    ROUNDS,
    SCRAMBLED,
    TRAINING,
    build_model,
    examples,
    trained,
)
from tests.deployment.federation import Federation
from tests.examples import test_examples
from tests.models import largest_difference

APP = Path(__file__).parent / "app"
#: The page's commands without encryption.
INSECURE = {f"insecure-{name}" for name in ("superlink", "node", "connection", "run")}
toy = test_examples.toy


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Certificates, keys, and a SuperLink that knows the keys of four nodes."""
    folder = tmp_path_factory.mktemp("deployment")
    shutil.copytree(
        APP, folder / "my-app", ignore=shutil.ignore_patterns("__pycache__")
    )
    with Federation(folder) as federation:
        federation.run("certificates")
        federation.start("superlink", federation.command("superlink"))
        federation.until(federation.listens, "the SuperLink listens")
        federation.run("connection")
        federation.run("register")
        yield federation


@pytest.fixture(scope="module")
def results(federation):
    """The run: two rounds, and a node that is killed while it trains in the second
    one.
    """
    results = federation.folder / "results"
    for client in CLIENTS:
        # The page shows two ways; the second one's loop is tried by a node that stays.
        way = "node-for-ever" if client == BROKEN else "node"
        federation.start(f"node{client}", federation.command(way, client))
    run = federation.start("run", federation.command("run"))

    def training():
        assert run.poll() is None, f"The run ended too early.\n{federation.logs()}"
        return (results / TRAINING).exists()

    federation.until(training, "the second round")
    federation.kill(f"node{DYING}")
    federation.until(lambda: run.poll() is not None, "the run ends")
    assert run.returncode == 0, federation.logs()
    assert (results / "metrics.json").exists(), federation.logs()
    return results


def expected(scrambled=False):
    """Return the model after two rounds in float64: weighted means of who is left in
    each.

    Args:
        scrambled: what the means would be if nobody undid the scrambling.
    """
    model = build_model()
    symmetry = fedrot.symmetry_of(model.config, model.state_dict())
    tensors = {name: tensor.double() for name, tensor in model.state_dict().items()}
    for server_round, clients in (
        (1, (HONEST, SCRAMBLED, DYING)),
        (2, (HONEST, SCRAMBLED)),
    ):
        updates = {client: trained(tensors, client, server_round) for client in clients}
        if scrambled:
            updates[SCRAMBLED] = fedrot.random_equivalent(
                updates[SCRAMBLED], symmetry, server_round
            )
        total = sum(map(examples, clients))
        tensors = {
            name: sum(
                (examples(c) / total * updates[c][name] for c in clients),
                torch.tensor(0.0),
            )
            for name in tensors
        }
    return tensors


def rows(results):
    return [
        json.loads(line)
        for line in (results / "alignment.jsonl").read_text().splitlines()
    ]


def test_the_model_is_the_mean_of_who_is_left_unscrambled(results):
    model = load_file(results / "model.safetensors")
    assert largest_difference(model, expected()) < 1e-5
    assert largest_difference(model, expected(scrambled=True)) > 0.1


def test_nan_is_dropped_by_name(results):
    aside = [row for row in rows(results) if "dropped" in row]
    assert [(row["round"], row["client"]) for row in aside] == [
        (1, BROKEN),
        (2, BROKEN),
    ]
    assert all("'classifier.weight' holds NaN" in row["dropped"] for row in aside)


def test_the_dead_node_is_a_failure_of_its_round(results):
    metrics = json.loads((results / "metrics.json").read_text())
    counts = [
        (
            metrics[str(n)]["fedrot-replies-dropped"],
            metrics[str(n)]["fedrot-replies-failed"],
        )
        for n in range(1, ROUNDS + 1)
    ]
    assert counts == [(1, 0), (1, 1)]
    (failed,) = [row for row in rows(results) if "failed" in row]
    assert failed["round"] == 2
    assert "heartbeat" in failed["failed"]
    aligned = {
        (row["round"], row["client"]) for row in rows(results) if "before" in row
    }
    assert aligned == {
        (1, HONEST),
        (1, SCRAMBLED),
        (1, DYING),
        (2, HONEST),
        (2, SCRAMBLED),
    }


@pytest.mark.usefixtures("results")
def test_flower_lists_the_run_and_the_nodes(federation):
    (run,) = listed(federation, "runs")["runs"]
    assert run["status"] == "finished:completed"
    nodes = listed(federation, "nodes")["nodes"]
    assert sorted(node["status"] for node in nodes) == [
        "offline",
        "online",
        "online",
        "online",
    ]
    tried = federation.used | INSECURE
    assert tried == set(federation.commands), (
        "The page has a command that nobody tried."
    )


def listed(federation, name):
    """Return what a command of the page lists, as JSON."""
    text = federation.run(name, f"{federation.command(name).rstrip()} --format json")
    return json.loads(text[text.index("{") :])


@pytest.fixture(scope="module")
def stranger(federation):
    """A key that nobody registered and an authority that nobody trusts, in a folder of
    their own.
    """
    (federation.folder / "stranger").mkdir()
    federation.run("stranger", f"cd stranger\n{federation.command('certificates')}")


AUTHORITY = "--root-certificates certificates/ca.crt"
KEY = "--auth-supernode-private-key keys/node$NODE"
#: Changes to the documented command of a node that keep it out, and what it says then.
REFUSED = {
    "another key": (
        {KEY: "--auth-supernode-private-key stranger/keys/node0"},
        "[code: 2004]",
    ),
    "no key": ({KEY: ""}, "SuperNode authentication is enabled"),
    "another authority": (
        {AUTHORITY: "--root-certificates stranger/certificates/ca.crt"},
        "certificate verify failed",
    ),
    "no TLS": (
        {AUTHORITY: "--insecure", KEY: ""},
        "Failed to initialize the connection",
    ),
}


@pytest.mark.usefixtures("stranger")
@pytest.mark.parametrize("what", REFUSED)
def test_a_node_is_refused(federation, what):
    changes, complaint = REFUSED[what]
    command = federation.command("node", port=federation.spare_port)
    for old, new in changes.items():
        assert old in command
        command = command.replace(old, new)
    # It would try for ever where it finds no connection.
    code = federation.wait(what, f"{command.rstrip()} --max-retries 0")
    log = federation.log(what)
    assert code != 0
    assert complaint in log, log
    assert "SuperNode ID" not in log, "It was let in."


@pytest.mark.usefixtures("stranger")
def test_flwr_refuses_a_server_of_another_authority(federation):
    connection = federation.command("connection")
    for old, new in (
        ("superlink.secure", "superlink.other"),
        ("certificates/", "stranger/certificates/"),
    ):
        assert old in connection
        connection = connection.replace(old, new)
    federation.run("other-connection", connection)
    code = federation.wait(
        "other-runs", federation.command("runs").replace("secure", "other")
    )
    assert code != 0
    # This is all that flwr says.
    assert "Connection to the SuperLink is unavailable" in federation.log("other-runs")


@pytest.mark.long
def test_the_quickstart_runs_without_encryption(toy, tmp_path):
    shutil.copytree(test_examples.EXAMPLES, tmp_path / "examples")
    with Federation(tmp_path, nodes=2) as federation:
        offline = f"export UV_OFFLINE=1 UV_CACHE_DIR={tmp_path / 'uv'}\n"
        federation.start(
            "superlink", offline + federation.command("insecure-superlink")
        )
        federation.until(federation.listens, "the SuperLink listens")
        federation.run("insecure-connection")
        for node in range(2):
            federation.start(f"node{node}", federation.command("insecure-node", node))
        run = f"{federation.command('insecure-run').rstrip()} -c {shlex.quote(toy)}"
        test_examples.aligned_once(federation.run("run", run))
        assert federation.used == INSECURE
