"""``add_statistics``: one call at the client answers what the server asks for, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor
from transformers import GPT2Config, GPT2ForSequenceClassification

import fedrot
from fedrot.aggregation import Fisher, RegMean
from fedrot.collect.statistics import STATISTIC_KINDS, StatisticKind
from fedrot.errors import FedrotError, UpdateError
from fedrot.strategies import FedRot, add_statistics, statistics_record
from fedrot.strategies.wire.arrays import wire_bytes
from fedrot.strategies.wire.records import STATISTICS, read_statistics
from tests.models import State, config_of, near
from tests.strategies.aggregating import Client as Given
from tests.strategies.aggregating import ask, batches, loaded, merged
from tests.strategies.classifier import NAME, state
from tests.strategies.fakes import FakeGrid, largest_difference

EXAMPLES = (3, 10, 5)


def request(kinds: str = "gram") -> Message:
    """Return a training request that asks for kinds of statistics."""
    strategy = FedRot(config_of(NAME), aggregation=RegMean)
    message = ask(strategy, state(), 2)[0]
    message.content.config_records["config"][STATISTICS] = kinds
    return message


def model() -> Any:
    return loaded(state())


def content(tensors: State | None = None) -> RecordDict:
    return RecordDict({"arrays": ArrayRecord(tensors or state()), "metrics": MetricRecord({"n": 1})})


def refused(pattern: str, **given: Any) -> None:
    """Check that the call raises, and has changed nothing."""
    reply, message = content(), given.pop("message", request())
    network = given.pop("model", None) or model()
    read = given.pop("batches", batches(0))
    with pytest.raises(FedrotError, match=pattern):
        add_statistics(reply, message, network, read, **given)
    assert STATISTICS not in reply


class Counted:
    """Batches that count how many were read, and how often they were begun."""

    def __init__(self, of: Iterable[Mapping[str, Tensor]]) -> None:
        self.of, self.begun, self.read = of, 0, 0

    def __iter__(self) -> Any:
        self.begun += 1
        for batch in self.of:
            self.read += 1
            yield batch


def one_row_each(rows: int) -> list[dict[str, Tensor]]:
    (batch,) = batches(0, rows)
    return [{name: value[n : n + 1] for name, value in batch.items()} for n in range(rows)]


# --- what is added -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gram", "fisher"])
def test_it_adds_what_the_collector_of_the_kind_returns(kind: str) -> None:
    collect: Any = {"gram": fedrot.collect_gram, "fisher": fedrot.collect_fisher}[kind]
    network, reply = loaded(near(state(), 0.05, 1)), content()
    network.train()
    assert add_statistics(reply, request(kind), network, batches(0)) == (kind,)
    expected = statistics_record(collect(network, batches(0)))
    assert {key: array.data for key, array in reply.array_records[STATISTICS].items()} == {
        key: array.data for key, array in expected.items()
    }
    assert network.training


def test_without_a_request_nothing_is_read_or_added() -> None:
    for message in (request(""), ask(FedRot(config_of(NAME)), state(), 2)[0]):
        reply, rows = content(), Counted(batches(0))
        assert add_statistics(reply, message, model(), rows) == ()
        assert list(reply) == ["arrays", "metrics"]
        assert rows.begun == rows.read == 0


def test_half_precision_on_the_wire() -> None:
    reply = content()
    add_statistics(reply, request(), model(), batches(0), dtype=torch.bfloat16)
    expected = statistics_record(fedrot.collect_gram(model(), batches(0)), torch.bfloat16)
    assert reply.array_records[STATISTICS] == expected


def test_a_share_of_the_models_bytes_bounds_the_gram_matrices() -> None:
    network, found = model(), fedrot.collect_gram(model(), batches(0))
    for tensors in (state(), {name: tensor.half() for name, tensor in state().items()}):
        reply = content(tensors)
        budget = int(0.15 * wire_bytes(reply.array_records["arrays"]))
        add_statistics(reply, request(), network, batches(0), share=0.15)
        record = reply.array_records[STATISTICS]
        assert record == statistics_record(found, budget=budget)
        assert 0.8 * budget <= wire_bytes(record) <= budget


def test_without_a_model_in_the_reply_the_share_is_of_the_received_one() -> None:
    message, reply = request(), RecordDict()
    add_statistics(reply, message, model(), batches(0), share=0.15)
    budget = int(0.15 * wire_bytes(message.content.array_records["arrays"]))
    expected = statistics_record(fedrot.collect_gram(model(), batches(0)), budget=budget)
    assert reply.array_records[STATISTICS] == expected
    del message.content["arrays"]
    with pytest.raises(
        FedrotError, match=r"there is no model\. Put the model's ArrayRecord into the reply"
    ):
        add_statistics(RecordDict(), message, model(), batches(0), share=0.15)


def test_a_share_leaves_other_kinds_as_they_are() -> None:
    reply, whole = content(), content()
    add_statistics(reply, request("fisher"), model(), batches(0), share=0.01)
    add_statistics(whole, request("fisher"), model(), batches(0))
    assert reply.array_records[STATISTICS] == whole.array_records[STATISTICS]


def test_batches_may_be_a_function_a_list_or_an_iterator() -> None:
    found = []
    for rows in (batches(0), lambda: iter(batches(0)), iter(batches(0))):
        reply = content()
        add_statistics(reply, request(), model(), rows)
        found.append(reply.array_records[STATISTICS])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(("most", "expected"), [(3, 3), (None, 100), (104, 104)])
def test_the_number_of_batches_is_bounded(most: int | None, expected: int) -> None:
    rows, reply = Counted(one_row_each(110)), content()
    add_statistics(reply, request(), model(), rows, max_batches=most)
    assert rows.read == expected
    known = fedrot.collect_gram(model(), one_row_each(110)[:expected], max_batches=None)
    assert reply.array_records[STATISTICS] == statistics_record(known)


def test_two_kinds_read_the_batches_twice() -> None:
    rows, reply = Counted(batches(0)), content()
    assert add_statistics(reply, request("gram,fisher"), model(), rows) == ("gram", "fisher")
    assert rows.begun == 2
    assert set(read_statistics(reply)) == {"gram", "input_mean", "fisher"}


def test_statistics_that_the_reply_has_stay_and_are_not_collected_again() -> None:
    full, marked = fedrot.completed(state(), state(), {"classifier.weight": [0]})
    known = {"gram": {"classifier.weight": torch.eye(16)}, **marked}
    reply, rows = content(full), Counted(batches(0))
    reply[STATISTICS] = statistics_record(known)
    assert add_statistics(reply, request("gram"), model(), rows) == ()
    assert rows.read == 0
    assert add_statistics(reply, request("gram,fisher"), model(), rows) == ("fisher",)
    found = read_statistics(reply)
    assert set(found) == {"gram", "fisher", "trained"}
    assert torch.equal(found["gram"]["classifier.weight"], torch.eye(16))
    assert torch.equal(found["trained"]["classifier.weight"], marked["trained"]["classifier.weight"])


def test_matrices_of_conv1d_count_as_gram_matrices() -> None:
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, pad_token_id=0, num_labels=2
    )
    network = GPT2ForSequenceClassification(config)
    reply, message = content(network.state_dict()), request()
    rows = [{"input_ids": torch.randint(1, 64, (4, 8))}]
    assert add_statistics(reply, message, network, rows) == ("gram",)
    means = {"input_mean", "input_mean_conv1d"}
    assert set(read_statistics(reply)) == {"gram", "gram_conv1d", *means}
    assert add_statistics(reply, message, network, rows) == ()


def test_random_numbers_are_as_before() -> None:
    loader = torch.utils.data.DataLoader(one_row_each(8), batch_size=None, shuffle=True)
    network, reply, message = model(), content(), request("gram,fisher")
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    add_statistics(reply, message, network, loader)
    assert torch.equal(torch.rand(4), expected)


def test_the_labels_of_a_training_batch_are_left_out_and_other_mappings_will_do() -> None:
    from transformers import BatchEncoding

    (batch,) = batches(0)
    reply = content()
    rows = [BatchEncoding({**batch, "labels": torch.zeros(16, dtype=torch.int64)})]
    add_statistics(reply, request(), model(), rows)
    assert reply.array_records[STATISTICS] == statistics_record(fedrot.collect_gram(model(), [batch]))


# --- what is refused ---------------------------------------------------------------------------------


def test_mistakes_are_refused_with_what_to_do() -> None:
    (batch,) = batches(0)
    refused(r"not as torch\.float16", dtype=torch.float16)
    refused("max_batches is 0; give a positive number", max_batches=0)
    refused(r"and their diagonals take [\d,]+\. Give a larger share", share=1e-6)
    refused("pass at least one batch", batches=[])
    refused("A batch is a tuple; statistics need the keyword arguments", batches=[(batch["input_ids"],)])
    refused(
        "asks for gram and fisher, but an iterator of batches can be read once",
        batches=iter(batches(0)),
        message=request("gram,fisher"),
    )
    refused("Unknown statistics 'hessian'", message=request("hessian"))
    refused("'trained' cannot be computed from batches", message=request("trained"))
    wrapped = torch.nn.DataParallel(model())
    refused(r"of 'module\..*' belong to no tensor of the reply", model=wrapped)


def test_wrong_arguments_are_refused_although_nothing_is_asked() -> None:
    refused(r"not as torch\.float64", message=request(""), dtype=torch.float64)
    refused("max_batches is -1", message=request(""), max_batches=-1)
    for share in (0.0, -0.1, float("inf"), float("nan")):
        refused("give a positive share of the model's bytes", message=request(""), share=share)


def test_a_tensor_that_only_the_received_model_has_may_have_statistics() -> None:
    """A reply may hold only what has changed; see ``to_arrays``."""
    changed = {name: tensor for name, tensor in state().items() if name.startswith("classifier")}
    reply = content(changed)
    assert add_statistics(reply, request(), model(), batches(0)) == ("gram",)


# --- a run -------------------------------------------------------------------------------------------


def client_app(updates: list[State], add: Callable[..., Any] = add_statistics) -> ClientApp:
    """Return clients that send these updates, with what ``add`` adds."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        place = int(context.node_config["partition-id"])
        model = loaded(updates[place])
        records = {"num-examples": EXAMPLES[place]}
        reply = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(records)})
        add(reply, message, model, batches(place))
        return Message(reply, reply_to=message)

    return app


