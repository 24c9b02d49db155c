"""The task head, fitted by ``fit_task_head`` and by ``FedRot(fit_head=True)`` to sums of clients."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedrot
from fedrot.head import collect_classes, fit_head
from fedrot.strategies import FedRot, LabelledRows, Server, answer_with_sums, fit_task_head
from fedrot.strategies.sums.choice import SHRINKAGES
from fedrot.strategies.sums.requests import LOSSES, MODEL, ROWS, STEP, SUMS
from fedrot.strategies.wire.arrays import TIED, from_arrays, to_arrays
from fedrot.temperature import TEMPERATURES
from tests.models import VOCABULARY, State, config_of, near
from tests.strategies.classifier import NAME, build, state
from tests.strategies.fakes import Client, FakeGrid, failure, reply, tensors_of

HEAD = "classifier"
Rows = Mapping[str, Tensor]
Answer = dict[str, dict[str, Tensor]]


def rows(seed: int, count: int = 40) -> Rows:
    """Return rows whose label is the first token's, which the head of the start does not know."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (count, 6), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 3}


def as_predicted(given: Rows) -> Rows:
    """Return rows with the labels that the model itself predicts."""
    model = build().eval()
    model.load_state_dict(state())
    with torch.no_grad():
        labels = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits
    return {**given, "labels": labels.argmax(1)}


def client(
    training: Rows | None, held_out: Rows | None, build: Callable[[], nn.Module] = build
) -> Client:
    """Return a node with a real ``ClientApp``."""
    app, batches = ClientApp(), [[given] if given is not None else [] for given in (training, held_out)]
    answer_with_sums(
        app, lambda message, context: LabelledRows(build, lambda: batches[0], lambda: batches[1])
    )
    return lambda message: app(message, Context(1, 1, {}, RecordDict(), {}))


def three_pairs() -> list[tuple[Rows, Rows]]:
    """Return the rows of clients each of which has one class more often than the others."""
    found: list[tuple[Rows, Rows]] = []
    for index in range(3):
        given = rows(index, 90)
        some = (given["labels"] == index) | (torch.arange(90) % 4 == 0)
        found.append(({name: value[some] for name, value in given.items()}, rows(10 + index)))
    return found


def three(build: Callable[[], nn.Module] = build) -> list[Client]:
    """Return clients with the rows of ``three_pairs``."""
    return [client(*pair, build) for pair in three_pairs()]


def training_rows() -> list[Rows]:
    """Return the rows of the clients of ``three``, joined."""
    every = [training for training, _ in three_pairs()]
    return [{name: torch.cat([given[name] for given in every]) for name in every[0]}]


def fitted(clients: Iterable[Client], **given: Any) -> Any:
    grid = FakeGrid(dict(enumerate(clients, start=100)))
    return fit_task_head(grid, ArrayRecord(state()), config_of(NAME), timeout=1, **given)


def loss(tensors: State, temperature: float = 1.0) -> float:
    """Return the mean cross entropy on the held-out rows of the clients of ``three``."""
    model = build().eval()
    model.load_state_dict(tensors)
    total, count = 0.0, 0
    for index in range(3):
        given = rows(10 + index)
        with torch.no_grad():
            logits = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits
        total += float(cross_entropy(logits.double() / temperature, given["labels"], reduction="sum"))
        count += len(logits)
    return total / count


def test_the_head_is_that_of_all_rows_together_at_the_best_temperature(
    warnings: Callable[[], str],
) -> None:
    """The oracle: one model that sees the rows of all clients; loops over shrinkages, temperatures."""
    found = fitted(three())
    assert warnings() == ""
    model = build()
    model.load_state_dict(state())
    sums = collect_classes(model, training_rows(), HEAD)

    def with_shrinkage(own: float) -> State:
        weight, bias = fit_head(sums, own)
        return {**state(), f"{HEAD}.weight": weight.float(), f"{HEAD}.bias": bias.float()}

    kept, best = min(
        product(SHRINKAGES, TEMPERATURES), key=lambda pair: loss(with_shrinkage(pair[0]), pair[1])
    )
    wanted = with_shrinkage(kept)
    assert (found.fitted, found.temperature, found.clients, found.rows) == (True, best, 3, 120)
    assert found.shrinkage == kept
    result = tensors_of(found.arrays)
    for name, tensor in result.items():
        own = wanted[name] / best if name.startswith(HEAD) else wanted[name]
        assert (
            torch.allclose(tensor, own, rtol=1e-4, atol=1e-5)
            if name.startswith(HEAD)
            else (torch.equal(tensor, own))
        )
    assert loss(result) < loss(state()) - 0.1
    was, calibrated, after = found.losses
    assert was == pytest.approx(loss(state()), rel=1e-5)
    assert calibrated <= was
    assert after == pytest.approx(loss(wanted, best), rel=1e-5)
    assert after == pytest.approx(loss(result), rel=1e-4)


