"""Mistakes of a first run: each error says early what to write instead."""

import numpy as np
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
from fedrot.simulations.run_folder import read_rows
from fedrot.strategies import (
    FedRot,
    Guard,
    LabelledRows,
    Matching,
    OtherBasis,
)
from fedrot.strategies.settings import Checkpointing
from tests.models import config_of, near
from tests.strategies.classifier import NAME, build, state
from tests.strategies.fakes import (
    FakeGrid,
    failure,
    grid_of,
    in_front_of,
    reply,
)
from tests.strategies.grouped import grouped

CONFIG, BASE, ARRAYS = config_of(NAME), state(), ArrayRecord(state())
WEIGHT, BIAS = "classifier.weight", "classifier.bias"
UNNAMED = ArrayRecord([tensor.numpy() for tensor in BASE.values()])

STRATEGY = pytest.mark.parametrize(
    "strategy", [FedRot, in_front_of(FedAdam), in_front_of(Krum)]
)


#: What is given to the constructor, and what the error says to write.
INSTEAD = {
    "nothing": ((), {}, "given nothing: write {name}(model.config, ...)"),
    "a model": ((build(),), {}, "write {name}(model.config, ...)"),
    "a model without configuration": (
        (nn.Linear(2, 2),),
        {},
        "(docs/how-to/own-model.md)",
    ),
    "fraction_train": ((0.5,), {}, "{name}(model.config, fraction_train=0.5)"),
    "fraction_train alone": ((0.5,), {"alignment": None}, "fraction_train=0.5"),
    "arrays": ((ARRAYS,), {}, "type ArrayRecord: write {name}(model.config, ...)"),
    "a class": ((BertConfig,), {}, "write {name}(model.config, ...)"),
    "another architecture": (
        ({"model_type": "mamba"},),
        {},
        "'mamba' is not supported",
    ),
    "alignment": (
        (CONFIG,),
        {"alignment": "attention"},
        "pass fedrot.AlignmentOptions",
    ),
}


@STRATEGY
@pytest.mark.parametrize("what", INSTEAD)
def test_the_constructor_says_what_to_write(strategy, what):
    given, named, instead = INSTEAD[what]
    with pytest.raises(fedrot.FedrotError) as error:
        strategy(*given, **named)
    assert instead.format(name=strategy.__name__) in str(error.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rows": "."}, "rows is the folder"),
        ({"on_round": "wandb"}, "on_round of Reporting is a str.*on_round=lambda"),
        ({"wire": "bfloat16"}, "wire is 'bfloat16'; choose"),
        ({"wire": torch.int8}, r"wire is torch\.int8"),
        ({"min_replies": 0}, "min_replies is 0"),
        ({"device": "nowhere"}, "device 'nowhere'"),
        ({"aggregation": 3}, "RegMean"),
        ({"aggregation": "regmeen"}, r"regmeen.*regmean"),
        ({"model": build()}, "OtherBasis is a BertForSequenceClassification; give"),
    ],
)
def test_what_is_known_to_be_wrong_is_said_by_the_constructor(given, says):
    with pytest.raises(fedrot.FedrotError, match=says):
        FedRot(CONFIG, **grouped(**given))


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (
            lambda: Matching(build, [{}], list),
            r"list; give .*, like \w+=lambda",
        ),
        (lambda: LabelledRows(build, [{}], list), r"list; give .*, like \w+=lambda"),
        (lambda: OtherBasis(build, learning_passes=-1), "negative"),
    ],
)
def test_what_a_group_of_settings_cannot_use_is_refused(build, says):
    with pytest.raises(fedrot.FedrotError, match=says):
        build()


def _start(strategy, initial=ARRAYS, *nodes, rounds=1):
    grid = grid_of(nodes or [failure] * 3)
    strategy.start(grid, initial, rounds, timeout=0.01)
    return grid


def asked(message):
    raise AssertionError("a client was asked")


