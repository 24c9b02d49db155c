"""Resumed runs: the calls of Flower's loop, and the same end after every stop."""

import random
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping as ClippingAtClients,
)
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping as AdaptiveClipping,
)
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping as FixedClipping,
)
from flwr.serverapp.strategy import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedYogi,
    Krum,
    QFedAvg,
)

from fedrot.errors import FedrotError
from fedrot.lora import AdapterOptions
from fedrot.options import AlignmentOptions
from fedrot.simulations.run_folder import read_rows
from fedrot.strategies import Aligned, FedRot, FedRotLoRA
from fedrot.strategies.resume.checkpoints import Checkpointing
from fedrot.strategies.resume.run import run
from fedrot.strategies.resume.state import RunState
from fedrot.strategies.resume.values import decode
from fedrot.strategies.round.guard import Guard
from fedrot.strategies.settings import Reporting
from tests.strategies.classifier import SYMMETRY, state
from tests.strategies.fakes import (
    FakeGrid,
    failure,
    grid_of,
    in_front_of,
    round_of,
)
from tests.strategies.resume.children import CLIENTS, client, ending
from tests.strategies.resume.children import evaluate as evaluated
from tests.strategies.test_lora import CONFIG as LORA
from tests.strategies.test_lora import adapter, floats

ROUNDS = 3
COMMON = {"fraction_train": 0.5, "fraction_evaluate": 0.5}
NOISE = {"noise_multiplier": 0.1, "num_sampled_clients": 2}
SMALL = {"weight": torch.linspace(-1, 1, 12).reshape(3, 4), "bias": torch.zeros(3)}
GLOBAL = AlignmentOptions(anchor="global")


def _private(wrapper, inside=FedAvg, *first, **more):
    return wrapper(*first, inside(**COMMON), **NOISE, **more)


#: Builders of strategies, anew for every run.
STRATEGIES = {
    "FedAvg": lambda: FedAvg(**COMMON),
    "FedAvgM": lambda: FedAvgM(**COMMON, server_learning_rate=0.7, server_momentum=0.9),
    "FedAdam": lambda: FedAdam(**COMMON, eta=0.01),
    "FedYogi": lambda: FedYogi(**COMMON, eta=0.01),
    "FedAdagrad": lambda: FedAdagrad(**COMMON, eta=0.01),
    "Krum": lambda: Krum(**COMMON, num_malicious_nodes=0),
    "QFedAvg": lambda: QFedAvg(**COMMON, q=0.5, client_learning_rate=0.5),
    "fixed clipping": lambda: _private(FixedClipping, clipping_norm=0.2),
    "adaptive clipping": lambda: _private(AdaptiveClipping),
    "adaptive clipping of FedAvgM": lambda: AdaptiveClipping(
        FedAvgM(**COMMON, server_momentum=0.9), **NOISE
    ),
    "adaptive clipping at clients": lambda: _private(ClippingAtClients, FedAdam),
    "FedRot": lambda: FedRot(SYMMETRY, **COMMON),
    "aligned FedAdam": lambda: in_front_of(FedAdam)(SYMMETRY, **COMMON, eta=0.01),
    "aligned privacy": lambda: _private(
        in_front_of(AdaptiveClipping), FedAvg, SYMMETRY, alignment=GLOBAL
    ),
}


def grid(fails=lambda number, index: False):
    """Return the clients, which fail in the rounds that a function of round and client
    names.
    """

    def client_of(index):
        def answer(message):
            number = round_of(message)
            return (failure if fails(number, index) else client(index))(message)

        return answer

    return grid_of(map(client_of, range(CLIENTS)))


def evaluate(number, arrays):
    """Return metrics that use up random numbers; in some rounds none."""
    return evaluated(number, arrays) if number != 2 else None


def play(
    strategy,
    folder=None,
    rounds=ROUNDS,
    tensors=SMALL,
    seed=0,
    clients=None,
    **settings,
):
    """Run a strategy on the deterministic clients, with checkpoints if in a folder."""
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(seed)
    start = strategy.start
    if folder:
        start = partial(run, strategy, checkpoints=Checkpointing(folder))
    settings = {"evaluate_fn": evaluate, **settings}
    return start(clients or grid(), ArrayRecord(tensors), rounds, **settings)


# The loop


