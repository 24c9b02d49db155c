"""Mistakes of a first run: each error says early what to write instead."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.server import ServerAppComponents, ServerConfig
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAdam, Krum
from flwr.supercore.run import RunNotRunningException
from torch import nn
from transformers import BertConfig

import fedrot
from fedrot.strategies import Aligned, FedRot
from fedrot.strategies.settings import Checkpointing, OtherBasis
from tests.models import config_of, near
from tests.strategies.classifier import NAME, SYMMETRY, build, state
from tests.strategies.fakes import FakeGrid, failure, reply
from tests.strategies.grouped import grouped

CONFIG = config_of(NAME)


class AlignedAdam(Aligned, FedAdam):
    """Alignment in front of another strategy."""


class AlignedKrum(Aligned, Krum):
    """Alignment in front of a strategy that looks at every update."""


STRATEGY = pytest.mark.parametrize("strategy", [FedRot, AlignedAdam, AlignedKrum])


#: What stands where the configuration belongs, and what the error says to write.
INSTEAD: dict[str, tuple[Callable[[], tuple[Any, ...]], str]] = {
    "nothing": (lambda: (), "given nothing: write {name}(model.config, ...)"),
    "nothing, really": (lambda: (None,), "given nothing: write {name}(model.config, ...)"),
    "a model": (lambda: (build(),), "write {name}(model.config, ...)"),
    "a model without configuration": (lambda: (nn.Linear(2, 2),), "(docs/how-to/own-model.md)"),
    "a name": (lambda: ("bert-tiny",), "type str: write {name}(model.config, ...)"),
    "fraction_train": (lambda: (0.5,), "{name}(model.config, fraction_train=0.5)"),
    "a state dict": (lambda: (state(),), "write {name}(model.config, ...)"),
    "arrays": (lambda: (ArrayRecord(state()),), "type ArrayRecord: write {name}(model.config, ...)"),
    "a class": (lambda: (BertConfig,), "write {name}(model.config, ...)"),
    "another architecture": (lambda: ({"model_type": "mamba"},), "'mamba' is not supported"),
}


@STRATEGY
@pytest.mark.parametrize("what", INSTEAD)
def test_without_a_configuration_the_constructor_says_what_to_write(
    strategy: type[Aligned], what: str
) -> None:
    given, instead = INSTEAD[what]
    with pytest.raises(fedrot.FedrotError) as error:
        strategy(*given())
    assert instead.format(name=strategy.__name__) in str(error.value)


def _not_typed(**given: Any) -> dict[str, Any]:
    """Return arguments that a type checker would refuse."""
    return given


@STRATEGY
def test_a_module_in_place_of_what_builds_one_is_refused(strategy: type[Aligned]) -> None:
    with pytest.raises(fedrot.FedrotError, match=r"model=lambda: BertForSequenceClassification\("):
        strategy(CONFIG, other_basis=OtherBasis(model=build()))
    with pytest.raises(fedrot.FedrotError, match=r"a str as model.* write model=lambda: MyModel\("):
        OtherBasis(**_not_typed(model="bert-tiny"))
    strategy(CONFIG, other_basis=OtherBasis(model=build))


def test_without_alignment_no_configuration_is_needed_but_a_mistake_is_one() -> None:
    FedRot(alignment=None)
    FedRot({"model_type": "mamba"}, alignment=None)
    with pytest.raises(fedrot.FedrotError, match=r"fraction_train=0\.5"):
        FedRot(0.5, alignment=None)


# --- the first model ---------------------------------------------------------------------------------


def _start(strategy: Aligned, initial: Any, clients: Any = failure, rounds: int = 1) -> FakeGrid:
    given = clients if isinstance(clients, dict) else {100 + i: clients for i in range(3)}
    grid = FakeGrid(given)
    strategy.start(grid, initial, rounds, timeout=0.01)
    return grid


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"alignment": "attention"}, r"alignment is a str; pass fedrot\.AlignmentOptions"),
        ({"rows": "."}, "rows is the folder"),
        ({"on_round": "wandb"}, "on_round is a str; give a function"),
        ({"wire": "bfloat16"}, "wire is 'bfloat16'; choose from"),
        ({"aggregation": 3}, r"aggregation=fedrot\.aggregation\.RegMean"),
        ({"aggregation": "regmeen"}, r"regmeen.*regmean"),
    ],
)
def test_what_is_known_to_be_wrong_is_said_by_the_constructor(given: dict[str, Any], says: str) -> None:
    with pytest.raises(fedrot.FedrotError, match=says):
        FedRot(CONFIG, **grouped(**given))


def test_what_the_model_shows_to_be_wrong_is_said_before_clients_train() -> None:
    def asked(message: Message) -> Message:
        raise AssertionError("a client was asked")

    broken = {**state(), BIAS: torch.full_like(state()[BIAS], torch.nan)}
    for strategy in (FedRot(CONFIG), FedRot(alignment=None)):
        with pytest.raises(fedrot.FedrotError, match=f"'{BIAS}' in initial_arrays holds NaN"):
            _start(strategy, ArrayRecord(broken), asked)
    options = fedrot.AlignmentOptions(layers=(7,))
    with pytest.raises(fedrot.FedrotError, match="Layer 7 is not in the model"):
        _start(FedRot(CONFIG, alignment=options), ArrayRecord(state()), asked)


@pytest.mark.parametrize(
    ("record", "says"),
    [({"num_examples": 5}, "has no 'num-examples' .it has: num_examples"), ({}, "it has: nothing")],
)
def test_a_reply_without_the_weight_is_told_what_it_has(record: dict[str, int], says: str) -> None:
    def answer(message: Message) -> Message:
        arrays, metrics = ArrayRecord(state()), MetricRecord(record)
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    with pytest.raises(fedrot.FedrotError, match=says):
        _start(FedRot(CONFIG, fraction_evaluate=0.0), ArrayRecord(state()), answer)


@STRATEGY
def test_arrays_without_names_are_refused_before_clients_train(strategy: type[Aligned]) -> None:
    def asked(message: Message) -> Message:
        raise AssertionError("a client was asked")

    unnamed = ArrayRecord([tensor.numpy() for tensor in state().values()])
    with pytest.raises(fedrot.FedrotError, match=r"write ArrayRecord\(model\.state_dict\(\)\)"):
        _start(strategy(CONFIG), unnamed, asked)
    for wrong in (state(), list(unnamed.to_numpy_ndarrays()), build()):
        with pytest.raises(fedrot.FedrotError, match=r"write ArrayRecord\(model\.state_dict\(\)\)"):
            _start(strategy(CONFIG), wrong, asked)


def test_numbers_are_names_where_nothing_is_aligned_or_the_symmetry_says_so() -> None:
    unnamed = ArrayRecord([torch.zeros(3).numpy(), torch.ones(2).numpy()])
    named = fedrot.Symmetry("own", 0, (), {"0": (3,), "1": (2,)})
    for strategy in (FedRot(alignment=None), FedRot(named)):
        assert _start(strategy, unnamed).asked


# --- the legacy server -------------------------------------------------------------------------------


class Gone(FakeGrid):
    """A grid whose run ends when it is asked for nodes, so that the legacy server's thread ends, too."""

    def get_node_ids(self) -> Any:
        raise RunNotRunningException

    @property
    def run(self) -> Any:
        return type("Run", (), {"run_id": 1})()


