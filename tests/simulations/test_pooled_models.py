"""Sentence-transformers models in simulations: their own pooling, and as one model like
any other.
"""

import numpy as np
import pytest
import torch
import transformers

from fedrot.errors import FedrotError
from fedrot.simulations.models import build_model, model_config
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.training import check_model, task_of
from fedrot.strategies import PooledClassifier
from fedrot.task_head.fit import fitted_task_head, with_task_head
from fedrot.task_head.sums import collect_classes
from tests.simulations.commands import run
from tests.simulations.tasks.cases import SIZES, experiment_of, parts, save
from tests.simulations.tensors import equal
from tests.strategies.test_pooled_classifier import BERT, CLS, folder_of


def task_with(model, **changes):
    settings = {"model": str(model), "architecture": "", "test_limit": 20, **changes}
    return task_of(experiment_of("bert", **settings).to_json())


def built(task, seed=0):
    return build_model(task.experiment, task.data, seed)


def test_a_sentence_transformers_model_is_read_by_its_pooling(tmp_path):
    """The seed draws the task head alone. It is fitted from clients' sums, and is saved
    and read as any other model.
    """
    task = task_with(folder_of(tmp_path / "encoder", CLS, dtype=torch.bfloat16))
    model = built(task)
    state = model.state_dict()
    assert type(model) is PooledClassifier
    assert model.config.pooling == "cls"
    assert [*model.config.id2label.values()] == [*task.data.label_names]
    assert model.dtype == torch.float32
    assert model_config(task.experiment, task.data).id2label == model.config.id2label
    check_model(task, model)
    same, other = (parts(built(task, seed)) for seed in (0, 1))
    assert equal(same, state)
    assert [n for n in state if not torch.equal(other[n], state[n])] == [
        "classifier.weight"
    ]
    batches = list(training.step_batches(task, model, np.arange(70), 70, 16, 0))
    sums = [collect_classes(model, [own], "classifier") for own in batches]
    weight, bias = fitted_task_head(sum(sums[1:], sums[0]))
    before = training.evaluate(model, task, task.train, np.arange(70))
    model.load_state_dict(with_task_head(state, "classifier", weight, bias))
    after = training.evaluate(model, task, task.train, np.arange(70))
    assert after["accuracy"] > before["accuracy"]
    served = tmp_path / "served"
    model.save_pretrained(served)
    transformers.AutoTokenizer.from_pretrained(tmp_path / "encoder").save_pretrained(
        served
    )
    assert equal(built(task_with(served), 7).state_dict(), model.state_dict())
    run("check", served, says="The function is preserved")
    merged = run("merge", served, served, "--out", tmp_path / "merged")
    assert "Nothing beyond chance" in merged or "basis" in merged


def test_other_tasks_and_saved_classifiers_are_as_ever(tmp_path):
    task = task_of(experiment_of("mlm bert", model="minilm", architecture="").to_json())
    assert type(built(task)).__name__ == "BertForMaskedLM"
    folder = folder_of(tmp_path / "one")
    config = transformers.BertConfig(**SIZES, num_labels=7)
    save(folder, config, "AutoModelForSequenceClassification")
    assert type(built(task_with(folder))).__name__ == "BertForSequenceClassification"


@pytest.mark.parametrize("text", ["[3]", '[{"type": 3, "path": ""}]'])
def test_a_damaged_folder_is_named(text, tmp_path):
    folder = folder_of(tmp_path, config=BERT)
    (folder / "modules.json").write_text(text)
    with pytest.raises(FedrotError, match=f"'{tmp_path}' cannot be loaded"):
        built(task_with(folder))