def grid_of(app: ClientApp, count: int) -> FakeGrid:
    def node(place: int) -> Callable[[Message], Message]:
        context = Context(1, place, {"partition-id": place}, RecordDict(), {})
        return lambda message: app(message, context)

    return FakeGrid({place: node(place) for place in range(count)})


def started(strategy: FedRot, app: ClientApp) -> ArrayRecord:
    result = strategy.start(grid_of(app, 3), ArrayRecord(state()), 1)
    assert result.arrays is not None
    return result.arrays


@pytest.mark.parametrize("aggregation", [RegMean, Fisher])
def test_a_run_merges_what_the_clients_add(aggregation: Any) -> None:
    updates = [near(state(), 0.05, seed) for seed in range(3)]
    strategy = FedRot(config_of(NAME), aggregation=aggregation, alignment=None, fraction_evaluate=0.0)
    found = started(strategy, client_app(updates))
    collect: Any = fedrot.collect_gram if aggregation is RegMean else fedrot.collect_fisher
    clients = [
        Given(update, weight, collect(loaded(update), batches(seed)))
        for seed, (update, weight) in enumerate(zip(updates, EXAMPLES, strict=True))
    ]
    assert largest_difference(found, ArrayRecord(merged(aggregation(), clients))) <= 1e-6