@STRATEGY
def test_the_legacy_server_is_refused_with_what_to_write(strategy: type[Aligned]) -> None:
    app = ServerApp(
        server_fn=lambda context: ServerAppComponents(
            **_not_typed(strategy=strategy(CONFIG)), config=ServerConfig(num_rounds=1)
        )
    )
    context = Context(1, 1, {}, RecordDict(), {})
    with pytest.raises(fedrot.FedrotError, match=r"write app = ServerApp\(\).*strategy\.start\(grid, "):
        app(Gone({}), context)


# --- the first round ---------------------------------------------------------------------------------


def good(index: int) -> Callable[[Message], Message]:
    return lambda message: reply(message, near(state(), 0.05, index), 10, index)


def without(name: str, index: int) -> Callable[[Message], Message]:
    """Return a client that leaves a tensor out."""
    tensors = {key: tensor for key, tensor in near(state(), 0.05, index).items() if key != name}
    return lambda message: reply(message, tensors, 10, index)


def silent(message: Message) -> None: ...


def evaluating(client: Callable[[Message], Message | None]) -> Callable[[Message], Message | None]:
    """Return a client that evaluates, too."""

    def answer(message: Message) -> Message | None:
        if message.metadata.message_type == "train":
            return client(message)
        metrics = MetricRecord({"num-examples": 4, "accuracy": 0.5})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return answer