class Recorded(FedAvg):
    """FedAvg that writes down how it is called, and what it is given."""

    def __init__(self):
        super().__init__(**COMMON)
        self.calls = []

    def _asked(self, hook, number, *given):
        arrays, config, _ = given
        self.calls.append((hook, number, arrays.object_id, dict(config)))
        return getattr(super(), hook)(number, *given)

    def _answered(self, hook, number, replies):
        replies = list(replies)
        nodes = [reply.metadata.src_node_id for reply in replies]
        self.calls.append((hook, number, nodes))
        return getattr(super(), hook)(number, replies)

    def summary(self):
        self.calls.append(("summary",))

    def configure_train(self, *given):
        return self._asked("configure_train", *given)

    def aggregate_train(self, *given):
        result = self._answered("aggregate_train", *given)
        return result if given[0] != 2 else (None, None)

    def configure_evaluate(self, *given):
        return self._asked("configure_evaluate", *given)

    def aggregate_evaluate(self, *given):
        result = self._answered("aggregate_evaluate", *given)
        return result if given[0] != 3 else None

    def evaluation(self, number, arrays):
        """Stand in for the function that evaluates at the server."""
        self.calls.append(("evaluation", number, arrays.object_id))
        return evaluate(number, arrays)


class TimedGrid(FakeGrid):
    """Writes down the timeouts that it is given."""

    timeouts = ()

    def send_and_receive(self, messages, *, timeout=None):
        self.timeouts += (timeout,)
        return super().send_and_receive(messages, timeout=timeout)


#: What only one of the two loops says, or says with an address in memory.
OTHER_LINES = ("finished in", "heckpoint", "ConfigRecord (")


@pytest.mark.parametrize(
    ("settings", "evaluated"),
    [({}, True), ({"train_config": {"lr": 0.1}, "evaluate_config": {"b": 1}}, False)],
)
def test_the_loop_is_flowers(caplog, warnings, tmp_path, settings, evaluated):
    caplog.set_level("INFO", "flwr")
    runs = []
    for folder in (tmp_path, None):
        strategy = Recorded()
        clients = TimedGrid(grid().nodes)
        configs = {name: ConfigRecord(config) for name, config in settings.items()}
        more = {**configs, "evaluate_fn": strategy.evaluation if evaluated else None}
        caplog.clear()
        result = play(strategy, folder, clients=clients, timeout=12.5, **more)
        said = [record.getMessage() for record in caplog.records]
        lines = [line for line in said if not any(o in line for o in OTHER_LINES)]
        assert clients.timeouts == (12.5,) * 2 * ROUNDS
        runs.append((ending(result), strategy.calls, configs, lines))
    assert runs[0] == runs[1]
    assert len(runs[0][1]) == 1 + 4 * ROUNDS + (ROUNDS + 1) * evaluated


# Resuming


class Calibrated(FedAvg):
    """Keeps what it found in round 1, and tells it in every round."""

    scale = 0.0

    def aggregate_train(self, server_round, replies):
        if server_round == 1:
            self.scale = 0.5
        arrays, metrics = super().aggregate_train(server_round, replies)
        return arrays, MetricRecord({**(metrics or {}), "scale": self.scale})


#: Strategies, and how they are run.
SCENARIOS = {
    **{name: (build, {}) for name, build in STRATEGIES.items()},
    "not evaluated at the server": (STRATEGIES["FedAdam"], {"evaluate_fn": None}),
    "two failed rounds": (FedAvg, {"clients": grid(lambda number, _: number < 3)}),
    "changed once": (Calibrated, {}),
    **{
        str(options): (
            lambda options=options: FedRotLoRA(LORA, options, **COMMON),
            {"tensors": floats(adapter(9))},
        )
        for options in (AdapterOptions("mean"), AdapterOptions("exact", "previous"))
    },
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, name):
    """One folder, one round a process: what was restored is saved again."""
    build, settings = SCENARIOS[name]
    settings = {"tensors": SMALL, **settings}
    if isinstance(build(), Aligned):
        settings["tensors"] = state()
    expected = ending(play(build(), **settings))
    tensors = settings.pop("tensors")
    for done in range(ROUNDS + 1):
        rounds = min(done + 1, ROUNDS)
        start = {key: tensor * (done == 0) for key, tensor in tensors.items()}
        result = play(build(), tmp_path, rounds, start, 99 * done, **settings)
        newest = Checkpointing(tmp_path).newest()
        assert (newest.round, newest.result.arrays) == (rounds, result.arrays)
    assert ending(result) == expected
    assert Checkpointing(tmp_path).rounds() == [1, 2, 3]