def test_a_head_that_is_worse_on_held_out_rows_is_not_taken() -> None:
    clients = [client(rows(index), as_predicted(rows(10 + index))) for index in range(3)]
    found = fitted(clients)
    _, calibrated, after = found.losses
    assert not found.fitted
    assert calibrated < after
    result = tensors_of(found.arrays)
    for name, tensor in state().items():
        own = tensor / found.temperature if name.startswith(HEAD) else tensor
        assert torch.allclose(result[name], own, rtol=1e-6, atol=0)


def edited(node: Client, edit: Callable[[Answer], None]) -> Client:
    """Return a node that changes the arrays of its answers."""

    def answer(message: Message) -> Message | None:
        found = node(message)
        assert found is not None
        given = {name: tensors_of(record) for name, record in found.content.array_records.items()}
        edit(given)
        arrays = {name: ArrayRecord(tensors) for name, tensors in given.items()}
        return Message(RecordDict({**found.content.metric_records, **arrays}), reply_to=message)

    return answer


def scaled(record: str, name: str, factor: float) -> Callable[[Answer], None]:
    def edit(answer: Answer) -> None:
        if record in answer:
            answer[record][name] = answer[record][name] * factor

    return edit


def times(factor: float) -> Callable[[Answer], None]:
    """Return an edit after which each row counts so many times."""

    def edit(answer: Answer) -> None:
        for name in answer.get(SUMS, {}):
            scaled(SUMS, name, factor)(answer)

    return edit


def lacking(record: str, name: str) -> Callable[[Answer], None]:
    def edit(answer: Answer) -> None:
        answer.get(record, {}).pop(name, None)

    return edit


def of_another_shape(answer: Answer) -> None:
    if SUMS in answer:
        answer[SUMS] = {
            "counts": torch.ones(2).double(),
            "sums": torch.ones(2, 3),
            "scatter": torch.ones(6),
        }


def without_the_action(node: Client) -> Client:
    app = ClientApp()

    def answer(message: Message) -> Message:
        try:
            return app(message, Context(1, 1, {}, RecordDict(), {}))
        except ValueError as error:  # As Flower's own grids do.
            return Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)

    return answer


def announcing(training: object, held_out: object) -> Callable[[Client], Client]:
    def spoil(node: Client) -> Client:
        def answer(message: Message) -> Message | None:
            found = node(message)
            if found is not None and ROWS in found.content:
                vars(found.content[ROWS])["_data"].update(training=training, held_out=held_out)
            return found

        return answer

    return spoil


#: Answers that are left out, and a part of the reason.
HOSTILE: dict[str, tuple[Callable[[Client], Client], str]] = {
    "fails": (lambda node: failure, "it failed: crashed"),
    "has no action": (without_the_action, "Call fedrot.strategies.answer_with_sums with its ClientApp"),
    "is silent": (lambda node: lambda message: None, "no answer before the timeout"),
    "other sums": (lambda node: edited(node, lacking(SUMS, "scatter")), "The sums of features are"),
    "another shape": (lambda node: edited(node, of_another_shape), "The sums of features are"),
    "NaN": (lambda node: edited(node, scaled(SUMS, "scatter", float("nan"))), "NaN or Inf"),
    "huge": (lambda node: edited(node, scaled(SUMS, "sums", 1e30)), "values above"),
    "negative": (lambda node: edited(node, scaled(SUMS, "counts", -1.0)), "negative"),
    "more rows": (lambda node: edited(node, times(2)), "announced were 40"),
    "parts of rows": (lambda node: edited(node, times(0.3)), "announced were 40"),
    "beyond tanh": (lambda node: edited(node, scaled(SUMS, "scatter", 1e5)), "larger than the model's"),
    "impossible": (lambda node: edited(node, scaled(SUMS, "scatter", -1.0)), "second moments"),
    "infinite losses": (lambda node: edited(node, scaled(LOSSES, "losses", math.inf)), "NaN or Inf"),
    "negative losses": (lambda node: edited(node, scaled(LOSSES, "losses", -1.0)), "negative"),
    "no rows": (lambda node: edited(node, scaled(LOSSES, "counts", 0.0)), "of 0.0 rows"),
    "half a row": (lambda node: edited(node, scaled(LOSSES, "counts", 1.0125)), "40.5 rows"),
    "announces -1": (announcing(-1, 0), "The numbers of rows"),
    "announces 1.5": (announcing(1.5, 0), "The numbers of rows"),
    "announces 1e13": (announcing(10**13, 0), "The numbers of rows"),
}