WEIGHT, BIAS = "classifier.weight", "classifier.bias"


def _clients(*clients: Callable[[Message], Message | None]) -> dict[int, Any]:
    return {100 + i: evaluating(client) for i, client in enumerate(clients)}


@STRATEGY
@pytest.mark.parametrize("align", [True, False])
def test_a_first_round_of_replies_with_one_fault_ends_the_run_with_it(
    strategy: type[Aligned], align: bool, tmp_path: Path
) -> None:
    report = tmp_path / "report.jsonl"
    clients = _clients(*(without(WEIGHT, index) for index in range(3)))
    given: dict[str, Any] = {"rows": report} | ({} if align else {"alignment": None})
    with pytest.raises(
        fedrot.FedrotError, match=f"Every reply of the first round .*'{WEIGHT}' is missing"
    ):
        _start(strategy(CONFIG, **grouped(**given)), ArrayRecord(state()), clients)
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    assert sorted(row["client"] for row in rows if WEIGHT in row.get("dropped", "")) == [0, 1, 2]


GOES_ON: dict[str, tuple[Callable[[Message], Message | None], ...]] = {
    "one is good": (without(WEIGHT, 0), without(WEIGHT, 1), good(2)),
    "reasons differ": (without(WEIGHT, 0), without(WEIGHT, 1), without(BIAS, 2)),
    "one failed": (without(WEIGHT, 0), without(WEIGHT, 1), failure),
    "one did not answer": (without(WEIGHT, 0), without(WEIGHT, 1), silent),
    "all failed": (failure, failure, failure),
}


@pytest.mark.parametrize("what", GOES_ON)
def test_a_first_round_that_another_may_better_does_not_end_the_run(what: str) -> None:
    strategy = FedRot(CONFIG, fraction_evaluate=0.0)
    grid = _start(strategy, ArrayRecord(state()), _clients(*GOES_ON[what]), 2)
    assert len([nodes for nodes in grid.asked if nodes]) == 2


@pytest.mark.parametrize("nodes", [1, 30])
def test_one_client_of_many_does_not_end_the_run(nodes: int) -> None:
    """Of thirty, the next round may ask a better one; where there is one, it may not."""
    few = {"min_train_nodes": 1, "min_available_nodes": 1, "fraction_train": 1 / nodes}
    strategy = FedRot(CONFIG, fraction_evaluate=0.0, **few)
    clients = _clients(*(without(WEIGHT, index) for index in range(nodes)))
    if nodes == 1:
        with pytest.raises(fedrot.FedrotError, match="Every reply of the first round"):
            _start(strategy, ArrayRecord(state()), clients, 2)
    else:
        grid = _start(strategy, ArrayRecord(state()), clients, 2)
        assert [len(asked) for asked in grid.asked if asked] == [1, 1]


def test_a_later_round_never_ends_the_run_nor_does_the_first_one_after_a_checkpoint(
    tmp_path: Path,
) -> None:
    def once(index: int, rounds: list[int]) -> Callable[[Message], Message]:
        """Return a client that is good in its first round, and then no more."""

        def answer(message: Message) -> Message:
            rounds.append(1)
            return (good(index) if len(rounds) == 1 else without(WEIGHT, index))(message)

        return answer

    clients = _clients(*(once(index, []) for index in range(3)))

    def play(rounds: int) -> Any:
        strategy = FedRot(CONFIG, checkpoints=Checkpointing(tmp_path), fraction_evaluate=0.0)
        return strategy.start(FakeGrid(clients), ArrayRecord(state()), rounds)

    play(1)
    metrics = play(3).train_metrics_clientapp
    assert [metrics[number]["fedrot-replies-accepted"] for number in (1, 2, 3)] == [3, 0, 0]