@pytest.mark.parametrize(
    "result",
    [
        (0.5, {"accuracy": 0.75}),
        {"loss": 0.5, "accuracy": torch.tensor(0.75)},
        {"loss": np.float32(0.5), "accuracy": 0.75},
    ],
)
def test_an_evaluation_may_return_what_older_ones_do(result):
    nodes = grid_of(map(good, range(2)))
    for given in ({}, {"guard": Guard("loss", evaluate=lambda number, arrays: result)}):
        strategy = FedRot(CONFIG, fraction_evaluate=0.0, **given)
        evaluate_fn = None if given else lambda number, arrays: result
        history = strategy.start(nodes, ARRAYS, 1, evaluate_fn=evaluate_fn)
        for metrics in history.evaluate_metrics_serverapp.values():
            assert dict(metrics) == {"loss": 0.5, "accuracy": 0.75}
        assert len(history.evaluate_metrics_serverapp) == (0 if given else 2)


@pytest.mark.parametrize(
    "result", [0.5, "0.5", (1, 2, 3), (0.5, 0.75), {"loss": "0.5"}, [0.5]]
)
def test_an_evaluation_that_returns_no_metrics_is_told_what_to_return(result):
    with pytest.raises(
        fedrot.FedrotError, match=r"round 0 returned .*Return MetricRecord\("
    ):
        FedRot(CONFIG).start(
            grid_of([asked] * 2), ARRAYS, 1, evaluate_fn=lambda *_: result
        )


BROKEN = ArrayRecord({**BASE, BIAS: torch.full_like(BASE[BIAS], torch.nan)})


@pytest.mark.parametrize(
    ("given", "initial", "says"),
    [
        ({}, BROKEN, f"'{BIAS}' in initial_arrays holds NaN"),
        ({"alignment": None}, BROKEN, f"'{BIAS}' in initial_arrays holds NaN"),
        (
            {"alignment": fedrot.AlignmentOptions(layers=(7,))},
            ARRAYS,
            "Layer 7 is not in the model",
        ),
        *(
            ({}, wrong, r"write ArrayRecord\(model\.state_dict\(\)\)")
            for wrong in (UNNAMED, BASE, [*UNNAMED.to_numpy_ndarrays()], build())
        ),
    ],
)
@STRATEGY
def test_what_the_model_shows_to_be_wrong_is_said_before_clients_train(
    strategy, given, initial, says
):
    with pytest.raises(fedrot.FedrotError, match=says):
        _start(strategy(CONFIG, **given), initial, asked, asked)


def test_numbers_are_names_where_nothing_is_aligned_or_the_symmetry_says_so():
    unnamed = ArrayRecord([torch.zeros(3).numpy(), torch.ones(2).numpy()])
    named = fedrot.Symmetry("own", 0, (), {"0": (3,), "1": (2,)})
    unaligned = (
        FedRot(alignment=None),
        FedRot({"model_type": "mamba"}, alignment=None),
    )
    for strategy in (*unaligned, FedRot(named)):
        assert _start(strategy, unnamed).asked


class Gone(FakeGrid):
    """A grid whose run ends when it is asked for nodes, so that the legacy server's
    thread ends, too.
    """

    def get_node_ids(self):
        raise RunNotRunningException

    @property
    def run(self):
        return type("Run", (), {"run_id": 1})()


@STRATEGY
def test_the_legacy_server_is_refused_with_what_to_write(
    strategy,
):
    components = {
        "strategy": strategy(CONFIG),
        "config": ServerConfig(num_rounds=1),
    }
    app = ServerApp(server_fn=lambda context: ServerAppComponents(**components))
    with pytest.raises(
        fedrot.FedrotError, match=r"write app = ServerApp\(\).*strategy\.start\(grid, "
    ):
        app(Gone({}), Context(1, 1, {}, RecordDict(), {}))


def good(index):
    return lambda message: reply(message, near(BASE, 0.05, index), 10, index)


def without(name, index):
    tensors = {
        key: tensor for key, tensor in near(BASE, 0.05, index).items() if key != name
    }
    return lambda message: reply(message, tensors, 10, index)


def weighing(metrics):
    def answer(message):
        content = RecordDict({"arrays": ARRAYS, "metrics": MetricRecord({**metrics})})
        return Message(content, reply_to=message)

    return answer