def test_clients_without_training_rows_or_held_out_rows_give_what_they_have() -> None:
    """Three clients, each split into one that only trains and one that only judges."""
    apart = []
    for training, held_out in three_pairs():
        apart += [client(training, None), client(None, held_out)]
    found, expected = fitted(apart), fitted(three())
    assert (found.clients, found.rows) == (3, 120)
    assert found.temperature == expected.temperature
    assert found.losses == expected.losses
    for name, tensor in tensors_of(found.arrays).items():
        assert torch.equal(tensor, tensors_of(expected.arrays)[name])


def unlabelled(given: Rows) -> Rows:
    return {**given, "labels": torch.full_like(given["labels"], -100)}


def misnamed(given: Rows) -> Rows:
    return {("label" if name == "labels" else name): value for name, value in given.items()}


@pytest.mark.parametrize("spoil", [lambda given: None, unlabelled, misnamed])
@pytest.mark.parametrize("kind", [0, 1], ids=["training", "held-out"])
def test_a_client_may_lack_rows_of_one_kind(kind: int, spoil: Callable[[Rows], Rows | None]) -> None:
    """The rows of the other kind count; nobody asks for those that it lacks."""
    pair: list[Rows | None] = [rows(1, 30), rows(2, 30)]
    pair[kind] = spoil(rows(1 + kind, 30))
    asked: list[str] = []

    def node(message: Message) -> Message | None:
        asked.extend(str(config[STEP]) for config in message.content.config_records.values())
        return client(*pair)(message)

    found = fitted([node, client(rows(7), rows(17))])
    assert asked == ["count", "sum" if kind else "evaluate"]
    assert found.rows == 40 + 30 * (kind == 0)


def test_without_any_held_out_row_no_head_can_be_chosen() -> None:
    with pytest.raises(fedrot.FedrotError, match="no client has held-out rows with 'labels'"):
        fitted([client(training, None) for training, _ in three_pairs()])


def test_the_configuration_travels_with_all_requests() -> None:
    seen: list[Any] = []
    (node,) = [client(rows(7), rows(17))]

    def noting(message: Message) -> Message | None:
        seen.extend(record["epoch"] for record in message.content.config_records.values())
        return node(message)

    fitted([noting], config=ConfigRecord({"epoch": 7}))
    assert seen == [7, 7, 7]


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("what", HOSTILE)
def test_an_answer_that_is_none_is_left_out_and_named(
    what: str, place: int, warnings: Callable[[], str]
) -> None:
    """The head is that without the client; its losses count if only its sums are left out."""
    spoil, reason = HOSTILE[what]
    clients = three()
    pair = rows(7), rows(17)
    clients.insert(place, spoil(client(*pair)))
    found = fitted(clients)
    said = " ".join(warnings().split())
    assert f"lient {100 + place}" in said
    assert reason in said
    only_sums = (
        (pair[0], None)
        if " losses" in what or "0 rows" in reason or "5 rows" in reason
        else (None, None)
    )
    others = [*three(), client(*(only_sums if found.clients == 3 else (None, pair[1])))]
    expected = fitted(others)
    assert (found.fitted, found.temperature) == (True, expected.temperature)
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    ours, theirs = tensors_of(found.arrays), tensors_of(expected.arrays)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_head_that_cannot_be_fitted_stays_as_it_is(warnings: Callable[[], str]) -> None:
    one_class = {**rows(0), "labels": torch.zeros(40, dtype=torch.int64)}
    found = fitted([client(one_class, rows(10)), client(one_class, rows(11))])
    assert (found.fitted, found.temperature) == (False, 1)
    assert "is not changed. A task head needs rows of at least two classes" in warnings()
    assert all(torch.equal(own, state()[name]) for name, own in tensors_of(found.arrays).items())
    assert set(found.metrics()) == {"fedrot-head-fitted", "fedrot-head-temperature"}


