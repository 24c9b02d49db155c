"""Experiments and strategies: what completes them, what refuses them, the code to copy, and files."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from fedrot.aggregation import aggregations
from fedrot.errors import FedrotError
from fedrot.simulations.settings import MOST_SEEDS, TASKS, Experiment, read_experiments
from fedrot.simulations.strategy import KINDS, NAMED, Strategy
from fedrot.strategies import FedRot

LORA = {"r": 8, "target_modules": ["query"]}
OF_LORA = {"model": "minilm", "lora": LORA}


def of(**fields: Any) -> Experiment:
    return Experiment.from_flat(fields)


def names(experiment: Experiment) -> list[str]:
    return [strategy.name for strategy in experiment.strategies]


# What is not said


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_an_experiment_of_its_own(task: str) -> None:
    traits = TASKS[task]
    experiment = of(task=task, data=traits.data or "conll")
    assert experiment.architecture == traits.architectures[0]
    assert experiment.name.endswith("" if task == "classification" else task)
    assert ("fit_head" in names(experiment)) == traits.classifies


@pytest.mark.parametrize(
    ("fields", "strategies"),
    [
        ({}, ["fedavg", "fedavg_head", "head_only", "fit_head"]),
        ({"start": "different"}, ["fedavg", "fedavg_head", "head_only", "fit_head", "aligned"]),
        ({"holdout": 0}, ["fedavg", "aligned"]),
        ({"data": "a,b"}, ["fedavg", "aligned"]),
        ({"unseen_data": "c"}, ["fedavg", "aligned"]),
        ({"task": "clm"}, ["fedavg", "aligned"]),
        (OF_LORA, ["fedavg", "exact", "head_only", "fit_head"]),
        ({**OF_LORA, "lora": {**LORA, "r": [2, 4]}}, ["exact", "head_only"]),
        ({**OF_LORA, "lora": {**LORA, "r": [4, 4]}}, ["fedavg", "exact", "head_only", "fit_head"]),
        ({"model": "smollm2", "task": "clm", "lora": LORA}, ["fedavg", "exact"]),
    ],
)
def test_strategies_that_answer_the_question(fields: dict[str, Any], strategies: list[str]) -> None:
    assert names(of(**fields)) == strategies


def test_an_experiment_is_named_after_what_is_unusual() -> None:
    assert of().name == "goemotions_ekman, iid"
    assert of(task="clm", architecture="llama", partition="dirichlet:0.5").name == (
        "goemotions_ekman, dirichlet:0.5, clm, llama"
    )
    assert of(name="mine").name == "mine"


def test_flat_settings_of_flower_become_the_same_experiment() -> None:
    flat = {"train-limit": 0, "label-column": "", "seeds": "2", "strategies": "fedavg, aligned"}
    assert of(**flat, **{"first-epochs": 0.0}) == of(seeds=[0, 1], strategies=["fedavg", "aligned"])
    assert of(model="minilm", lora='{r = 8, target_modules = ["query"]}') == of(**OF_LORA)
    source = resources.files("fedrot.simulations") / "flower_app" / "pyproject.toml"
    app = tomllib.loads(source.read_text("utf-8"))["tool"]["flwr"]["app"]["config"]
    app.pop("out")
    known = {name.replace("_", "-") for name in Experiment.model_fields}
    assert app.keys() == known - {"pretrain-data"}
    assert of(**app) == of()


@pytest.mark.parametrize(
    ("given", "seeds"), [("3", (0, 1, 2)), (2, (0, 1)), ("1, 4,9", (1, 4, 9)), ([7], (7,))]
)
def test_seeds_are_a_number_or_a_list(given: object, seeds: tuple[int, ...]) -> None:
    assert of(seeds=given).seeds == seeds


def test_an_experiment_survives_json() -> None:
    table = {"name": "mine", "alignment": {"parts": ["ffn"]}, "aggregation": {"name": "regmean"}}
    experiment = of(strategies=["fedavg", table], partition="dirichlet:0.3", data_dir=Path("data"))
    assert Experiment.model_validate_json(experiment.to_json()) == experiment


def test_trainings_are_shared_where_nothing_that_decides_them_differs() -> None:
    first = of(strategies="fedavg", seeds=1, name="a")
    alike = [of(strategies="aligned", seeds=3), of(start="scrambled", strategies="fedavg")]
    others = [of(lr=2e-3), of(start="different"), of(rounds=4), of(holdout=0.2), of(batch_size=8)]
    assert all(one.training == first.training for one in alike)
    assert all(one.training != first.training for one in others)


def test_ranks_go_round() -> None:
    experiment = of(**{**OF_LORA, "lora": {**LORA, "r": [2, 4]}})
    assert [experiment.ranks, of(**OF_LORA).ranks, of().ranks] == [(2, 4), (8,), (None,)]
    assert of(first_epochs=4).epochs(1) == 4
    assert of(first_epochs=4).epochs(2) == 1


# What is refused

TABLE: dict[str, Any] = {"name": "mine"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rowns": 3}, "rowns"),
        ({"task": "translation"}, "classification"),
        ({"task": "ner"}, "no bundled data set"),
        ({"task": "mlm", "label_kind": "multi"}, "label_kind"),
        ({"task": "mlm", "unseen_data": "x"}, "unseen_data"),
        ({"task": "clm", "architecture": "bert"}, "gpt2 or llama"),
        ({"model": "minilm", "architecture": "bert"}, "architecture is for small models"),
        ({"model": "minilm", "layers": 3}, "layers is for small models"),
        ({"clients": 0}, "greater than 0"),
        ({"dropout": 1}, "less than 1"),
        ({"holdout": 1}, "less than 1"),
        ({"lr": 0}, "greater than 0"),
        ({"max_length": 3}, "greater than 3"),
        ({"start": "pretrained"}, "'same', 'different' or 'scrambled'"),
        ({"start": "different", "fraction_train": 0.5}, "needs fraction_train 1"),
        ({"start": "different", "strategies": [{**TABLE, "fraction_train": 0.5}]}, "fraction_train 1"),
        ({"start": "different", "model": "minilm"}, "use start 'same'"),
        ({"seeds": "0"}, "no choice of seeds"),
        ({"seeds": "-1"}, "no choice of seeds"),
        ({"seeds": "one"}, "no choice of seeds"),
        ({"seeds": [1, 1]}, "each once"),
        ({"seeds": []}, "at least one"),
        ({"seeds": [-1]}, "greater than or equal to 0"),
        ({"seeds": MOST_SEEDS + 1}, "at most"),
        ({"lora": LORA}, "give model"),
        ({**OF_LORA, "task": "mlm"}, "task classification, clm, ner"),
        ({**OF_LORA, "start": "scrambled"}, "start 'same'"),
        ({**OF_LORA, "data": "a,b"}, "one data set"),
        ({**OF_LORA, "lora": {"target_modules": ["query"]}}, "r, a rank"),
        ({**OF_LORA, "lora": {**LORA, "r": [2, 0]}}, "r, a rank"),
        ({**OF_LORA, "lora": "r=8"}, "write {r = 8"),
        # Strategies
        ({"strategies": "fedavgg"}, "named ones are fedavg, "),
        ({"strategies": "plain"}, "[[strategy]]"),
        ({"strategies": ["fedavg", "fedavg"]}, "two strategies have the same name"),
        ({"strategies": [{**TABLE, "checkpoints": 1}]}, "checkpoints"),
        ({"strategies": [{**TABLE, "kind": "magic"}]}, "unknown kind 'magic'"),
        ({"strategies": [{**TABLE, "aggregation": "median"}]}, "one of mean"),
        ({"strategies": [{**TABLE, "aggregation": {"alpha": 1}}]}, "one of mean"),
        ({"strategies": [{**TABLE, "batches": 3}]}, "leave out batches"),
        ({"strategies": [{**TABLE, "adapters": {"method": "exact"}}]}, "give lora"),
        ({**OF_LORA, "strategies": [{**TABLE, "adapters": {"ridge": 1}}]}, "argument 'ridge'"),
        ({"strategies": [{**TABLE, "clients": [4]}]}, "there are 4"),
        ({"strategies": [{**TABLE, "learning_rate": 0}]}, "greater than 0"),
        ({"strategies": [{"kind": "head_only"}]}, "name"),
        ({"strategies": "fit_head", "holdout": 0}, "holdout must not be 0"),
        ({"strategies": "guarded", "holdout": 0}, "holdout must not be 0"),
        ({**OF_LORA, "strategies": [{**TABLE, "guard": "loss"}]}, "'guard' is for"),
        ({**OF_LORA, "strategies": "regmean"}, "'aggregation' is for"),
        ({**OF_LORA, "lora": {**LORA, "r": [2, 4]}, "strategies": "fedavg"}, "no mean"),
        (
            {
                **OF_LORA,
                "lora": {**LORA, "use_dora": True},
                "strategies": [{**TABLE, "adapters": {"method": "regmean"}}],
            },
            "use_dora",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        of(**fields)
    assert said in str(caught.value)


# Strategies


@pytest.mark.parametrize("name", NAMED)
def test_every_named_strategy_goes_with_some_experiment_and_says_what_it_does(name: str) -> None:
    fields = OF_LORA if "adapters" in NAMED[name] else {}
    (strategy,) = of(**fields, strategies=name).strategies
    assert strategy.name == name
    assert NAMED[name]["says"].endswith(".")


def test_every_kind_has_a_way_to_run() -> None:
    from fedrot.simulations.federation.cells import RUNS

    assert RUNS.keys() == KINDS.keys()


def test_every_aggregation_has_a_strategy() -> None:
    for entry in aggregations({"symmetry"}):
        (strategy,) = of(
            strategies=[{**TABLE, "alignment": False, "aggregation": entry.name}]
        ).strategies
        assert strategy.entry == entry


@pytest.mark.parametrize(
    ("fields", "strategy", "code"),
    [
        ({}, "fedavg", "FedAvg()"),
        ({"fraction_train": 0.5}, "fedavg", "FedAvg(fraction_train=0.5)"),
        ({}, "aligned", "FedRot(model.config)"),
        ({}, "fit_head", "FedRot(model.config, fit_head=True)"),
        ({"start": "different"}, "aligned", "FedRot(model.config, other_basis=OtherBasis(make_model))"),
        ({}, "fisher", 'FedRot(model.config, alignment=None, aggregation="fisher")'),
        ({}, "head_only", "fit_task_head(grid, arrays, model.config)"),
        ({}, "fedavg_head", "FedAvg(); then fit_task_head(grid, result.arrays, model.config)"),
        (OF_LORA, "fedavg", "FedAvg()"),
        (OF_LORA, "exact", "FedRotLoRA(peft_config, AdapterOptions(method='exact'))"),
        (OF_LORA, "fit_head", "FedRotLoRA(peft_config, fit_head=True)"),
        (
            {},
            {**TABLE, "alignment": {"parts": ["ffn"]}, "guard": "loss", "server": {"min_replies": 2}},
            "FedRot(model.config, alignment=AlignmentOptions(parts=['ffn']), guard='loss', "
            "server=Server(min_replies=2))",
        ),
        (
            {},
            {**TABLE, "aggregation": {"name": "regmean", "alpha": 0.5}, "fraction_train": 0.25},
            "FedRot(model.config, aggregation=lambda: RegMean(alpha=0.5), fraction_train=0.25)",
        ),
    ],
)
def test_the_line_to_copy(fields: dict[str, Any], strategy: Any, code: str) -> None:
    experiment = of(**fields, strategies=[strategy])
    assert experiment.strategies[0].code(experiment) == code


def test_lines_to_copy_are_calls_that_flower_takes() -> None:
    from fedrot.aggregation import RegMean
    from fedrot.options import AlignmentOptions
    from fedrot.strategies import Server

    known = {"AlignmentOptions": AlignmentOptions, "RegMean": RegMean, "Server": Server}
    table = {
        "name": "mine",
        "alignment": {"parts": ["ffn"], "chance": 0.0},
        "aggregation": {"name": "regmean", "alpha": 0.5},
        "server": {"min_replies": 2},
        "fraction_train": 0.25,
    }
    experiment = of(strategies=[table])
    line = experiment.strategies[0].code(experiment).replace("model.config", "config")
    assert isinstance(eval(line, {**known, "FedRot": FedRot, "config": {"model_type": "bert"}}), FedRot)


def test_fields_of_a_strategy_are_arguments_of_fedrot_by_their_names() -> None:
    ours = {"alignment", "other_basis", "aggregation", "fit_head", "guard", "server"}
    assert ours <= Strategy.model_fields.keys()
    import inspect

    assert ours <= inspect.signature(FedRot).parameters.keys()


# Files


def file_of(folder: Path, text: str) -> Path:
    file = folder / "mine.toml"
    file.write_text(text, encoding="utf-8")
    return file


FILE = """
[base]
clients = 3
lr = 0.1
[[strategy]]
name = "mine"
guard = "loss"
[[experiment]]
name = "a"
[[experiment]]
name = "b"
lr = 0.2
strategies = ["mine", "aligned"]
"""


def test_experiments_of_a_file_share_its_base_and_its_strategies(tmp_path: Path) -> None:
    file = file_of(tmp_path, FILE)
    first, second = read_experiments(file, {})
    assert (first.name, first.clients, first.lr, names(first)) == ("a", 3, 0.1, ["fedavg", "mine"])
    assert (second.lr, names(second)) == (0.2, ["mine", "aligned"])
    assert second.strategies[0].guard == "loss"
    (chosen, _) = read_experiments(file, {"strategies": "mine,fit_head", "lr": 0.5})
    assert (names(chosen), chosen.lr, chosen.strategies[0].guard) == (["mine", "fit_head"], 0.5, "loss")


@pytest.mark.parametrize("name", ["demo", "different-one-shot", "different-rounds"])
def test_every_bundled_file_has_experiments(name: str) -> None:
    assert read_experiments(Path(name), {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[base", "is no TOML"),
        ("[base]\nlr = 1", "needs a table [[experiment]]"),
        ("[[experiment]]\n[matrix]\nlr = [1]", "but no 'matrix'"),
        ("experiment = [3]", "needs a table [[experiment]]"),
        ("[experiment]\nlr = 1", "needs a table [[experiment]]"),
        ("[[experiment]]\nname = 'a'\n[[experiment]]\nname = 'a'", "its own name"),
        ("[[experiment]]\n[[strategy]]\nguard = 'loss'", "Field required"),
        ("[[experiment]]\n[[strategy]]\nname = 'a'\n[[strategy]]\nname = 'a'", "its own name"),
        ("strategy = [1]\n[[experiment]]\n", "needs a table [[experiment]]"),
    ],
)
def test_files_that_are_none_are_refused(tmp_path: Path, text: str, said: str) -> None:
    file = file_of(tmp_path, text)
    with pytest.raises(ValueError, match=re.escape(said)):
        read_experiments(file, {})


def test_an_unknown_name_lists_the_bundled_files_and_a_file_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FedrotError, match="demo"):
        read_experiments(Path("dema"), {})
    with pytest.raises(FileNotFoundError):
        read_experiments(Path("none.toml"), {})
    (tmp_path / "demo").write_text("[[experiment]]\nname = 'mine'\n", encoding="utf-8")
    assert [one.name for one in read_experiments(Path("demo"), {})] == ["mine"]
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    with pytest.raises(ValueError, match="utf-8"):
        read_experiments(Path("latin.toml"), {})