def silent(message): ...


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        (
            [without(WEIGHT, i) for i in range(3)],
            f"Every reply of the first round .*'{WEIGHT}' is miss",
        ),
        (
            [weighing({"num_examples": 5})] * 3,
            "has no 'num-examples' .it has: num_examples",
        ),
        ([weighing({})] * 3, "it has: nothing"),
    ],
)
@pytest.mark.parametrize("align", [True, False])
@STRATEGY
def test_a_first_round_of_replies_with_one_fault_ends_the_run_with_it(
    strategy, align, nodes, says, tmp_path
):
    report = tmp_path / "report.jsonl"
    given = {"rows": report, "fraction_evaluate": 0.0} | (
        {} if align else {"alignment": None}
    )
    with pytest.raises(fedrot.FedrotError, match=says):
        _start(strategy(CONFIG, **grouped(**given)), ARRAYS, *nodes)
    assert len([row for row in read_rows(report) if "dropped" in row]) == 3


GOES_ON = {
    "one is good": (without(WEIGHT, 0), without(WEIGHT, 1), good(2)),
    "reasons differ": (without(WEIGHT, 0), without(WEIGHT, 1), without(BIAS, 2)),
    "one failed": (without(WEIGHT, 0), without(WEIGHT, 1), failure),
    "one did not answer": (without(WEIGHT, 0), without(WEIGHT, 1), silent),
    "all failed": (failure, failure, failure),
}


@pytest.mark.parametrize("what", GOES_ON)
def test_a_first_round_that_another_may_better_does_not_end_the_run(what):
    strategy = FedRot(CONFIG, fraction_evaluate=0.0)
    grid = _start(strategy, ARRAYS, *GOES_ON[what], rounds=2)
    assert len([nodes for nodes in grid.asked if nodes]) == 2


@pytest.mark.parametrize("nodes", [1, 30])
def test_one_client_of_many_does_not_end_the_run(nodes):
    """Of thirty, the next round may ask a better one; where there is one, it may
    not.
    """
    few = {"min_train_nodes": 1, "min_available_nodes": 1, "fraction_train": 1 / nodes}
    strategy = FedRot(CONFIG, fraction_evaluate=0.0, **few)
    clients = [without(WEIGHT, index) for index in range(nodes)]
    if nodes == 1:
        with pytest.raises(fedrot.FedrotError, match="Every reply"):
            _start(strategy, ARRAYS, *clients, rounds=2)
    else:
        grid = _start(strategy, ARRAYS, *clients, rounds=2)
        assert [len(nodes) for nodes in grid.asked if nodes] == [1, 1]


def test_a_later_round_never_ends_the_run_nor_does_the_first_one_after_a_checkpoint(
    tmp_path,
):
    def once(index):
        rounds = []

        def answer(message):
            rounds.append(1)
            return (good(index) if len(rounds) == 1 else without(WEIGHT, index))(
                message
            )

        return answer

    grid = grid_of(map(once, range(3)))
    for rounds in (1, 3):
        strategy = FedRot(
            CONFIG, checkpoints=Checkpointing(tmp_path), fraction_evaluate=0.0
        )
        metrics = strategy.start(grid, ARRAYS, rounds).train_metrics_clientapp
    assert [metrics[number]["fedrot-replies-accepted"] for number in (1, 2, 3)] == [
        3,
        0,
        0,
    ]


def test_a_run_that_was_killed_goes_on_in_its_file_and_a_refused_one_leaves_it(
    tmp_path,
):
    """An empty file is nobody's; rows of a first round that was killed are removed."""
    kept = tmp_path / "kept"
    path = tmp_path / "alignment.jsonl"
    path.touch()

    def killed(message):
        path.write_text('{"round": 1}\n')
        raise KeyboardInterrupt

    def play(*nodes):
        given = grouped(rows=path, folder=kept)
        _start(FedRot(CONFIG, **given, fraction_evaluate=0.0), ARRAYS, *nodes)

    with pytest.raises(KeyboardInterrupt):
        play(killed, killed)
    play(good(0), good(1))
    before = path.read_text()
    assert '{"round": 1}' not in before
    (checkpoint,) = kept.glob("round-*")
    (checkpoint / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(fedrot.FedrotError, match="no usable"):
        play(good(0), good(1))
    assert path.read_text() == before
    assert [*tmp_path.glob("*.jsonl")] == [path]
