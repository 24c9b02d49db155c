"""The registry of tasks: its names, and what a task of one's own needs."""

import pytest

from fedrot.simulations.experiment import Experiment
from fedrot.simulations.tasks.classification import Classification
from fedrot.simulations.tasks.task_registry import TASKS, named_tasks
from tests.simulations.tasks.cases import experiment_of


def test_tasks_and_their_traits_by_name():
    assert [*TASKS] == ["classification", "mlm", "clm", "ner", "image"]
    assert named_tasks("classifies") == ["classification", "image"]
    assert named_tasks("peft") == ["classification", "clm", "ner"]


@pytest.mark.parametrize("name", ["wrong", "", ["mlm"], None])
def test_an_unknown_task_is_refused_with_the_known_ones(name):
    known = "'classification', 'mlm', 'clm', 'ner' or 'image'"
    with pytest.raises(ValueError, match=f"Input should be {known}"):
        Experiment.model_validate({"task": name})


def test_a_registered_class_is_a_task(monkeypatch):
    class Mine(Classification):
        name = "mine"
        architectures = ("distilbert",)
        usual_data = "notes"

    monkeypatch.setitem(TASKS, "mine", Mine)
    experiment = experiment_of("bert", task="mine")
    assert (experiment.data, experiment.architecture) == ("notes", "distilbert")
    assert experiment.name == "notes, iid, mine"