@pytest.mark.parametrize("clients", [[], [failure, failure]], ids=["none", "all fail"])
def test_without_an_answer_there_is_an_error(clients: list[Client]) -> None:
    with pytest.raises(fedrot.FedrotError, match="No client gave a usable answer"):
        fitted(clients)


def test_wrong_arguments_are_named_before_anybody_is_asked() -> None:
    with pytest.raises(fedrot.FedrotError, match="no layer 'elsewhere'"):
        fitted(three(), head="elsewhere")


def test_answers_draw_nothing_from_the_clients_random_numbers() -> None:
    before = torch.random.get_rng_state()
    fitted(three())
    assert torch.equal(torch.random.get_rng_state(), before)


# In every round

#: Arguments of the strategies: sums of updates do not depend on the order of arrival.
COMMON: dict[str, Any] = {"fraction_evaluate": 0.0, "server": Server(deterministic=True)}


def learner(index: int, build: Callable[[], nn.Module] = build) -> Client:
    """Return a node that answers training requests with a change of what it received, and with sums."""
    answers = three(build)[index]

    def node(message: Message) -> Message | None:
        if message.metadata.message_type != "train":
            return answers(message)
        received = tensors_of(message.content.array_records["arrays"])
        return reply(message, near(received, 0.01, seed=index), 10 + index, index)

    return node


def played(clients: Iterable[Client], rounds: int = 3, **given: Any) -> tuple[Any, list[State]]:
    """Return the result of a run, and the model that each round broadcast."""
    sent: list[State] = []

    class Noting(FedRot):
        def configure_train(
            self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
        ) -> Iterable[Message]:
            sent.append(tensors_of(arrays))
            return super().configure_train(server_round, arrays, config, grid)

    strategy = Noting(config_of(NAME), **{"fit_head": True, **COMMON, **given})
    grid = FakeGrid(dict(enumerate(clients, start=100)))
    return strategy.start(grid, ArrayRecord(state()), rounds, timeout=1), sent


@pytest.mark.parametrize("aggregation", [None, "mean"])
@pytest.mark.parametrize("alignment", [None, fedrot.AlignmentOptions()])
def test_every_round_ends_with_the_best_of_three_models(
    alignment: fedrot.AlignmentOptions | None, aggregation: str | None
) -> None:
    """The oracle: rounds without the argument, one at a time, and ``fit_task_head`` for each body."""
    nodes = [learner(index) for index in range(3)]
    given: dict[str, Any] = {"alignment": alignment, "aggregation": aggregation}
    result, sent = played(nodes, **given)
    grid = FakeGrid(dict(enumerate(nodes, start=100)))
    model = fit_task_head(grid, ArrayRecord(state()), config_of(NAME)).arrays
    for number, received in enumerate(sent, start=1):
        old = tensors_of(model)
        assert all(torch.equal(received[name], own) for name, own in old.items())
        merged = FedRot(config_of(NAME), **COMMON, **given).start(grid, model, 1).arrays
        half = {name: (old[name] + own) / 2 for name, own in tensors_of(merged).items()}
        found = [fit_task_head(grid, one, config_of(NAME)) for one in (merged, ArrayRecord(half))]
        best = min(found, key=lambda one: one.losses[2])
        metrics = result.train_metrics_clientapp[number]
        if best.losses[2] < loss(old):
            model = best.arrays
            assert metrics["fedrot-head-step"] == (1, 0.5)[found.index(best)]
            assert metrics["fedrot-head-loss"] == pytest.approx(best.losses[2], rel=1e-9)
        else:
            assert metrics["fedrot-head-step"] == 0
    last = tensors_of(result.arrays)
    assert all(torch.equal(last[name], own) for name, own in tensors_of(model).items())
    assert len(sent) == 3
    assert loss(last) < loss(state()) - 0.1