@pytest.mark.parametrize("alignment", [None, fedrot.AlignmentOptions()])
def test_a_run_merges_the_sketches_that_the_clients_add(alignment: Any) -> None:
    """RegMean of rebuilt matrices, formed here in float64 from each client's own decomposition."""
    updates = [near(state(), 0.05, seed) for seed in range(3)]
    strategy = FedRot(config_of(NAME), aggregation=RegMean, alignment=alignment, fraction_evaluate=0.0)
    found = started(strategy, client_app(updates, partial(add_statistics, share=0.15)))
    budget = int(0.15 * wire_bytes(ArrayRecord(state())))
    clients = []
    for seed, (update, weight) in enumerate(zip(updates, EXAMPLES, strict=True)):
        grams = fedrot.collect_gram(loaded(update), batches(seed))
        record = statistics_record(grams, budget=budget)
        ranks = {
            key.split("/")[1]: array.shape[1] for key, array in record.items() if key[:5] == "gram/"
        }
        rebuilt = {
            name: _low_rank(grams["gram"][name], rank)
            for names, rank in ranks.items()
            for name in names.split("|")
        }
        clients.append(Given(update, weight, {"gram": rebuilt}))
    full = [
        Given(c.update, c.weight, fedrot.collect_gram(loaded(c.update), batches(seed)))
        for seed, c in enumerate(clients)
    ]
    expected, exact = (ArrayRecord(merged(RegMean(), given)) for given in (clients, full))
    assert largest_difference(found, expected) <= 0.02 * largest_difference(exact, expected)


