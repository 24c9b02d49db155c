"""Arms whose final model gets a task head that is fitted to the clients' rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedrot.errors import FedrotError
from fedrot.head import collect_classes, fit_head
from fedrot.simulations.arm import Arm
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation import arm_strategies, runner
from fedrot.simulations.federation.grid_run import run_job
from fedrot.simulations.models.build import build_model
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.task import task_of
from fedrot.strategies.sums.task_head import TaskHeads
from tests.strategies.fakes import tensors_of

SMALL: dict[str, Any] = {
    "task": "image",
    "train_limit": 600,
    "test_limit": 60,
    "layers": 1,
    "width": 32,
    "heads": 2,
    "clients": 3,
    "holdout": 0.3,
    "rounds": 2,
    "lr": 0.01,
    "partition": "dirichlet:0.3",
    "seeds": (0,),
}


def rows(config: SimulationConfig, *arms: str) -> Iterator[dict[tuple[str, int, str], float]]:
    """Yield the values of a cell of each arm by scope, round and metric."""
    told = [(config.to_json(), 0, "same", arm) for arm in arms]
    for _, found, _, failure in run_job(told, Path("nowhere"), "of no folder here"):
        assert not failure
        yield {(row["scope"], row["round"], row["metric"]): row["value"] for row in found.rows}


def test_the_last_round_is_reported_with_the_head_that_is_fitted_to_all_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    real = arm_strategies.fit_task_head

    def noting(grid: Any, arrays: Any, *args: Any, **kwargs: Any) -> Any:
        found = real(grid, arrays, *args, **kwargs)
        calls.append((tensors_of(arrays), found))
        return found

    monkeypatch.setattr(arm_strategies, "fit_task_head", noting)
    config = SimulationConfig(**SMALL)
    plain, fitted = rows(config, "plain", "plain+task-head")
    ((before, found),) = calls
    task = task_of(config.to_json())
    model = build_model(config, task.data, seed=0)

    model.load_state_dict(before)
    trained = np.concatenate([task.client_rows(0, client)[0] for client in range(3)])
    held_out = sum(len(task.client_rows(0, client)[1]) for client in range(3))
    batches = training.step_batches(task, model, trained, len(trained), 32, 0)
    weight, bias = fit_head(collect_classes(model, batches, "classifier"), found.shrinkage)
    after = tensors_of(found.arrays)
    assert found.fitted
    for name, wanted in (("weight", weight), ("bias", bias)):
        own, size = after[f"classifier.{name}"].double(), float(wanted.abs().max()) / found.temperature
        assert torch.allclose(own, wanted / found.temperature, atol=1e-4 * size)

    model.load_state_dict(after)
    measured = training.evaluate(model, task, task.test, np.arange(len(task.test)))
    assert {name: fitted["central", 2, name] for name in measured} == measured
    names = ("as-it-was", "calibrated", "fitted", "kept", "temperature", "rows")
    wanted_row = (*found.losses, 1.0, found.temperature, held_out)
    assert [fitted["task-head", 2, name] for name in names] == list(wanted_row)
    changed = {key for key in fitted if key not in plain or fitted[key] != plain[key]}
    timed = {key for key in changed if key[2].startswith("seconds-")}
    assert changed - timed <= {
        key for key in fitted if key[0] in ("task-head", "central") and key[1] == 2
    }


def test_a_head_of_another_task_is_refused_before_anything_is_trained() -> None:
    config = SimulationConfig(task="clm", train_limit=100, holdout=0.2, arms=("plain+task-head",))
    with pytest.raises(
        FedrotError, match=r"arm 'plain\+task-head': The task head of .* the model has none"
    ):
        runner.check([config])


@pytest.mark.parametrize("arm", ["lora-exact+task-head"])
def test_there_is_one_model_whose_head_is_fitted(arm: str) -> None:
    with pytest.raises(ValueError, match="needs one model as the result, and this arm has none"):
        Arm.parse(arm)


@pytest.mark.parametrize(
    "arm",
    [
        *("plain", "aligned@global*0:loss", "plain/regmean(alpha=0.5)", "ffn#0+1"),
        *("regmean", "fisher", "regmean(alpha=0.5)", "fisher#0+1"),
    ],
)
def test_the_rest_of_the_name_keeps_its_meaning(arm: str) -> None:
    alone, fitted = Arm.parse(arm), Arm.parse(f"{arm}+task-head")
    assert fitted == alone.model_copy(update={"name": f"{arm}+task-head", "fits_task_head": True})


def test_clients_go_on_from_the_head_of_the_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    fits: list[Any] = []
    real, configure = TaskHeads.fitted, arm_strategies.CellStrategy.configure_train
    broadcast: list[Any] = []

    def noting(self: TaskHeads, *args: Any) -> Any:
        fits.append(real(self, *args))
        return fits[-1]

    def configured(self: Any, server_round: int, arrays: Any, *args: Any) -> Any:
        broadcast.append(tensors_of(arrays))
        return configure(self, server_round, arrays, *args)

    monkeypatch.setattr(TaskHeads, "fitted", noting)
    monkeypatch.setattr(arm_strategies.CellStrategy, "configure_train", configured)
    config = SimulationConfig(**{**SMALL, "rounds": 3})
    (found,) = rows(config, "plain+task-head-each-round")
    # Before the first round, and after each.
    assert len(fits) == 1 + len(broadcast) == 4
    for fit, received in zip(fits[:3], broadcast, strict=True):
        sent = tensors_of(fit.arrays)
        assert all(torch.equal(received[tensor], value) for tensor, value in sent.items())
    for number, fit in enumerate(fits[1:], start=1):
        assert found["alignment", number, "fedrot-head-change"] == fit.change
    task = task_of(config.to_json())
    model = build_model(config, task.data, seed=0)
    for number, fit in enumerate(fits):
        model.load_state_dict(tensors_of(fit.arrays))
        measured = training.evaluate(model, task, task.test, np.arange(len(task.test)))
        assert {name: found["central", number, name] for name in measured} == measured


def test_an_arm_that_fits_each_round_is_read() -> None:
    arm = Arm.parse("aligned:loss+task-head-each-round")
    assert (arm.guard, arm.fits_task_head, arm.fits_each_round, arm.chooses) == (
        "loss",
        True,
        True,
        True,
    )
    assert arm.name == "aligned:loss+task-head-each-round"