# --- a second run ------------------------------------------------------------------------------------


def _rounds(path: Path) -> list[int]:
    """Return the rounds that a file has rows of, in order, each once."""
    rows = [json.loads(line)["round"] for line in path.read_text().splitlines()]
    return list(dict.fromkeys(rows))


def _run(home: Path, rounds: int, **given: Any) -> None:
    strategy = FedRot(CONFIG, fraction_evaluate=0.0, **grouped(rows=home / "alignment.jsonl", **given))
    _start(strategy, ArrayRecord(state()), _clients(*map(good, range(3))), rounds)


def test_a_second_run_begins_files_of_its_own_and_loses_nothing(tmp_path: Path) -> None:
    before: dict[str, bytes] = {}
    for run, rounds in enumerate((3, 1, 2)):
        _run(tmp_path, rounds, **({"folder": tmp_path / "first"} if run == 1 else {}))
        path = tmp_path / "alignment.jsonl"
        assert _rounds(path) == list(range(1, rounds + 1))
        before[f"alignment.{run + 1}.jsonl"] = path.read_bytes()
    del before["alignment.3.jsonl"]
    aside = {path.name: path.read_bytes() for path in tmp_path.glob("*.[0-9].jsonl")}
    assert aside == before


def test_what_is_moved_aside_is_said_and_an_empty_file_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("flwr").propagate = True
    caplog.set_level(logging.INFO)
    (tmp_path / "alignment.jsonl").write_text("earlier\n")
    (tmp_path / "alignment.1.jsonl").write_text("earliest\n")
    _run(tmp_path, 1)
    assert "alignment.jsonl' is of an earlier run; renamed to '" in caplog.text
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "alignment.jsonl").touch()
    _run(tmp_path / "empty", 1)
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["alignment.jsonl"]
    assert (tmp_path / "alignment.1.jsonl").read_text() == "earliest\n"
    assert (tmp_path / "alignment.2.jsonl").read_text() == "earlier\n"


def test_a_resumed_run_goes_on_in_its_files(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    for rounds in (1, 3):
        _run(tmp_path, rounds, folder=kept)
    (path,) = tmp_path.glob("*.jsonl")
    assert _rounds(path) == [1, 2, 3]


def test_a_run_that_was_refused_leaves_the_files_of_the_other_one(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    _run(tmp_path, 1, folder=kept)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.jsonl")}
    (found,) = kept.glob("round-*")
    (found / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(fedrot.FedrotError, match="There is no usable checkpoint"):
        _run(tmp_path, 1, folder=kept)
    assert {path: path.read_bytes() for path in tmp_path.glob("*.jsonl")} == before


def test_a_run_killed_in_its_first_round_leaves_no_row_twice(tmp_path: Path) -> None:
    kept, path = tmp_path / "kept", tmp_path / "alignment.jsonl"

    def killed(message: Message) -> Message:
        raise KeyboardInterrupt

    def play(client: Any) -> None:
        strategy = FedRot(CONFIG, **grouped(folder=kept, rows=path))
        strategy.start(
            FakeGrid(_clients(*(client,) * 2)),
            ArrayRecord(state()),
            1,
            evaluate_fn=lambda number, arrays: MetricRecord({"loss": 1.0}),
        )

    with pytest.raises(KeyboardInterrupt):
        play(killed)
    play(good(0))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    stages = [(row["round"], row["stage"]) for row in rows if "stage" in row]
    assert stages == [(0, "server"), (1, "train"), (1, "evaluate"), (1, "server")]


def test_the_symmetry_may_be_given_in_place_of_the_configuration() -> None:
    strategy = FedRot(SYMMETRY)
    strategy.begin_round(ArrayRecord(state()))
    assert strategy.symmetry is SYMMETRY
