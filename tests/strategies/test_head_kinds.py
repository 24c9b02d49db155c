"""``fit_task_head`` for every kind of classifier, and for adapters: the head of all rows together."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import peft
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from fedrot.head import collect_classes, fit_head
from fedrot.lora import AdapterOptions, adapter_tensors, load_adapter
from fedrot.strategies import FedRotLoRA, LabelledRows, answer_with_sums, fit_task_head
from fedrot.strategies.sums.choice import SHRINKAGES
from fedrot.temperature import TEMPERATURES
from tests.strategies.fakes import Client, FakeGrid, reply, tensors_of

WIDTH, OUTPUTS = 16, 3
RANKS = (2, 4, 8)

Rows = dict[str, Tensor]


def config(problem: str, outputs: int = OUTPUTS) -> BertConfig:
    small = {"vocab_size": 40, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertConfig(**small, intermediate_size=32, num_labels=outputs, problem_type=problem)


def built(problem: str, outputs: int = OUTPUTS) -> nn.Module:
    torch.manual_seed(3)
    model: nn.Module = BertForSequenceClassification(config(problem, outputs))
    # Features of an untrained model differ too little for a head.
    for parameter in model.bert.encoder.parameters():
        parameter.data.mul_(4)
    return model


def adapted(rank: int) -> Any:
    torch.manual_seed(5)
    given = {"target_modules": ["query", "value"], "modules_to_save": ["classifier"]}
    model = peft.get_peft_model(built(PROBLEMS[0]), peft.LoraConfig(r=rank, lora_alpha=8, **given))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    return model


PROBLEMS = ("single_label_classification", "multi_label_classification", "regression")


def rows(problem: str, seed: int, count: int = 80) -> Rows:
    """Return rows whose labels depend on their tokens."""
    ids = torch.randint(40, (count, 6), generator=torch.Generator().manual_seed(seed))
    labels = ids[:, 0] % OUTPUTS
    if problem == PROBLEMS[1]:
        labels = (ids[:, :OUTPUTS] % 2).float()
    if problem == PROBLEMS[2]:
        labels = ids[:, 0] / 10 + ids[:, 1] / 40
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def client(build: Callable[[], nn.Module], problem: str, seed: int) -> Client:
    app = ClientApp()
    training, held_out = [rows(problem, seed)], [rows(problem, 100 + seed)]
    answer_with_sums(
        app, lambda message, context: LabelledRows(build, lambda: training, lambda: held_out)
    )
    return lambda message: app(message, Context(1, 1, {}, RecordDict(), {}))


def joined(problem: str, seeds: range) -> Rows:
    every = [rows(problem, seed) for seed in seeds]
    return {name: torch.cat([one[name] for one in every]) for name in every[0]}


def loss(model: nn.Module, problem: str, temperature: float = 1.0) -> float:
    """Return the mean loss of held-out rows, as transformers computes it, with divided logits."""
    head = model.get_submodule(HEADS.get(type(model).__name__, "classifier"))
    before = {name: value.clone() for name, value in head.state_dict().items()}
    for value in head.parameters():
        value.data.div_(temperature)
    with torch.no_grad():
        found = float(model.eval()(**joined(problem, range(100, 103))).loss)
    head.load_state_dict(before)
    # transformers takes the mean over labels.
    return found * OUTPUTS if problem == PROBLEMS[1] else found


#: The task head of a PEFT model.
HEADS = {"PeftModel": "base_model.model.classifier.modules_to_save.default"}


def expected(model: nn.Module, name: str, problem: str) -> tuple[float, dict[str, Tensor]]:
    """Return the best loss and head that one place with all rows finds, by loops."""
    head = model.get_submodule(HEADS.get(type(model).__name__, "classifier"))
    sums = collect_classes(model, [joined(problem, range(3))], name)
    found: list[tuple[float, dict[str, Tensor]]] = []
    for shrinkage in SHRINKAGES:
        weight, bias = fit_head(sums, shrinkage)
        for temperature in TEMPERATURES if problem != PROBLEMS[2] else (1.0,):
            own = {"weight": weight.float() / temperature, "bias": bias.float() / temperature}
            head.load_state_dict(own)
            found.append((loss(model, problem), own))
    return min(found, key=lambda pair: pair[0])


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_head_is_that_of_one_place(problem: str) -> None:
    outputs = 1 if problem == PROBLEMS[2] else OUTPUTS
    model = built(problem, outputs)
    initial = ArrayRecord(model.state_dict())
    nodes = {100 + seed: client(lambda: built(problem, outputs), problem, seed) for seed in range(3)}
    found = fit_task_head(FakeGrid(nodes), initial, config(problem, outputs), timeout=1)
    was = loss(model, problem)
    best, head = expected(model, "classifier", problem)
    assert found.fitted
    assert found.losses[0] == pytest.approx(was, rel=1e-4)
    assert found.losses[2] == pytest.approx(best, rel=1e-4)
    assert best < was * 0.98
    result = tensors_of(found.arrays)
    for name, value in head.items():
        torch.testing.assert_close(result[f"classifier.{name}"], value, rtol=1e-3, atol=1e-4)


def test_clients_of_different_ranks_fit_the_head_of_one_adapter() -> None:
    """Features are those of the server's rank, also at clients that train a smaller one."""
    model = adapted(max(RANKS))
    initial = ArrayRecord(adapter_tensors(model))
    nodes = {
        100 + i: client(lambda rank=rank: adapted(rank), PROBLEMS[0], i) for i, rank in enumerate(RANKS)
    }
    found = fit_task_head(FakeGrid(nodes), initial, model.peft_config["default"], timeout=1)
    best, head = expected(model, "base_model.model.classifier", PROBLEMS[0])
    assert found.losses[2] == pytest.approx(best, rel=1e-4)
    result = tensors_of(found.arrays)
    for name, value in head.items():
        torch.testing.assert_close(
            result[f"base_model.model.classifier.{name}"], value, rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("method", ["mean", "exact"])
def test_adapters_are_never_worse_over_rounds(method: str) -> None:
    """The oracle is the loss of each broadcast adapter on the held-out rows of all clients."""
    model, seen = adapted(max(RANKS)), list[dict[str, Tensor]]()
    ranks = RANKS if method == "exact" else (max(RANKS),) * 3

    def learner(index: int) -> Client:
        answers = client(lambda: adapted(ranks[index]), PROBLEMS[0], index)

        def node(message: Message) -> Message | None:
            if message.metadata.message_type != "train":
                return answers(message)
            received, own = tensors_of(message.content.array_records["arrays"]), adapted(ranks[index])
            seen.append(received)
            load_adapter(own, received)
            generator = torch.Generator().manual_seed(index)
            noise = {
                n: torch.randn(t.shape, generator=generator) for n, t in adapter_tensors(own).items()
            }
            sent = {n: t + noise[n] / 2 for n, t in adapter_tensors(own).items()}
            return reply(message, sent, 10, index)

        return node

    strategy = FedRotLoRA(
        model.peft_config["default"], AdapterOptions(method), fit_head=True, fraction_evaluate=0.0
    )
    grid = FakeGrid({100 + i: learner(i) for i in range(3)})
    result = strategy.start(grid, ArrayRecord(adapter_tensors(model)), 3, timeout=1)
    losses = []
    for tensors in [*seen[::3], tensors_of(result.arrays)]:
        load_adapter(model, tensors)
        losses.append(loss(model, PROBLEMS[0]))
    assert all(after <= before + 1e-5 for before, after in pairwise(losses))
    metrics = [one["fedrot-head-step"] for one in result.train_metrics_clientapp.values()]
    assert set(metrics) <= ({0.0, 0.5, 1.0} if method == "mean" else {0.0, 1.0})