def test_a_resumed_run_asks_nobody_in_the_rounds_that_are_finished(tmp_path, warnings):
    whole = Recorded()
    expected = ending(play(whole, evaluate_fn=whole.evaluation))
    first = Recorded()
    play(first, tmp_path, 2, evaluate_fn=first.evaluation)
    for rounds, after in ((ROUNDS, 2), (ROUNDS, ROUNDS), (1, ROUNDS)):
        rest = Recorded()
        clients = grid()
        result = play(
            rest, tmp_path, rounds, clients=clients, evaluate_fn=rest.evaluation
        )
        assert ending(result) == expected
        # Those before are in the checkpoint: the list is state of this strategy.
        assert [call for call in rest.calls if len(call) > 1] == whole.calls[1:]
        assert rest.calls[-1 if after == ROUNDS else 12] == ("summary",)
        asked = [len(nodes) for nodes in clients.asked]
        assert asked == [0] * 2 * after + [2] * 2 * (ROUNDS - after)
        told = f"holds round {ROUNDS}, and num_rounds is 1"
        assert (told in warnings()) == (rounds == 1)


def test_clients_keep_their_names_when_a_run_goes_on_and_lose_them_in_a_new_one(
    tmp_path,
):
    rows = tmp_path / "rows.jsonl"
    settings = {"fraction_evaluate": 0.0, "reporting": Reporting(rows=rows)}

    def failed(strategy, fails_in, rounds):
        clients = grid(lambda number, index: number == fails_in and index != 1)
        strategy.start(clients, ArrayRecord(state()), rounds)
        return sorted({row["client"] for row in read_rows(rows) if "failed" in row})

    for rounds, names in ((1, []), (2, [0, 2, 3])):
        kept = Checkpointing(tmp_path / "checkpoints")
        strategy = FedRot(SYMMETRY, **settings, checkpoints=kept)
        assert failed(strategy, 2, rounds) == names
    strategy = FedRot(SYMMETRY, **settings)
    assert failed(strategy, 2, 2) == [0, 2, 3]
    assert failed(strategy, 1, 1) == [100, 102, 103]


class Decaying(FedAvg):
    """Halves the clients' learning rate after every round, as Flower's documentation
    does.
    """

    def configure_train(self, server_round, arrays, config, grid):
        config["lr"] /= 2
        return super().configure_train(server_round, arrays, config, grid)


def test_what_a_strategy_changes_in_the_configuration_goes_on(tmp_path):
    # What it did not change is the user's.
    for rounds, batch, rate in ((2, 8, 0.25), (3, 16, 0.125)):
        config = ConfigRecord({"lr": 1.0, "batch": batch})
        play(Decaying(), tmp_path, rounds, train_config=config)
        assert dict(config) == {"lr": rate, "batch": batch, "server-round": rounds}


class Accountant:
    """Counts, and has its state in Flower's way."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Stateful(FedAvg):
    """State of every kind that checkpoints know, and of some that they do not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.accountant = Accountant()
        self.generator = np.random.default_rng(5)
        self.others = random.Random(5)
        self.torch_generator = torch.Generator().manual_seed(5)
        self.legacy = np.random.RandomState(5)
        self.layer = torch.nn.Linear(2, 2)
        self.nodes = {}
        self.best = None
        self.rate = 1.0
        self.private = 0
        self.scale = 0.5
        self.history = []

    def drawn(self):
        return [
            float(self.generator.normal()),
            self.others.random(),
            float(torch.rand((), generator=self.torch_generator)),
            float(self.legacy.normal()),
        ]

    def aggregate_train(self, server_round, replies):
        self.accountant.count += 1
        self.private += 1
        self.rate *= 0.9
        self.nodes[server_round] = self.drawn()
        self.best = torch.tensor(self.nodes[server_round])
        self.layer.weight.data.add_(1)
        return super().aggregate_train(server_round, replies)

    def state(self):
        return {name: value for name, value in vars(self).items() if name != "private"}

    def restore(self, state):
        vars(self).update(state)

    def seen(self):
        """Return all of it, and what the generators draw next."""
        tensors = [self.best.tolist(), self.layer.weight.tolist()]
        return [*tensors, self.accountant.count, self.rate, self.nodes, *self.drawn()]


def test_state_of_every_kind_goes_on(tmp_path, warnings):
    whole = Stateful()
    second = Stateful()
    play(whole, rounds=4)
    play(Stateful(), tmp_path, 2)
    second.scale = 0.7
    shared = [second.accountant, second.generator]
    play(second, tmp_path, 4)
    assert second.seen() == whole.seen()
    # Objects with state of their own stay the same objects: others may hold them too.
    assert [second.accountant, second.generator] == shared
    assert (second.private, second.scale) == (2, 0.7)
    assert warnings() == ""