def test_a_layer_is_fitted_by_its_name() -> None:
    nodes = [learner(index) for index in range(3)]
    named, _ = played(nodes, rounds=1, fit_head=HEAD)
    found, _ = played(nodes, rounds=1)
    ours, theirs = tensors_of(named.arrays), tensors_of(found.arrays)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_model_without_the_head_is_refused_before_anybody_trains() -> None:
    with pytest.raises(fedrot.FedrotError, match="no layer 'elsewhere'"):
        played([failure], fit_head="elsewhere")


def test_the_run_says_what_clients_need(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("flwr").propagate = True
    caplog.set_level(logging.INFO, "flwr")
    played([learner(index) for index in range(3)], rounds=1)
    assert "Task head: fitted in every round; clients call answer_with_sums" in caplog.text


def test_clients_that_cannot_answer_stop_the_first_round() -> None:
    def trains_only(message: Message) -> Message | None:
        is_training = message.metadata.message_type == "train"
        return (learner(0) if is_training else without_the_action(failure))(message)

    with pytest.raises(fedrot.FedrotError, match=r"Call fedrot\.strategies\.answer_with_sums"):
        played([trains_only, trains_only])


def test_a_later_round_without_answers_keeps_its_head(warnings: Callable[[], str]) -> None:
    def once(index: int) -> Client:
        node, answers = learner(index), 0

        def answer(message: Message) -> Message | None:
            nonlocal answers
            if message.metadata.message_type == "train":
                return node(message)
            answers += 1
            return node(message) if answers <= 7 else failure(message)

        return answer

    result, sent = played([once(index) for index in range(3)])
    assert "Round 2: the task head is not changed. No client gave a usable answer" in warnings()
    metrics = result.train_metrics_clientapp
    assert [n for n, found in metrics.items() if "fedrot-head-loss" in found] == [1]
    received = sent[1]
    nodes = dict(enumerate((learner(index) for index in range(3)), start=100))
    strategy = FedRot(config_of(NAME), **COMMON)
    merged = strategy.start(FakeGrid(nodes), ArrayRecord(received), 1).arrays
    assert all(torch.equal(sent[2][name], own) for name, own in tensors_of(merged).items())


def test_the_evaluation_is_of_the_model_with_the_fitted_head() -> None:
    """Also with a guard, which has evaluated the model before."""
    evaluated: list[State] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        evaluated.append(tensors_of(arrays))
        return MetricRecord({"loss": loss(evaluated[-1])})

    strategy = FedRot(config_of(NAME), fit_head=True, fraction_evaluate=0.0, guard="loss")
    nodes = dict(enumerate((learner(index) for index in range(3)), start=100))
    result = strategy.start(FakeGrid(nodes), ArrayRecord(state()), 1, evaluate_fn=evaluate)
    last = tensors_of(result.arrays)
    assert all(torch.equal(evaluated[-1][name], own) for name, own in last.items())
    assert result.evaluate_metrics_serverapp[1]["loss"] == loss(last)


def test_a_failed_round_fits_no_head() -> None:
    asked: list[str] = []

    def fails(message: Message) -> Message | None:
        asked.append(message.metadata.message_type)
        return failure(message) if asked[-1] == "train" else learner(0)(message)

    result, (first,) = played([fails, fails], rounds=1)
    assert asked[-1] == "train"
    assert all(torch.equal(own, first[name]) for name, own in tensors_of(result.arrays).items())


def received_by(clients: Iterable[Client]) -> tuple[list[Client], list[ArrayRecord]]:
    """Return clients that note the models of all messages, and the notes."""
    notes: list[ArrayRecord] = []

    def noting(node: Client) -> Client:
        def answer(message: Message) -> Message | None:
            records = message.content.array_records
            notes.extend(
                record for name, record in records.items() if name.startswith((MODEL, "arrays"))
            )
            return node(message)

        return answer

    return [noting(node) for node in clients], notes


def kind(message: Message) -> str:
    return message.metadata.message_type


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_model_keeps_its_precision_and_its_ties(dtype: torch.dtype) -> None:
    tensors: dict[str, Any] = {name: tensor.to(dtype) for name, tensor in state().items()}
    tensors["again"] = tensors["bert.pooler.dense.weight"]
    model = to_arrays(tensors)
    assert [array.stype for array in model.values()].count(TIED) == 1
    nodes = [edited_model(learner(index, tied), dtype) for index in range(3)]
    noting, notes = received_by(nodes)
    strategy = FedRot(config_of(NAME), alignment=None, fit_head=True, fraction_evaluate=0.0)
    result = strategy.start(FakeGrid(dict(enumerate(noting, start=100))), model, 2)
    for record in (*notes, result.arrays):
        assert {array.dtype for array in record.values()} == {str(dtype).removeprefix("torch.")}
        assert {name: array.stype for name, array in record.items()} == {
            name: array.stype for name, array in model.items()
        }
    assert all("fedrot-head-loss" in found for found in result.train_metrics_clientapp.values())


def tied() -> nn.Module:
    """Return a model with a tensor that has a second name."""
    model: Any = build()
    model.register_parameter("again", model.bert.pooler.dense.weight)
    return model


def edited_model(node: Client, dtype: torch.dtype) -> Client:
    """Return a node that computes in float32 without the second name, and answers with both."""

    reads = edited_wire(node)

    def answer(message: Message) -> Message | None:
        found = reads(message)
        if found is not None and "query" not in kind(message):
            update = {name: t.to(dtype) for name, t in from_arrays(found.content["arrays"]).items()}
            update["again"] = update["bert.pooler.dense.weight"]
            found.content["arrays"] = to_arrays(update)
        return found

    return answer


def test_every_message_travels_in_the_precision_of_the_wire() -> None:
    noting, notes = received_by(edited_wire(learner(index)) for index in range(3))
    strategy = FedRot(
        config_of(NAME), fit_head=True, fraction_evaluate=0.0, server=Server(wire=torch.bfloat16)
    )
    grid = FakeGrid(dict(enumerate(noting, start=100)))
    result = strategy.start(grid, ArrayRecord(state()), 2)
    # Per client: sums of the first model; a training, sums of the new model and of the one half way;
    # a training that repeats the refused round, whose models are kept.
    assert result.train_metrics_clientapp[1]["fedrot-head-step"] == 0
    assert len(notes) == 3 * (1 + 3 + 1)
    assert {array.dtype for record in notes for array in record.values()} == {"bfloat16"}
    assert {array.dtype for array in result.arrays.values()} == {"float32"}


def edited_wire(node: Client) -> Client:
    """Return a node that trains in float32 on what it receives."""

    def answer(message: Message) -> Message | None:
        given = message.content.array_records if kind(message) == "train" else {}
        for record, arrays in given.items():
            known = {name: t.float() for name, t in from_arrays(arrays).items() if name != "again"}
            message.content = RecordDict({**message.content, record: ArrayRecord(known)})
        return node(message)

    return answer


def test_deterministic_rounds_do_not_depend_on_the_ids_of_nodes() -> None:
    results, losses = [], []
    for ids in ({100: 0, 101: 1, 102: 2}, {907: 1, 3: 2, 55: 0}):
        nodes = {node: learner(index) for node, index in ids.items()}
        strategy = FedRot(config_of(NAME), fit_head=True, **COMMON)
        result = strategy.start(FakeGrid(nodes), ArrayRecord(state()), 4)
        results.append(tensors_of(result.arrays))
        losses.append([m["fedrot-head-loss"] for m in result.train_metrics_clientapp.values()])
    assert losses[0] == losses[1]
    assert all(torch.equal(results[0][name], own) for name, own in results[1].items())


def test_a_subclass_that_hides_the_model_is_refused() -> None:
    """It makes the messages itself and plays the rounds itself: nobody knows the round's model."""

    class Own(FedRot):
        def configure_train(
            self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
        ) -> Iterable[Message]:
            content = RecordDict({"arrays": arrays, "config": config})
            return [Message(content, node, "train") for node in grid.get_node_ids()]

    strategy = Own(config_of(NAME), alignment=None, fit_head=True, fraction_evaluate=0.0)
    grid = FakeGrid(dict(enumerate((learner(index) for index in range(3)), start=100)))
    messages = strategy.configure_train(1, ArrayRecord(state()), ConfigRecord(), grid)
    answers = list(grid.send_and_receive(messages))
    with pytest.raises(fedrot.FedrotError, match="round 1 is not known"):
        strategy.aggregate_train(1, answers)
