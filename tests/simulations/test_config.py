"""Bad input is refused before anything starts, each with its own message."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedrot.simulations.cli import app
from fedrot.simulations.config import Arm, SimulationConfig
from fedrot.strategies import DEFAULT_ANCHOR

BAD_OPTIONS = {
    "unknown data set": (["--data", "no_such_corpus"], "no_such_corpus"),
    "text column missing": (["--text-column", "body"], "body"),
    "label column missing": (["--label-column", "emotion"], "emotion"),
    "alpha not positive": (["--partition", "dirichlet:0"], "alpha"),
    "unknown partition": (["--partition", "sorted"], "sorted"),
    "too many classes per client": (["--partition", "pathological:99"], "99"),
    "partition column missing": (["--partition", "column:country"], "country"),
    "empty partition": (["--clients", "50", "--train-limit", "20"], "50"),
    "no client": (["--clients", "0"], "clients"),
    "unknown arm": (["--arms", "plain,rotated"], "rotated"),
    "unknown anchor": (["--arms", "attention@median"], "median"),
    "unknown task": (["--task", "translation"], "mlm"),
    "unknown start": (["--start", "cold"], "start"),
    "same arm twice": (["--arms", "plain,plain"], "once"),
    "no seed": (["--seeds", "0"], "seeds"),
    "odd heads": (["--width", "30", "--heads", "4"], "not a multiple"),
    "learning rate": (["--lr", "0"], "lr"),
    "late starters": (["--start", "different", "--fraction-train", "0.5"], "fraction_train 1"),
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


def test_an_unsupported_model_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config

    GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=6000, pad_token_id=0).save_pretrained(tmp_path)
    options = ["simulate", "--out", str(tmp_path / "run"), "--model", str(tmp_path)]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 2, result.output


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"precious": 1}\n')
    result = CliRunner().invoke(app, ["simulate", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "already holds a run" in " ".join(result.output.split())
    assert (tmp_path / "rows.jsonl").read_text() == '{"precious": 1}\n'


def test_a_grid_without_settings_is_refused(tmp_path: Path) -> None:
    grid = tmp_path / "grid.toml"
    grid.write_text("[base]\nrounds = 1\n")
    result = CliRunner().invoke(app, ["compare", str(grid), "--out", str(tmp_path / "run")])
    assert result.exit_code == 2
    assert "describes no [[setting]]" in " ".join(result.output.split())


def test_report_of_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert "not a run folder" in " ".join(result.output.split())


def test_every_setting_can_be_given_to_flwr_run() -> None:
    app = tomllib.loads((Path(__file__).parents[2] / "flower-app" / "pyproject.toml").read_text())
    keys = {key.replace("-", "_") for key in app["tool"]["flwr"]["app"]["config"]}
    assert keys == set(SimulationConfig.model_fields) | {"out", "first_seed"}
    settings = {k: v for k, v in app["tool"]["flwr"]["app"]["config"].items() if k != "out"}
    assert SimulationConfig.from_flat(settings) == SimulationConfig(seeds=(0,))


def test_the_data_folder_of_the_command_line_wins(tmp_path: Path) -> None:
    grid = tmp_path / "grid.toml"
    grid.write_text('[[setting]]\ndata = "sst2"\ndata_dir = "elsewhere"\n')
    options = [
        "compare",
        str(grid),
        "--data-dir",
        str(tmp_path / "here"),
        "--out",
        str(tmp_path / "run"),
    ]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 2
    assert "elsewhere" not in result.output


def test_a_first_seed_beside_a_list_of_seeds_is_refused() -> None:
    with pytest.raises(ValueError, match="first_seed"):
        SimulationConfig.from_flat({"first_seed": 3, "seeds": (1, 2)})


def test_arms_are_read_from_their_names() -> None:
    assert Arm.parse("plain").align is False
    aligned = Arm.parse("aligned")
    assert (aligned.parts, aligned.anchor) == (("attention", "ffn"), DEFAULT_ANCHOR)
    arm = Arm.parse("attention+heads@medoid")
    assert (arm.parts, arm.anchor) == (("attention", "heads"), "medoid")


def test_a_setting_is_named_after_data_partition_and_an_unusual_task() -> None:
    assert SimulationConfig().setting == "goemotions_ekman, iid"
    assert SimulationConfig(task="classification").setting == "goemotions_ekman, iid"
    config = SimulationConfig.from_flat({"task": "mlm", "data": "sst2", "partition": "keyclass:0.5"})
    assert (config.task, config.setting) == ("mlm", "sst2, keyclass:0.5, mlm")
    assert SimulationConfig.from_flat({"task": "mlm", "setting": "mine"}).setting == "mine"


def test_flat_settings_of_flower_become_the_same_configuration() -> None:
    flat = {"arms": "plain, aligned@global", "seeds": 2, "first-seed": 5, "data-dir": "", "lr": 0.01}
    config = SimulationConfig.from_flat(flat)
    assert config == SimulationConfig(arms=("plain", "aligned@global"), seeds=(5, 6), lr=0.01)
    assert SimulationConfig.model_validate_json(config.to_json()) == config