def test_state_that_cannot_be_saved_is_named_once(tmp_path, warnings):
    class Odd(FedAvg):
        ours = None

        def __init__(self, **settings):
            super().__init__(**settings)
            self.seen_nodes = Counter()
            self.server = SimpleNamespace(momentum=0.0)
            self.fixed = SimpleNamespace(rate=0.5)

        def configure_train(self, *given):
            self.ours = object()
            self.seen_nodes[3] += 1
            self.mixed = {"array": np.zeros(3), "other": object()}
            self.server.momentum = 0.5 * self.server.momentum + 1
            return super().configure_train(*given)

    play(Odd(train_metrics_aggr_fn=lambda records, key: MetricRecord()), tmp_path, 2)
    for attribute in (
        "ours holds a object",
        "seen_nodes holds a Counter",
        "mixed holds a object",
        "server holds a SimpleNamespace",
    ):
        assert warnings().count(f"strategy.{attribute}") == 1
    assert warnings().count("Not in the checkpoints") == 4
    arrays = Checkpointing(tmp_path).newest().state_arrays
    assert not [name for name in arrays if "mixed" in name]


# What is refused


@pytest.mark.parametrize(
    ("before", "strategy", "model", "words"),
    [
        (
            FedAdam,
            FedAdam,
            {**SMALL, "more": torch.zeros(1)},
            "another model: 'more'",
        ),
        (
            FedAdam,
            FedAdam,
            {"weight": SMALL["weight"]},
            "another model: 'bias'",
        ),
        (
            FedAdam,
            FedAdam,
            {**SMALL, "bias": torch.zeros(4)},
            "another model: 'bias'",
        ),
        (FedAdam, FedAvg, SMALL, "FedAdam, the strategy is a FedAvg"),
        (
            lambda: FixedClipping(Stateful(), **NOISE, clipping_norm=1.0),
            STRATEGIES["fixed clipping"],
            SMALL,
            r"'strategy\.strategy\.accountant'",
        ),
    ],
)
def test_another_model_or_strategy_is_refused(tmp_path, before, strategy, model, words):
    play(before(), tmp_path, 1)
    with pytest.raises(FedrotError, match=words):
        play(strategy(), tmp_path, tensors=model)


# What a strategy is told, and what of it is state


class Told(FedAvg):
    """Writes down after which round it goes on."""

    after = -1

    def begin(self, after_round):
        self.after = after_round


#: The rounds before a run; 0 if it was killed in the first one.
@pytest.mark.parametrize("before", [None, 0, 2, ROUNDS])
def test_the_strategy_is_told_after_which_round_it_goes_on(tmp_path, before):
    if before:
        play(Told(), tmp_path, before)
    elif before == 0:
        with Checkpointing(tmp_path).writing():
            pass
    strategy = Told()
    play(strategy, tmp_path)
    assert strategy.after == before


def test_strategies_that_know_each_other_are_saved_once():
    strategy = FedAvg()
    strategy.itself = strategy
    strategy.other = FedAvg()
    strategy.other.owner = strategy
    strategy.other.seen = 1
    state = RunState(strategy, ConfigRecord(), ConfigRecord())
    strategy.other.seen = 2
    entries = [(where, name) for where, name, *_ in state.encoded({})["entries"]]
    assert entries == [("strategy.other", "seen")]


def test_a_checkpoint_has_what_outlives_a_round_and_attributes_of_a_subclass(
    tmp_path, warnings
):
    class Own(FedRot):
        def state(self):
            inherited = super().state()
            inherited.pop("mine", None)
            return inherited

        def aggregate_train(self, server_round, replies):
            self.mine = [server_round]
            self.ours = {"seen": server_round}
            return super().aggregate_train(server_round, replies)

    kept = Checkpointing(tmp_path)
    guard = Guard("norm", False)
    strategy = Own(SYMMETRY, **COMMON, checkpoints=kept, guard=guard)
    strategy.start(grid(), ArrayRecord(state()), 3, evaluate_fn=evaluated)
    entries = kept.newest().state["entries"]
    saved = {name: coded for where, name, _, coded in entries if where == "strategy"}
    assert saved.keys() == {"_clients", "_verdicts", "ours"}
    # Those of all rounds would make checkpoints grow.
    assert decode(saved["_verdicts"], {}).keys() == {1, 3}
    assert warnings() == ""