def _low_rank(gram: Tensor, rank: int) -> Tensor:
    """Return a matrix's largest eigenpairs at unit diagonal, with the diagonal of the matrix."""
    roots = gram.double().diagonal().sqrt()
    values, vectors = torch.linalg.eigh(gram.double() / torch.outer(roots, roots))
    kept = (vectors * values * (torch.arange(len(gram)) >= len(gram) - rank)) @ vectors.mT
    return torch.outer(roots, roots) * kept.fill_diagonal_(1)


def test_the_log_says_what_clients_send_before_anybody_trains(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logging.getLogger("flwr").propagate = True
    caplog.set_level(logging.INFO)
    said: list[str] = []
    updates = [near(state(), 0.05, seed) for seed in range(3)]

    def add(*given: Any) -> None:
        said.append(caplog.text)
        add_statistics(*given)

    started(
        FedRot(config_of(NAME), aggregation="regmean", fraction_evaluate=0.0), client_app(updates, add)
    )
    line = (
        "Statistics: every reply needs 'gram'; clients call "
        "fedrot.strategies.add_statistics(content, message, model, batches)\n"
    )
    assert line in said[0]
    caplog.clear()
    FedRot(config_of(NAME)).summary()
    assert "Statistics:" not in caplog.text


def test_the_error_of_a_run_without_statistics_names_the_call() -> None:
    app = client_app([state()] * 3, lambda *_: None)
    with pytest.raises(FedrotError, match=r"has no statistics 'gram'.*\.add_statistics\(content, "):
        started(FedRot(config_of(NAME), aggregation=RegMean, fraction_evaluate=0.0), app)


def test_a_kind_of_ones_own_is_collected_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def collect(model: torch.nn.Module, rows: Iterable[Mapping[str, Tensor]]) -> Any:
        return {
            "rows": {"classifier.bias": torch.tensor([float(sum(len(r["input_ids"]) for r in rows))])}
        }

    kind = StatisticKind("rows", lambda value, shape: None, lambda value, *_: value, "rows", collect)
    monkeypatch.setitem(STATISTIC_KINDS, "rows", kind)
    reply = content()
    assert add_statistics(reply, request("rows"), model(), batches(0) * 3, max_batches=2) == ("rows",)
    assert float(read_statistics(reply)["rows"]["classifier.bias"]) == 32
    monkeypatch.delitem(STATISTIC_KINDS, "rows")
    with pytest.raises(UpdateError, match="Unknown statistics 'rows'"):
        add_statistics(content(), request("rows"), model(), batches(0))


def test_the_configuration_of_another_server_asks_for_nothing() -> None:
    message = request()
    del message.content["config"]
    message.content["other"] = ConfigRecord({"lr": 0.1})
    reply = content()
    assert add_statistics(reply, message, model(), batches(0)) == ()
    assert STATISTICS not in reply
