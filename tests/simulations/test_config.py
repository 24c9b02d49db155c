"""Bad input is refused before anything starts, each with its own message."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fedrot.anchors import ANCHORS
from fedrot.options import AlignmentOptions
from fedrot.simulations.arm import EVIDENCE, JOINED, Arm, registered
from fedrot.simulations.cli.app import app
from fedrot.simulations.cli.commands import BAD_INPUT
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.grids import bundled_grids, read_grid
from fedrot.symmetry import WHOLE_MODEL
from fedrot.symmetry.groups import DEFAULT_PARTS
from tests.simulations.commands import contents, invoke

#: The anchor that is not named.
RUNNING = AlignmentOptions.anchor

BAD_OPTIONS = {
    "unknown data set": (["--data", "no_such_corpus"], "no_such_corpus"),
    "text column missing": (["--text-column", "body"], "body"),
    "label column missing": (["--label-column", "emotion"], "emotion"),
    "alpha not positive": (["--partition", "dirichlet:0"], "alpha"),
    "unknown partition": (["--partition", "sorted"], "sorted"),
    "too many classes per client": (["--partition", "pathological:99"], "99"),
    "partition column missing": (["--partition", "column:country"], "country"),
    "empty partition": (["--clients", "50", "--train-limit", "20"], "50"),
    "no client": (["--clients", "0"], "Error in --clients:"),
    "unknown arm": (["--arms", "plain,rotated"], "rotated"),
    "unknown anchor": (["--arms", "attention@median"], "median"),
    "unknown aggregation": (["--arms", "aligned/median"], "regmean"),
    "texts for no pretraining": (
        ["--set", "pretrain_data=sst2"],
        "--set pretrain_data has an effect only with --start pretrained",
    ),
    "unknown task": (["--task", "translation"], "mlm"),
    "unknown architecture": (
        ["--architecture", "rnn"],
        "'bert', 'distilbert', 'gpt2', 'llama' or 'vit'",
    ),
    "architecture of another task": (
        ["--task", "mlm", "--architecture", "gpt2"],
        "choose bert or distilbert",
    ),
    "vision of text": (["--task", "image", "--architecture", "bert"], "choose vit"),
    "two architectures": (["--model", "x", "--architecture", "bert"], "is for models from scratch"),
    "odd rotary heads": (
        ["--architecture", "llama", "--set", "width=30", "--set", "heads=2"],
        "heads of llama need an even width",
    ),
    "no data for entities": (["--task", "ner"], "there is no bundled data set for task 'ner'"),
    "no such entities": (["--task", "ner", "--data", "no_such_corpus"], "no_such_corpus"),
    "images of text": (["--task", "image", "--data", "goemotions_ekman"], "goemotions_ekman"),
    "kind of labels of tags": (
        ["--task", "ner", "--data", "ewt", "--label-kind", "multi"],
        "label_kind is for tasks 'classification' and 'image'",
    ),
    "unknown start": (["--start", "cold"], "Error in --start:"),
    "same arm twice": (["--arms", "plain,plain"], "once"),
    "no seed": (["--seeds", "0"], "Error in --seeds:"),
    "odd heads": (["--set", "width=30", "--set", "heads=4"], "not a multiple"),
    "learning rate": (["--lr", "0"], "Error in --lr:"),
    "one model from different starts": (
        ["--start", "different", "--model", "minilm"],
        "initialises a model for each client",
    ),
    "late starters": (["--start", "different", "--set", "fraction_train=0.5"], "fraction_train 1"),
}


@pytest.mark.parametrize("case", sorted(BAD_OPTIONS))
def test_bad_options_end_with_code_2_and_say_what_is_wrong(case: str, tmp_path: Path) -> None:
    options, expected = BAD_OPTIONS[case]
    result = CliRunner().invoke(app, ["simulate", "--out", str(tmp_path / "run"), *options])
    assert result.exit_code == 2, result.output
    assert expected.lower() in " ".join(result.output.lower().split())
    assert not (tmp_path / "run" / "rows.jsonl").exists()


def test_a_hub_name_without_network_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    options = ["simulate", "--out", str(tmp_path / "run"), "--data", "someone/some-data"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 2, result.output
    assert "someone/some-data" in result.output
    assert "goemotions_ekman" in result.output


def test_an_unsupported_model_is_refused_where_weights_are_to_be_moved(tmp_path: Path) -> None:
    from transformers import XLNetConfig

    XLNetConfig(n_layer=1, d_model=8, n_head=2, d_inner=8, vocab_size=6000).save_pretrained(tmp_path)
    options = ["simulate", "--out", str(tmp_path / "run"), "--model", str(tmp_path)]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 2, result.output
    assert "The architecture 'xlnet' is not supported" in " ".join(result.output.split())


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"precious": 1}\n')
    result = CliRunner().invoke(app, ["simulate", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "has a run of another kind" in " ".join(result.output.split())
    assert (tmp_path / "rows.jsonl").read_text() == '{"precious": 1}\n'


@pytest.mark.parametrize("of_grid", [False, True])
def test_a_dry_run_checks_everything_and_writes_nothing(of_grid: bool, tmp_path: Path) -> None:
    grid = tmp_path / "grid.toml"
    grid.write_text("[base]\ntrain_limit = 40\ntest_limit = 20\nseeds = 2\n[[setting]]\nclients = 2\n")
    settings = ["--train-limit", "40", "--test-limit", "20", "--seeds", "2", "--clients", "2"]
    options: list[object] = [grid] if of_grid else [*settings]
    (tmp_path / "rows.jsonl").write_text('{"precious": 1}\n')
    before = contents(tmp_path)
    code, output = invoke("simulate", *options, "--out", tmp_path, "--dry-run")
    assert code == 0, output
    assert "Rows per client" in output
    # Two seeds and two arms.
    assert output.endswith("Dry run: 4 cells (seed, start and arm); nothing was run or written.")
    assert contents(tmp_path) == before
    grid.write_text('[[setting]]\npartition = "dirichlet:0"\n')
    bad: list[object] = [grid] if of_grid else ["--partition", "dirichlet:0"]
    assert invoke("simulate", *bad, "--out", tmp_path, "--dry-run")[0] == BAD_INPUT


@pytest.mark.parametrize(
    ("gpus", "there", "expected"),
    [
        ("0.5", 0, "gpus is 0.5 for each job, but PyTorch finds no GPU(s) on this machine; omit"),
        (
            "3",
            2,
            "gpus is 3 for each job, but PyTorch finds 2 GPU(s) on this machine; give at most 2",
        ),
        ("1.5", 2, "gpus is 1.5; give a fraction such as 0.5, or a whole number."),
        ("nan", 2, "gpus is nan; give a fraction such as 0.5"),
        ("-1", 2, "--gpus"),
    ],
)
def test_gpus_that_cannot_be_lent_are_refused_before_anything_runs(
    gpus: str, there: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    # The data are not even looked for.
    code, output = invoke("simulate", "--gpus", gpus, "--data", "no/such.csv", "--out", tmp_path / "run")
    assert code == BAD_INPUT, output
    assert expected in output
    assert not (tmp_path / "run").exists()


def test_a_grid_without_settings_is_refused(tmp_path: Path) -> None:
    grid = tmp_path / "grid.toml"
    grid.write_text("[base]\nrounds = 1\n")
    result = CliRunner().invoke(app, ["simulate", str(grid), "--out", str(tmp_path / "run")])
    assert result.exit_code == 2
    assert "has no [[setting]]" in " ".join(result.output.split())


def test_an_unknown_bundled_grid_lists_those_that_are_there(tmp_path: Path) -> None:
    code, output = invoke("simulate", "round", "--out", tmp_path / "run")
    assert code == BAD_INPUT
    assert "There is no bundled grid 'round'." in output
    assert all(f" {name}," in output or f" {name}." in output for name in bundled_grids("setting"))
    assert "[[setting]]" in bundled_grids("setting")["rounds"]


def test_a_file_wins_over_a_bundled_grid_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(read_grid(Path("rounds"), "setting")) == 2
    Path("rounds").mkdir()
    assert len(read_grid(Path("rounds"), "setting")) == 2
    Path("one-shot").write_text("[[setting]]\nclients = 2\n")
    assert read_grid(Path("one-shot"), "setting") == [{"clients": 2}]
    with pytest.raises(FileNotFoundError):
        read_grid(Path("./rounds.toml"), "setting")
    with pytest.raises(FileNotFoundError):
        read_grid(tmp_path / "nowhere" / "rounds", "setting")


def test_the_flower_app_is_written_to_a_new_folder(tmp_path: Path) -> None:
    code, output = invoke("flower-app", tmp_path / "new" / "app")
    assert code == 0, output
    source = Path(__file__).parents[2] / "simulations" / "flower_app" / "pyproject.toml"
    assert (tmp_path / "new" / "app" / "pyproject.toml").read_bytes() == source.read_bytes()
    code, output = invoke("flower-app", tmp_path / "new" / "app")
    assert (code, "exists already" in output) == (BAD_INPUT, True), output


def test_report_of_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert "not a run folder" in " ".join(result.output.split())


def test_every_setting_can_be_given_to_flwr_run() -> None:
    folder = Path(__file__).parents[2] / "simulations" / "flower_app"
    app = tomllib.loads((folder / "pyproject.toml").read_text())
    keys = {key.replace("-", "_") for key in app["tool"]["flwr"]["app"]["config"]}
    assert keys == set(SimulationConfig.model_fields) | {"out"}
    settings = {k: v for k, v in app["tool"]["flwr"]["app"]["config"].items() if k != "out"}
    assert SimulationConfig.from_flat(settings) == SimulationConfig(seeds=(0,))


def test_the_data_folder_of_the_command_line_wins(tmp_path: Path) -> None:
    grid = tmp_path / "grid.toml"
    grid.write_text('[[setting]]\ndata = "sst2"\ndata_dir = "elsewhere"\n')
    options = [
        "simulate",
        str(grid),
        "--data-dir",
        str(tmp_path / "here"),
        "--out",
        str(tmp_path / "run"),
    ]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 2
    assert "elsewhere" not in result.output


def test_arms_are_read_from_their_names() -> None:
    assert Arm.parse("plain").align is False
    aligned = Arm.parse("aligned")
    assert (aligned.parts, aligned.anchor) == (("attention", "ffn"), RUNNING)
    arm = Arm.parse("attention+heads@global")
    assert (arm.parts, arm.anchor) == (("attention", "heads"), "global")


#: Arms by their names: parts, anchor, evidence, and whether replies in another basis are matched as a
#: whole.
ARMS: dict[str, tuple[tuple[str, ...], str, str, bool]] = {
    "aligned": (DEFAULT_PARTS, RUNNING, "probe", True),
    "aligned~probe": (DEFAULT_PARTS, RUNNING, "probe", True),
    "aligned~weights": (DEFAULT_PARTS, RUNNING, "weights", True),
    "aligned~clients": (DEFAULT_PARTS, RUNNING, "clients", True),
    "aligned~learned": (DEFAULT_PARTS, RUNNING, "learned", True),
    "aligned@global~clients": (DEFAULT_PARTS, "global", "clients", True),
    "whole": (WHOLE_MODEL, RUNNING, "probe", False),
    "whole@global": (WHOLE_MODEL, "global", "probe", False),
    "stream@global": (WHOLE_MODEL, "global", "probe", False),
    "whole@global~weights": (WHOLE_MODEL, "global", "weights", False),
    "attention": (("attention",), RUNNING, "probe", False),
    "attention+ffn": (DEFAULT_PARTS, RUNNING, "probe", False),
    "rescale+residual@global~weights": (("rescale", "residual"), "global", "weights", False),
}


@pytest.mark.parametrize("name", ARMS)
def test_the_grammar_of_arms(name: str) -> None:
    arm = Arm.parse(name)
    assert (arm.parts, arm.anchor, arm.evidence, arm.other_basis) == ARMS[name]
    assert (arm.name, arm.align) == (name, True)
    assert Arm.parse(arm.name) == arm
    config = SimulationConfig.from_flat({"arms": f"plain, {name}"})
    assert [cell[2].name for cell in config.cells()[:2]] == ["plain", name]
    assert SimulationConfig.model_validate_json(config.to_json()) == config


def test_an_arm_with_a_guard() -> None:
    arm = Arm.parse("attention@global~weights*0:macro_f1/regmean")
    assert (arm.guard, arm.chance, arm.evidence) == ("macro_f1", 0.0, "weights")
    assert arm.aggregation == "regmean"
    guarded, unguarded = Arm.parse("aligned*0:loss"), Arm.parse("aligned*0")
    assert unguarded.guard == ""
    assert unguarded.model_copy(update={"name": guarded.name, "guard": "loss"}) == guarded


@pytest.mark.parametrize("arm", ["aligned:loss", "regmean+task-head"])
def test_what_chooses_by_held_out_rows_needs_some(arm: str) -> None:
    with pytest.raises(ValueError, match="holdout must not be 0"):
        SimulationConfig(holdout=0, arms=("plain", arm))
    assert SimulationConfig(holdout=0.01, arms=("plain", arm)).arms[1] == arm
    assert SimulationConfig(holdout=0, arms=("plain", "aligned/regmean")).holdout == 0


@pytest.mark.parametrize(
    ("arm", "expected"),
    [("aligned/fisher", True), ("plain/fisher", False), ("aligned/regmean", False), ("aligned", False)],
)
def test_clients_align_first_for_statistics_that_no_rotation_moves(arm: str, expected: bool) -> None:
    assert Arm.parse(arm).aligns_at_clients == expected


def test_every_anchor_and_every_evidence_can_be_asked_for() -> None:
    for anchor in ANCHORS:
        assert Arm.parse(f"aligned@{anchor}").anchor == anchor
        for evidence in EVIDENCE:
            arm = Arm.parse(f"aligned@{anchor}~{evidence}")
            assert (arm.anchor, arm.evidence) == (anchor, evidence)


#: Arms that merge in another way: aligned or not, parts, anchor, evidence, aggregation, other_basis.
MERGING: dict[str, tuple[bool, tuple[str, ...], str, str, str, bool]] = {
    "plain/mean": (False, (), RUNNING, "probe", "mean", False),
    "mean": (False, (), RUNNING, "probe", "mean", False),
    "regmean": (False, (), RUNNING, "probe", "regmean", False),
    "plain/fisher": (False, (), RUNNING, "probe", "fisher", False),
    "joined": (False, (), RUNNING, "probe", "mean", False),
    "aligned/mean": (True, DEFAULT_PARTS, RUNNING, "probe", "mean", True),
    "aligned~clients/regmean": (
        True,
        DEFAULT_PARTS,
        RUNNING,
        "clients",
        "regmean",
        True,
    ),
    "aligned@global~learned/regmean": (True, DEFAULT_PARTS, "global", "learned", "regmean", True),
    "whole@global~weights/regmean": (True, WHOLE_MODEL, "global", "weights", "regmean", False),
    "ffn+heads/fisher": (True, ("ffn", "heads"), RUNNING, "probe", "fisher", False),
}


@pytest.mark.parametrize("name", MERGING)
def test_the_grammar_of_arms_that_merge(name: str) -> None:
    arm = Arm.parse(name)
    found = (arm.align, arm.parts, arm.anchor, arm.evidence, arm.aggregation, arm.other_basis)
    assert found == MERGING[name]
    assert arm.name == name
    config = SimulationConfig.from_flat({"arms": f"plain, {name}"})
    assert config.cells()[1][2] == arm
    assert SimulationConfig.model_validate_json(config.to_json()) == config


def test_every_aggregation_has_a_short_name() -> None:
    for aggregation in registered():
        short, full = Arm.parse(aggregation), Arm.parse(f"plain/{aggregation}")
        assert short.model_copy(update={"name": full.name}) == full
        assert Arm.parse(f"aligned/{aggregation}").aggregation == aggregation
    assert JOINED not in registered()


BAD_ARMS = {
    "aligned/median": "unknown aggregation 'median'",
    "aligned/regmean@global": "unknown aggregation 'regmean@global'",
    "aligned/regmean/mean": "unknown aggregation 'regmean/mean'",
    "aligned/regmean~weights": "unknown aggregation 'regmean~weights'",
    "aligned/joined": "unknown aggregation 'joined'",
    "aligned/": "unknown aggregation ''",
    "plain/": "unknown aggregation ''",
    "/regmean": "unknown part ''",
    "Joined": "'Joined'",
    "joined@global": "'joined'",
    "joined/regmean": "'joined'",
    "regmean@global": "'regmean'",
    "plain@global/regmean": "'plain'",
    "plain~weights/regmean": "'plain'",
    "whole~clients/regmean": "'clients' goes with 'aligned'",
    "": "unknown part ''",
    "rotated": "'rotated'",
    "plain@running": "'plain'",
    "plain~weights": "'plain'",
    "aligned+ffn": "'aligned'",
    "whole+rescale": "'whole'",
    "attention+": "''",
    "+ffn": "''",
    "Aligned": "'Aligned'",
    "aligned@median": "unknown anchor 'median'",
    "aligned@running@global": "unknown anchor 'running@global'",
    "aligned~oracle": "unknown evidence 'oracle'",
    "aligned~clients@global": "unknown evidence 'clients@global'",
    "aligned~clients~learned": "unknown evidence 'clients~learned'",
    "aligned@median~oracle": "unknown anchor 'median'",
    "whole~clients": "'clients' goes with 'aligned'",
    "whole@global~learned": "'learned' goes with 'aligned'",
    "plain:loss": "'plain'",
    "aligned:": "name of a metric",
    "aligned:points": "'points' does not show",
    "attention+ffn~clients": "'clients' goes with 'aligned'",
    "attention(layers=middle)": "layers is 'middle'",
    "attention(layers)": "'layers' is not of the form KEY=VALUE",
    "attention(depth=2)": "depth",
    "plain(layers=0)": "'plain'",
    "attention(layers=0)/fisher": "leave out the options",
    "aligned/regmean(beta)": "'beta' is not of the form KEY=VALUE",
    "aligned/regmean(gamma=1)": "'regmean' has no argument 'gamma'; it has alpha, beta",
    "plain/mean(batches=4)": "'mean' needs no statistics",
    "plain#": "'#' names no clients",
    "plain#0+0": "'#0+0' names no clients",
    "plain#triples": "'#triples' names no clients; write #0+2 (increasing), or #pairs or #subsets",
    "plain#1+0": "'#1+0' names no clients",
    "plain#00+0": "'#00+0' names no clients",
    "attention(chance=3)*2": "unknown option 'chance'; one of layers, within_heads",
    "attention(canonical=1)": "unknown option 'canonical'",
    "attention(layers=0;layers=1)": "'layers' is given twice",
    "aligned/regmean(alpha=3)": "alpha is 3.0",
    "aligned/regmean(alpha=nan)": "are finite numbers of at least 0",
    "aligned/regmean(batches=-3)": "batches is -3; give a whole number, at least 1",
    "aligned(layers=0)~clients": "clients match themselves; leave out the options",
    "joined#0+1": "'joined'",
    "aligned)": "'aligned)'",
    "output~learned": "'learned' goes with 'aligned'",
    "plain*0": "'plain'",
    "plain*0/fisher": "'plain'",
    "aligned*": "could not convert string to float",
    "aligned*x": "could not convert string to float",
    "aligned*-1": "chance",
    "aligned@global/fisher": "leave out the options, the anchor, the evidence and the guard",
    "aligned~weights/fisher": "leave out the options, the anchor, the evidence and the guard",
    "aligned:loss/fisher": "leave out the options, the anchor, the evidence and the guard",
    "regmean(batches=0)": "batches is 0; give a whole number, at least 1",
    "regmean(batches=1.5)": "batches is 1.5; give a whole number, at least 1",
    "regmean(alpha=inf)": "are finite numbers of at least 0",
    "plain/regmean(alpha=-1)": "are finite numbers of at least 0",
    "regmean(alpha=much)": "could not convert string to float",
    "plain#a": "'#a' names no clients",
    "plain#0+": "'#0+' names no clients",
    "plain#-1": "'#-1' names no clients",
    "joined+task-head": "'joined'",
}


@pytest.mark.parametrize("name", BAD_ARMS)
def test_arms_that_are_none_are_refused_with_their_name(name: str) -> None:
    check_refused(name, BAD_ARMS[name])


def check_refused(name: str, reason: str) -> None:
    """Check that an arm is refused with its name and the reason, alone and in a configuration."""
    with pytest.raises(ValueError, match=f"arm '{re.escape(name)}'") as caught:
        Arm.parse(name)
    assert reason.lower() in str(caught.value).lower()
    with pytest.raises(ValueError, match=re.escape(f"arm '{name}'")):
        SimulationConfig(arms=("plain", name))


def test_arms_have_options_arguments_and_clients() -> None:
    arm = Arm.parse("attention+ffn(layers=last:2)@global*0/regmean(alpha=0.5;batches=4)#0+2")
    assert (arm.options.layers, arm.options.chance) == ("last:2", 0)
    assert (arm.anchor, arm.aggregation, arm.arguments) == ("global", "regmean", {"alpha": 0.5})
    assert (arm.batches, arm.clients) == (4, (0, 2))
    assert Arm.parse("attention(layers=1)").options.layers == (1,)
    assert Arm.parse("whole(within_heads=permutation)").options.within_heads == "permutation"
    alone = Arm.parse("regmean(alpha=0)#1+2")
    assert (alone.align, alone.aggregation, alone.clients) == (False, "regmean", (1, 2))
    assert Arm.parse("attention*0/fisher").chance == 0
    # A rotation of the residual stream needs models in canonical form; ``FedRot`` decides for itself.
    for name, canonical in {"aligned": None, "whole": False, "ffn": False, "stream": True}.items():
        assert Arm.parse(name).options.canonical == canonical


def test_subsets_of_clients_are_written_out() -> None:
    config = SimulationConfig(clients=3, arms=("plain", "plain/regmean#pairs"))
    pairs = ("plain/regmean#0+1", "plain/regmean#0+2", "plain/regmean#1+2")
    assert config.arms == ("plain", *pairs)
    assert SimulationConfig.model_validate_json(config.to_json()) == config
    four = SimulationConfig.from_flat({"clients": 4, "arms": "plain,plain#subsets"}).arms
    assert len(four) == 2 + 6 + 4 - 1
    assert four[-1] == "plain#1+2+3"
    three = SimulationConfig(clients=3, arms=("plain#pairs", "plain#subsets")).arms
    assert three == SimulationConfig(clients=3, arms=("plain#pairs",)).arms
    assert SimulationConfig(clients=2, arms=("plain#subsets",)).arms == ("plain#0+1",)
    # Of as many clients as there are if their number is not given; an arm that is named again stays.
    assert SimulationConfig(arms=("plain#pairs",)).arms[-1] == "plain#2+3"
    with pytest.raises(ValueError, match=r"arm 'plain#0\+3': there are 3 clients, counted from 0"):
        SimulationConfig(clients=3, arms=("plain#0+3",))


def test_a_setting_is_named_after_data_partition_and_an_unusual_task() -> None:
    assert SimulationConfig().setting == "goemotions_ekman, iid"
    assert SimulationConfig(task="classification").setting == "goemotions_ekman, iid"
    config = SimulationConfig.from_flat({"task": "mlm", "data": "sst2", "partition": "keyclass:0.5"})
    assert (config.task, config.setting) == ("mlm", "sst2, keyclass:0.5, mlm")
    assert SimulationConfig.from_flat({"task": "mlm", "setting": "mine"}).setting == "mine"


def test_the_task_decides_what_is_not_said() -> None:
    defaults = {
        "classification": ("goemotions_ekman", "bert"),
        "mlm": ("goemotions_ekman", "bert"),
        "clm": ("goemotions_ekman", "gpt2"),
        "image": ("digits", "vit"),
    }
    for task, expected in defaults.items():
        config = SimulationConfig.from_flat({"task": task, "data": "", "architecture": ""})
        assert (config.data, config.architecture) == expected
        assert SimulationConfig.model_validate_json(config.to_json()) == config
    assert SimulationConfig(task="clm").setting == "goemotions_ekman, iid, clm"
    llama = SimulationConfig.from_flat({"task": "clm", "architecture": "llama"})
    assert llama.setting == "goemotions_ekman, iid, clm, llama"
    assert SimulationConfig(model="some/model").architecture == ""
    SimulationConfig(task="image", arms=("plain", "joined"))


def test_only_runs_that_move_weights_need_a_supported_family() -> None:
    for arms in (("plain",), ("plain/regmean", "joined")):
        assert not SimulationConfig(arms=arms).moves
        assert SimulationConfig(arms=arms, starts=("same", "scrambled")).moves
    for arm in ("aligned", "heads/fisher"):
        assert SimulationConfig(arms=("plain", arm)).moves


def test_flat_settings_of_flower_become_the_same_configuration() -> None:
    flat = {"arms": "plain, aligned@global", "seeds": "5-6", "data-dir": "", "lr": 0.01}
    config = SimulationConfig.from_flat(flat)
    assert config == SimulationConfig(arms=("plain", "aligned@global"), seeds=(5, 6), lr=0.01)
    assert SimulationConfig.model_validate_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("given", "seeds"),
    [
        (3, (0, 1, 2)),
        ("3", (0, 1, 2)),
        ("3-5", (3, 4, 5)),
        ("4-4", (4,)),
        ("1,4,9", (1, 4, 9)),
        ("1, 4", (1, 4)),
        ([7, 3], (7, 3)),
    ],
)
def test_seeds_are_a_number_a_range_or_a_list(given: Any, seeds: tuple[int, ...]) -> None:
    assert SimulationConfig.from_flat({"seeds": given}).seeds == seeds


@pytest.mark.parametrize(
    "given", ["x", "3-", "-3", -1, "1,", "0-2,5", "1.5", 1.5, True, "3-5-7", 0, "0", "5-3"]
)
def test_seeds_that_are_none_of_these_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="a range such as 3-5, or a list such as 1,4,9"):
        SimulationConfig.from_flat({"seeds": given})


@pytest.mark.parametrize("given", [[], "1,1"])
def test_there_is_at_least_one_seed_and_each_once(given: Any) -> None:
    with pytest.raises(ValueError, match="needs at least one value, each once"):
        SimulationConfig.from_flat({"seeds": given})


@pytest.mark.parametrize("given", [2**62, 10**30, "7-20000"])
def test_a_seed_in_the_place_of_their_number_takes_no_memory(given: Any) -> None:
    with pytest.raises(ValueError, match="at most 10000"):
        SimulationConfig.from_flat({"seeds": given})


def test_negative_seeds_are_refused_before_the_run() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        SimulationConfig.from_flat({"seeds": [0, -1]})


def test_the_command_line_names_the_option_of_seeds(tmp_path: Path) -> None:
    code, output = invoke("simulate", "--seeds", "3-", "--out", tmp_path / "run")
    said = ("Error in --seeds:", "'3-' is no choice of seeds")
    assert (code, *(text in output for text in said)) == (2, True, True), output


@pytest.mark.parametrize(
    "text", ["base = 3", "[setting]\nclients = 4", "setting = 'x'", "setting = [1]"]
)
def test_a_grid_of_something_else_than_tables_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    (grid := tmp_path / "grid.toml").write_text(text, "utf-8")
    result = CliRunner().invoke(app, ["simulate", str(grid), "--out", str(tmp_path / "run")])
    assert result.exit_code == BAD_INPUT
    assert "is no grid" in " ".join(result.output.split())


#: Another value of every setting.
OTHER_VALUES: dict[str, Any] = {
    "setting": "mine",
    "data": "other",
    "unseen_data": "books",
    "task": "mlm",
    "data_dir": "elsewhere",
    "text_column": "body",
    "label_column": "mood",
    "label_kind": "single",
    "missing": "drop",
    "train_limit": 9,
    "test_limit": 9,
    "model": "some/model",
    "architecture": "gpt2",
    "layers": 3,
    "width": 64,
    "heads": 2,
    "max_length": 32,
    "dropout": 0.2,
    "lora": "r=2,targets=query",
    "server": "adam",
    "server_lr": 0.5,
    "clients": 5,
    "partition": "dirichlet:1",
    "holdout": 0.2,
    "fraction_train": 0.5,
    "starts": ("scrambled",),
    "pretrain_data": "texts",
    "pretrain_limit": 7,
    "pretrain_epochs": 3.0,
    "arms": ("plain",),
    "seeds": (7,),
    "rounds": 4,
    "local_epochs": 2.0,
    "first_epochs": 2.0,
    "batch_size": 16,
    "lr": 0.5,
    "weight_decay": 0.5,
}


def test_settings_share_trainings_only_if_they_differ_in_what_they_compare() -> None:
    config = SimulationConfig(setting="one")
    assert OTHER_VALUES.keys() == SimulationConfig.model_fields.keys()
    kept = {
        name
        for name, value in OTHER_VALUES.items()
        if config.model_copy(update={name: value}).training == config.training
    }
    assert kept == {"setting", "arms", "starts", "seeds"}


def test_pretraining_has_the_model_of_the_run_and_data_of_its_own() -> None:
    kept = {name: OTHER_VALUES[name] for name in ("layers", "width", "heads", "max_length", "dropout")}
    kept |= {name: OTHER_VALUES[name] for name in ("batch_size", "lr", "weight_decay")}
    settings = {**OTHER_VALUES, **kept, "starts": ("pretrained",), "task": "classification"}
    changes = {
        "model": None,
        "architecture": "gpt2",
        "lora": "",
        "server": "mean",
        "fraction_train": 1.0,
    }
    config = SimulationConfig(**{**settings, **changes})
    expected = SimulationConfig(
        **{**kept, "data_dir": "elsewhere", "architecture": "gpt2", "task": "clm"},
        **{"data": "texts", "train_limit": 7, "local_epochs": 3.0, "clients": 1, "holdout": 0.0},
    )
    assert config.pretraining == expected


def test_the_first_round_may_have_epochs_of_its_own() -> None:
    config = SimulationConfig(local_epochs=2, first_epochs=0.5)
    assert [config.epochs(number) for number in (1, 2, 3)] == [0.5, 2, 2]
    assert SimulationConfig(local_epochs=2).epochs(1) == 2


def test_what_is_empty_has_its_default() -> None:
    given = {"rounds": None, "lr": "", "arms": "", "first-epochs": None, "lora": "", "data-dir": None}
    assert SimulationConfig.from_flat(given) == SimulationConfig()
    assert SimulationConfig().adapter is None


def test_zero_means_no_limit() -> None:
    names = ("train_limit", "test_limit", "pretrain_limit", "first_epochs")
    config = SimulationConfig.from_flat(dict.fromkeys(names, 0))
    assert [getattr(config, name) for name in names] == [None] * 4


#: Values that a setting may have, and values that it may not have.
BOUNDS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    **dict.fromkeys(("train_limit", "test_limit", "pretrain_limit"), ((1,), (0, -1))),
    **dict.fromkeys(("layers", "heads", "clients", "rounds", "batch_size"), ((1,), (0, -1))),
    **dict.fromkeys(("local_epochs", "first_epochs", "pretrain_epochs"), ((1e-3,), (0, -1))),
    **dict.fromkeys(("lr", "server_lr"), ((1e-9,), (0, -1))),
    "width": ((4,), (0, -4)),
    "max_length": ((4,), (3,)),
    "dropout": ((0, 0.99), (-0.1, 1)),
    "holdout": ((0, 0.99), (-0.1, 1)),
    "fraction_train": ((0.01, 1), (0, 1.01)),
    "weight_decay": ((0,), (-0.1,)),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_numbers_have_bounds(name: str) -> None:
    allowed, refused = BOUNDS[name]
    for value in allowed:
        assert getattr(SimulationConfig(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(ValueError, match=name):
            SimulationConfig(**{name: value})


@pytest.mark.parametrize("given", [{"starts": "same,same"}, {"starts": []}, {"arms": ","}])
def test_there_is_at_least_one_start_and_arm_and_each_once(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="needs at least one value, each once"):
        SimulationConfig.from_flat(given)


def test_lists_are_separated_by_commas_outside_of_parentheses() -> None:
    found = SimulationConfig.from_flat({"starts": " same, scrambled,", "arms": "plain,,aligned ,"})
    assert (found.starts, found.arms) == (("same", "scrambled"), ("plain", "aligned"))
    with pytest.raises(ValueError, match=r"arm 'regmean\(alpha=1,beta=2\)'"):
        SimulationConfig.from_flat({"arms": "plain,regmean(alpha=1,beta=2)"})


def test_as_many_seeds_as_are_allowed() -> None:
    assert len(SimulationConfig.from_flat({"seeds": 10_000}).seeds) == 10_000
    with pytest.raises(ValueError, match="'10001' is 10001 seeds; at most 10000"):
        SimulationConfig.from_flat({"seeds": 10_001})


@pytest.mark.parametrize("task", ["mlm", "clm"])
def test_labels_have_a_kind_where_they_are_predicted(task: str) -> None:
    with pytest.raises(ValueError, match=f"not for '{task}'"):
        SimulationConfig.from_flat({"task": task, "label_kind": "single"})
    for other in ("classification", "image"):
        config = SimulationConfig.from_flat({"task": other, "label_kind": "single"})
        assert config.label_kind == "single"


def test_settings_that_are_none_are_named() -> None:
    with pytest.raises(ValueError, match="layer\n"):
        SimulationConfig.from_flat({"layer": 3})


def test_cells_are_every_seed_start_and_arm_seed_by_seed() -> None:
    config = SimulationConfig(seeds=(3, 1), starts=("scrambled", "same"), arms=("plain", "ffn"))
    assert [(seed, start, arm.name) for seed, start, arm in config.cells()] == [
        (seed, start, arm)
        for seed in (3, 1)
        for start in ("scrambled", "same")
        for arm in ("plain", "ffn")
    ]
