"""Experiments and strategies: what completes them, what refuses them, the code to copy,
and files.
"""

import inspect
import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from fedrot.aggregation import aggregations
from fedrot.errors import FedrotError
from fedrot.simulations.experiment import (
    MOST_SEEDS,
    Experiment,
    read_experiments,
)
from fedrot.simulations.scenario import data_names
from fedrot.simulations.strategy import NAMED, Strategy
from fedrot.simulations.tasks.task_registry import TASKS
from fedrot.strategies import FedRot
from tests.simulations.data.files import write

LORA = {"r": 8, "target_modules": ["query"]}
OF_LORA = {"model": "minilm", "lora": LORA}
OF_RANKS = {**OF_LORA, "lora": {**LORA, "r": [2, 4]}}


def of(**fields):
    return Experiment.from_flat(fields)


def names(experiment):
    return [strategy.name for strategy in experiment.strategies]


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_an_experiment_of_its_own(task):
    traits = TASKS[task]
    experiment = of(task=task, data=traits.usual_data or "conll")
    assert experiment.architecture == traits.architectures[0]
    assert experiment.name.endswith("" if task == "classification" else task)
    assert ("fit_head" in names(experiment)) == traits.classifies


@pytest.mark.parametrize(
    ("fields", "strategies"),
    [
        ({}, "fedavg fedavg_head head_only fit_head alone"),
        ({"start": "different"}, "fedavg fedavg_head head_only fit_head aligned alone"),
        ({"holdout": 0}, "fedavg aligned"),
        ({"data": "a,b"}, "fedavg aligned"),
        ({"task": "clm"}, "fedavg aligned"),
        (OF_LORA, "fedavg exact head_only fit_head alone"),
        (OF_RANKS, "exact head_only alone"),
        ({"model": "smollm2", "task": "clm", "lora": LORA}, "fedavg exact"),
    ],
)
def test_strategies_that_answer_the_question(fields, strategies):
    assert " ".join(names(of(**fields))) == strategies


@pytest.mark.parametrize(
    ("fields", "attribute", "value"),
    [
        ({}, "name", "goemotions_ekman, iid"),
        (
            {"task": "clm", "architecture": "llama"},
            "name",
            "goemotions_ekman, iid, clm, llama",
        ),
        ({"partition": "dirichlet:0.5"}, "name", "goemotions_ekman, dirichlet:0.5"),
        ({"name": "mine"}, "name", "mine"),
        ({"seeds": "3"}, "seeds", (0, 1, 2)),
        ({"seeds": 2}, "seeds", (0, 1)),
        ({"seeds": "1, 4,9"}, "seeds", (1, 4, 9)),
        ({"seeds": "0,"}, "seeds", (0,)),
        ({"seeds": [7]}, "seeds", (7,)),
        ({}, "clients", 4),
        ({"partition": " column:site"}, "clients", 0),
        ({"partition": "column:site", "clients": 3}, "clients", 3),
        ({}, "ranks", (None,)),
        (OF_LORA, "ranks", (8,)),
        (OF_RANKS, "ranks", (2, 4)),
    ],
)
def test_what_is_not_said_is_completed(fields, attribute, value):
    assert getattr(of(**fields), attribute) == value


def test_the_first_round_may_have_epochs_of_its_own():
    experiment = of(first_epochs=4, local_epochs=2)
    assert (experiment.epochs(1), experiment.epochs(2)) == (4, 2)
    assert of(local_epochs=2).epochs(1) == 2


def test_flat_settings_of_flower_become_the_same_experiment():
    flat = {
        "train-limit": 0,
        "label-column": "",
        "seeds": "2",
        "strategies": "fedavg, aligned",
    }
    assert of(**flat, **{"first-epochs": 0.0}) == of(
        seeds=[0, 1], strategies=["fedavg", "aligned"]
    )
    assert of(model="minilm", lora='{r = 8, target_modules = ["query"]}') == of(
        **OF_LORA
    )
    source = resources.files("fedrot.simulations") / "flower_app" / "pyproject.toml"
    app = tomllib.loads(source.read_text("utf-8"))["tool"]["flwr"]["app"]["config"]
    app.pop("out")
    known = {name.replace("_", "-") for name in Experiment.model_fields}
    assert app.keys() == known - {"pretrain-data"}
    assert of(**app) == of()


def test_an_experiment_survives_json():
    table = {
        "name": "mine",
        "alignment": {"parts": ["ffn"]},
        "aggregation": {"name": "regmean"},
    }
    experiment = of(
        strategies=["fedavg", table], partition="dirichlet:0.3", data_dir=Path("data")
    )
    assert Experiment.model_validate_json(experiment.to_json()) == experiment


