"""Cells in which clients train LoRA adapters, and rivals average them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reproductions.plugins  # noqa: F401
from fedrot.lora import AdapterOptions, adapter_tensors
from fedrot.simulations.arm import Arm
from fedrot.simulations.federation.client_app import FACTORS
from fedrot.simulations.federation.run_folder import read_rows
from fedrot.simulations.models import build_model
from fedrot.simulations.settings import Experiment
from fedrot.simulations.tasks.task import task_of
from reproductions.lora_clients import TRAIN
from tests.simulations.federation import test_adapters as of_adapters
from tests.simulations.federation.test_adapters import LORA, SMALL, values

pretrained, run = of_adapters.pretrained, of_adapters.run

ARMS = (
    "plain",
    "lora-exact(gauge=previous)",
    "lora-mean(residual=fold)",
    "lora-mean(schedule=freeze-a)",
    "lora-stack(residual=fold)",
    "adapters@global*0",
    "joined",
)


@pytest.fixture(scope="session")
def all_arms(run: Callable[..., Path]) -> Path:
    return run(*ARMS)


def test_clients_read_the_factors_by_the_key_that_strategies_send() -> None:
    assert FACTORS == TRAIN


def test_errors_of_the_averages_are_recorded(all_arms: Path) -> None:
    error = values(all_arms, "fedrot-adapter-error", "alignment")
    assert {arm for arm, _ in error} == {*ARMS[:5]}
    for server_round in (1, 2):
        assert error["plain", server_round] > 0.001
        for arm in (ARMS[2], ARMS[4]):
            assert error[arm, server_round] == 0
        assert error["lora-mean(schedule=freeze-a)", server_round] < 1e-5
    # Of the same updates no factors have a smaller one; later rounds start from different adapters.
    assert error["lora-exact(gauge=previous)", 1] < error["plain", 1]


def test_factors_are_rotated_as_fedrot_does(all_arms: Path) -> None:
    moved = values(all_arms, "fedrot-groups-moved", "alignment")
    # Two clients, two modules; without a test against chance.
    assert moved["adapters@global*0", 1] == 4
    loss = values(all_arms, "loss", "central")
    assert loss["adapters@global*0", 2] != loss["plain", 2]
    assert abs(loss["adapters@global*0", 2] - loss["plain", 2]) < 0.1


def test_bytes_are_those_of_what_travels(all_arms: Path, pretrained: Path) -> None:
    config = of_adapters.config_of(all_arms, pretrained)
    tensors = adapter_tensors(build_model(config, task_of(config.to_json()).data, 0))
    size = 4 * sum(tensor.numel() for tensor in tensors.values())
    sent, received = values(all_arms, "broadcast", "bytes"), values(all_arms, "bytes", "client:1")
    for arm in ARMS[:5]:
        assert received[arm, 2] == size == sent[arm, 1]
        # Residuals of two modules of 16 x 16.
        assert sent[arm, 2] == size + (2 * 16 * 16 * 4 if "fold" in arm else 0)


def test_the_same_run_twice_has_the_same_rows(run: Callable[..., Path], all_arms: Path) -> None:
    def rows(path: Path) -> list[dict[str, Any]]:
        return [row for row in read_rows(path) if "seconds" not in row["metric"]]

    assert rows(run(*ARMS)) == rows(all_arms)


def test_clients_of_several_ranks(run: Callable[..., Path]) -> None:
    path = run("lora-exact", "lora-pad", lora="r=2+4,targets=query,alpha=6", holdout=0.2)
    sizes = [values(path, "bytes", f"client:{client}") for client in range(2)]
    for arm in ("lora-exact", "lora-pad"):
        # Two factors of 16 x rank in float32.
        assert sizes[1][arm, 1] - sizes[0][arm, 1] == 2 * 16 * 2 * 4
    loss = values(path, "loss", "central")
    assert loss["lora-exact", 2] != loss["lora-pad", 2]
    assert max(loss.values()) < 3


def test_an_arm_does_not_depend_on_those_before(run: Callable[..., Path], all_arms: Path) -> None:
    """A residual has changed the base weights of a client's model before."""
    alone, after = (values(path, "loss", "central") for path in (run(ARMS[3]), all_arms))
    assert all(after[key] == value for key, value in alone.items())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arms": "lora-mean(residual=fold)", "server": "adam"}, "does not go with server 'adam'"),
        ({"arms": "adapters/greedy"}, "arm 'adapters/greedy' is not for adapters"),
        ({"arms": "adapters", "server": "adam"}, "does not go with server 'adam'"),
        ({"lora": "", "arms": "adapters"}, "arm 'adapters' is for adapters; give lora"),
        ({"lora": "", "arms": "lora-pad"}, "arm 'lora-pad' is for adapters; give lora"),
        ({"arms": "lora-mean(schedule=freeze-a,by=both)"}, "Unknown schedule 'freeze-a,by=both'"),
        ({"arms": "lora-pad(ridge=1)"}, "unknown option 'ridge'; one of gauge, strength"),
        ({"arms": "lora-regmean(strength=1)"}, "Method 'regmean' takes no options of rivals"),
        ({"lora": "r=2+4,targets=q", "arms": "lora-rotate"}, "factors of different ranks have no mean"),
    ],
)
def test_what_does_not_go_with_adapters_is_refused(changes: dict[str, Any], said: str) -> None:
    settings = {**SMALL, "model": "some/model", "lora": LORA, **changes}
    with pytest.raises(ValueError, match=said):
        Experiment.from_flat(settings)


def test_arms_of_our_methods_are_not_rivals() -> None:
    for name in ("lora-mean", "lora-exact(gauge=none)", "lora-regmean(regmean_alpha=0.5)"):
        arm = Arm.parse(name)
        assert type(arm) is Arm
        assert type(arm.adapters) is AdapterOptions