def test_trainings_are_shared_where_nothing_that_decides_them_differs():
    first = of(strategies="fedavg", seeds=1, name="a")
    alike = [
        of(strategies="aligned", seeds=3),
        of(start="scrambled", strategies="fedavg"),
    ]
    others = [
        of(lr=2e-3),
        of(start="different"),
        of(rounds=4),
        of(holdout=0.2),
        of(batch_size=8),
    ]
    assert {experiment.training for experiment in alike} == {first.training}
    assert first.training not in {experiment.training for experiment in others}


TABLE = {"name": "mine"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"task": "translation"}, "classification"),
        ({"task": "ner"}, "no bundled data set"),
        ({"task": "mlm", "label_kind": "multi"}, "label_kind"),
        ({"task": "clm", "architecture": "bert"}, "gpt2 or llama"),
        (
            {"model": "minilm", "architecture": "bert"},
            "architecture is for small models",
        ),
        *(
            ({name: 0}, "greater than 0")
            for name in ("rounds", "batch_size", "lr", "width")
        ),
        *(({name: 1}, "less than 1") for name in ("dropout", "holdout")),
        ({"max_length": 3}, "greater than 3"),
        ({"start": "pretrained"}, "'same', 'different' or 'scrambled'"),
        ({"start": "different", "fraction_train": 0.5}, "needs fraction_train 1"),
        (
            {"start": "different", "strategies": [{**TABLE, "fraction_train": 0.5}]},
            "fraction_train 1",
        ),
        ({"start": "different", "model": "minilm"}, "use start 'same'"),
        ({"seeds": "0"}, "no choice of seeds"),
        ({"seeds": "one"}, "no choice of seeds"),
        ({"seeds": [1, 1]}, "each once"),
        ({"seeds": []}, "at least one"),
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
        ({"strategies": ["fedavg", "fedavg"]}, "two strategies have the same name"),
        ({"strategies": [{**TABLE, "checkpoints": 1}]}, "checkpoints"),
        ({"strategies": [{**TABLE, "kind": "magic"}]}, "unknown kind 'magic'"),
        ({"strategies": [{**TABLE, "aggregation": "median"}]}, "one of mean"),
        ({"strategies": [{**TABLE, "aggregation": {"alpha": 1}}]}, "one of mean"),
        ({"strategies": [{**TABLE, "batches": 3}]}, "leave out batches"),
        ({"strategies": [{**TABLE, "adapters": {"method": "exact"}}]}, "give lora"),
        (
            {**OF_LORA, "strategies": [{**TABLE, "adapters": {"ridge": 1}}]},
            "argument 'ridge'",
        ),
        ({"strategies": [{**TABLE, "clients": [4]}]}, "there are 4"),
        ({"strategies": [{"kind": "head_only"}]}, "name"),
        ({"strategies": "fit_head", "holdout": 0}, "holdout must not be 0"),
        ({"strategies": "guarded", "holdout": 0}, "holdout must not be 0"),
        ({**OF_LORA, "strategies": [{**TABLE, "guard": "loss"}]}, "'guard' is for"),
        ({**OF_RANKS, "strategies": "fedavg"}, "no mean"),
    ],
)
def test_settings_that_cannot_be_are_refused(fields, said):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        of(**fields)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", NAMED)
def test_every_named_strategy_goes_with_some_experiment_and_says_what_it_does(
    name,
):
    (strategy,) = of(
        **OF_LORA if "adapters" in NAMED[name] else {}, strategies=name
    ).strategies
    assert (strategy.name, NAMED[name]["says"][-1]) == (name, ".")


def test_every_aggregation_has_a_strategy():
    for entry in aggregations({"symmetry"}):
        (strategy,) = of(strategies=[{**TABLE, "aggregation": entry.name}]).strategies
        assert strategy.entry == entry


@pytest.mark.parametrize(
    ("fields", "strategy", "code"),
    [
        ({}, "fedavg", "FedAvg()"),
        ({"fraction_train": 0.5}, "fedavg", "FedAvg(fraction_train=0.5)"),
        ({}, "aligned", "FedRot(model.config)"),
        (
            {"start": "different"},
            "aligned",
            "FedRot(model.config, other_basis=OtherBasis(make_model))",
        ),
        ({}, "fisher", 'FedRot(model.config, alignment=None, aggregation="fisher")'),
        (
            {},
            "fedavg_head",
            "FedAvg()  # then fit_task_head(grid, result.arrays, model.config)",
        ),
        (OF_LORA, "fedavg", "FedAvg()"),
        (OF_LORA, "exact", "FedRotLoRA(peft_config, AdapterOptions(method='exact'))"),
        (OF_LORA, "fit_head", "FedRotLoRA(peft_config, fit_head=True)"),
        (
            {},
            {
                **TABLE,
                "alignment": {"parts": ["ffn"]},
                "guard": "loss",
                "server": {"min_replies": 2},
            },
            "FedRot(model.config, alignment=AlignmentOptions(parts=['ffn']), "
            "guard='loss', server=Server(min_replies=2))",
        ),
        (
            {},
            {
                **TABLE,
                "aggregation": {"name": "regmean", "alpha": 0.5},
                "fraction_train": 0.25,
            },
            "FedRot(model.config, aggregation=lambda: RegMean(alpha=0.5), "
            "fraction_train=0.25)",
        ),
    ],
)
def test_the_line_to_copy(fields, strategy, code):
    experiment = of(**fields, strategies=[strategy])
    assert experiment.strategies[0].code(experiment) == code


def test_fields_of_a_strategy_are_arguments_of_fedrot_by_their_names():
    ours = {"alignment", "other_basis", "aggregation", "fit_head", "guard", "server"}
    assert (
        ours
        <= Strategy.model_fields.keys() & inspect.signature(FedRot).parameters.keys()
    )


def file_of(folder, text):
    file = folder / "mine.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_experiments_of_a_file_share_its_base_and_its_strategies(
    tmp_path,
):
    text = (
        "[base]\nclients = 3\nlr = 0.1\n[[strategy]]\nname = 'mine'\nguard = 'loss'\n"
    )
    text += "[[experiment]]\nname = 'a'\n[[experiment]]\nname = 'b'\nlr = 0.2\n"
    file = file_of(tmp_path, f"{text}strategies = ['mine', 'aligned']")
    first, second = read_experiments(file, {})
    assert (first.name, first.clients, first.lr) == ("a", 3, 0.1)
    assert names(first) == ["fedavg", "mine"]
    assert (second.lr, names(second)) == (0.2, ["mine", "aligned"])
    assert second.strategies[0].guard == "loss"
    (chosen, _) = read_experiments(file, {"strategies": "mine,fit_head", "lr": 0.5})
    assert names(chosen) == ["mine", "fit_head"]
    assert (chosen.lr, chosen.strategies[0].guard) == (0.5, "loss")


def test_names_in_a_text_may_have_commas_where_they_are_known(tmp_path):
    write(tmp_path / "any" / "a,b.csv", text=["x"])
    write(tmp_path / "c.csv", text=["x"])
    for text, wanted in (
        ("any/a,b.csv", ["any/a,b.csv"]),
        (" c.csv , a,b.csv,,any/a,b.csv", ["c.csv", "a,b.csv", "any/a,b.csv"]),
        ("a,b,c.csv", ["a", "b", "c.csv"]),
        (" , ", []),
    ):
        assert data_names(text, tmp_path) == wanted
    assert names(of(data="a,b.csv", data_dir=tmp_path)) == names(of())
    assert of(**{**OF_LORA, "data": "a,b.csv", "data_dir": tmp_path}).lora
    text = "[[strategy]]\nname = 'a, b'\n[[strategy]]\nname = 'a'\n[[experiment]]\n"
    file = file_of(tmp_path, text)
    (chosen,) = read_experiments(file, {"strategies": "a,a, b,fedavg"})
    assert names(chosen) == ["a", "a, b", "fedavg"]


@pytest.mark.parametrize("name", ["demo", "different-one-shot", "different-rounds"])
def test_every_bundled_file_has_experiments(name):
    assert read_experiments(Path(name), {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[base", "is no TOML"),
        ("[[experiment]]\n[matrix]\nlr = [1]", "but no 'matrix'"),
        ("experiment = [3]", "needs a table [[experiment]]"),
        ("[[experiment]]\nname = 'a'\n[[experiment]]\nname = 'a'", "its own name"),
        ("[[experiment]]\n[[strategy]]\nguard = 'loss'", "Field required"),
        (
            "[[experiment]]\n[[strategy]]\nname = 'a'\n[[strategy]]\nname = 'a'",
            "its own name",
        ),
        ("strategy = [1]\n[[experiment]]\n", "needs a table [[experiment]]"),
    ],
)
def test_files_that_are_none_are_refused(tmp_path, text, said):
    file = file_of(tmp_path, text)
    with pytest.raises(ValueError, match=re.escape(said)):
        read_experiments(file, {})


def test_an_unknown_name_lists_the_bundled_files_and_a_file_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FedrotError, match="demo"):
        read_experiments(Path("dema"), {})
    with pytest.raises(FileNotFoundError):
        read_experiments(Path("none.toml"), {})
    (tmp_path / "demo").write_text("[[experiment]]\nname = 'mine'\n", encoding="utf-8")
    assert [one.name for one in read_experiments(Path("demo"), {})] == ["mine"]
