"""Classifiers of every kind with labelled rows at three clients, and the head that one
place finds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any

import peft
import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification

from fedrot.lora import adapter_tensors
from fedrot.strategies import LabelledRows, Privacy, answer_with_sums, fit_task_head
from fedrot.strategies.pooled_classifier import (
    PooledClassifier,
    PooledClassifierConfig,
)
from fedrot.task_head.choice import SHRINKAGES
from fedrot.task_head.fit import fitted_task_head
from fedrot.task_head.losses import TEMPERATURES
from fedrot.task_head.sums import collect_classes
from tests.strategies.fakes import Client, grid_of, node_of, tensors_of

WIDTH, OUTPUTS, CLIENTS = 16, 3, 3
#: Of the clients' adapters.
RANKS = (2, 4, 8)
#: Leaves no rows out.
ALL_ROWS = Privacy(1, 1)

Rows = dict[str, Tensor]
State = dict[str, Tensor]
#: The tensors or numbers of an answer by record, which an edit changes in place.
Answer = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Kind:
    """A kind of classifier: labels of rows of tokens ``[rows, 6]``, and losses of
    logits and labels.
    """

    problem: str
    label: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    outputs: int = OUTPUTS
    #: Among which the head's is chosen.
    temperatures: tuple[float, ...] = TEMPERATURES
    #: The name of the clients' adapters, which have the ``RANKS``; empty for models.
    adapter: str = ""
    #: Of a ``PooledClassifier``.
    pooling: str = ""

    @property
    def head(self) -> str:
        return "base_model.model.classifier" if self.adapter else "classifier"

    def build(self, rank: int = RANKS[-1]) -> Any:
        """Return a model, the same in every call but for the rank of an adapter."""
        with torch.random.fork_rng(devices=[]):
            return self.drawn(rank)

    def drawn(self, rank: int = RANKS[-1]) -> Any:
        """Return the same, as libraries do, which change the random numbers."""
        torch.manual_seed(3)
        return copy.deepcopy(self._model(rank))

    @cache  # noqa: B019
    def _model(self, rank: int) -> Any:
        small = {
            "vocab_size": 40,
            "hidden_size": WIDTH,
            "num_hidden_layers": 1,
            "intermediate_size": 32,
        }
        own = {
            "num_labels": self.outputs,
            "problem_type": self.problem,
            "num_attention_heads": 2,
        }
        config: Any = BertConfig(**small, **own)
        model: Any = BertForSequenceClassification(config)
        if self.pooling:
            config = PooledClassifierConfig(config, self.pooling, **own)
            model = PooledClassifier(config)
        model.eval()
        # Features of an untrained model differ too little for a head.
        for parameter in model.base_model.encoder.parameters():
            parameter.data.mul_(4)
        if not self.adapter:
            return model
        torch.manual_seed(5)
        targets = {
            "target_modules": ["query", "value"],
            "modules_to_save": ["classifier"],
        }
        lora = peft.LoraConfig(r=rank, lora_alpha=8, **targets)
        model = peft.get_peft_model(model, lora, self.adapter).eval()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_()
        return model

    @property
    def config(self) -> Any:
        """What describes the model to a server."""
        model = self.build()
        return model.peft_config[self.adapter] if self.adapter else model.config

    def state(self) -> State:
        model = self.build()
        return adapter_tensors(model) if self.adapter else model.state_dict()

    def rows(self, seed: int, count: int = 80) -> Rows:
        ids = torch.randint(
            40, (count, 6), generator=torch.Generator().manual_seed(seed)
        )
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return {**given, "labels": self.label(ids)}

    def logits(self, model: Any, rows: Rows) -> Tensor:
        with torch.no_grad():
            found = model.eval()(
                **{n: v for n, v in rows.items() if n != "labels"}
            ).logits
        return found.double()

    def client(
        self,
        training: Rows | None,
        held_out: Rows | None,
        build: Callable[[], nn.Module] | None = None,
        privacy: Privacy = ALL_ROWS,
    ) -> Client:
        app = ClientApp()
        rows = [[given] if given is not None else [] for given in (training, held_out)]
        data = LabelledRows(build or self.drawn, lambda: rows[0], lambda: rows[1])
        answer_with_sums(app, lambda message, context: data, privacy=privacy)
        return node_of(app)

    def pairs(self) -> list[tuple[Rows, Rows]]:
        """Return the training rows and held-out rows of clients; some have more of one
        label.
        """
        found = []
        for seed in range(CLIENTS):
            given = self.rows(seed, 90)
            labels = given["labels"].reshape(90, -1)[:, 0]
            some = (labels > labels.double().mean()) | (
                torch.arange(90) % (2 + seed) == 0
            )
            own = {name: value[some] for name, value in given.items()}
            found.append((own, self.rows(100 + seed, 40 + 5 * seed)))
        return found

    def labels(self) -> Tensor:
        """Return those of all training rows."""
        return torch.cat([training["labels"] for training, _ in self.pairs()]).double()

    def clients(self) -> list[Client]:
        built = [(lambda rank=rank: self.drawn(rank)) for rank in RANKS]
        return [
            self.client(*pair, build)
            for pair, build in zip(self.pairs(), built, strict=True)
        ]

    def best(self) -> tuple[float, float, float, dict[str, Tensor]]:
        """Return the best loss, shrinkage, temperature and head of one place that has
        all rows.
        """
        model = self.build()
        inputs = list[Tensor]()
        training, held_out = (
            {name: torch.cat([one[name] for one in given]) for name in given[0]}
            for given in zip(*self.pairs(), strict=True)
        )
        sums = collect_classes(model, [training], self.head)
        layer = model.get_submodule(self.head)
        layer.register_forward_hook(
            lambda module, given, result: inputs.append(given[0].double())
        )
        self.logits(model, held_out)
        found = []
        for shrinkage, temperature in product(SHRINKAGES, self.temperatures):
            weight, bias = (
                tensor / temperature for tensor in fitted_task_head(sums, shrinkage)
            )
            loss = self.loss(inputs[0] @ weight.mT + bias, held_out["labels"]).mean()
            head = {
                f"{self.head}.weight": weight.float(),
                f"{self.head}.bias": bias.float(),
            }
            found.append((float(loss), shrinkage, temperature, head))
        return min(found, key=lambda one: one[0])

    def judged(self, tensors: State, temperatures: Iterable[float] = (1.0,)) -> float:
        """Return the smallest mean loss of all held-out rows; ``tensors`` are a whole
        model's.
        """
        model = self.build()
        model.load_state_dict(tensors)
        pairs = [(self.logits(model, rows), rows["labels"]) for _, rows in self.pairs()]
        return min(
            float(
                torch.cat(
                    [self.loss(logits / t, labels) for logits, labels in pairs]
                ).mean()
            )
            for t in temperatures
        )

    def fitted(self, clients: list[Client], **given: Any) -> Any:
        return fit_task_head(
            grid_of(clients), ArrayRecord(self.state()), self.config, timeout=1, **given
        )


def _of_several(logits: Tensor, labels: Tensor) -> Tensor:
    every = functional.binary_cross_entropy_with_logits(
        logits, labels.double(), reduction="none"
    )
    return every.sum(1)


def _one_label(ids: Tensor) -> Tensor:
    return ids[:, 0] % OUTPUTS


SINGLE = Kind(
    "single_label_classification",
    _one_label,
    partial(functional.cross_entropy, reduction="none"),
)


def _number(ids: Tensor) -> Tensor:
    return ids[:, 0] / 10 + ids[:, 1] / 40


#: Of the numbers of all training rows; their loss has this unit.
VARIANCE = replace(SINGLE, label=_number).labels().var(correction=0)

KINDS = {
    "single": SINGLE,
    "multi": Kind(
        "multi_label_classification",
        lambda ids: (ids[:, :OUTPUTS] % 2).float(),
        _of_several,
    ),
    "regression": Kind(
        "regression",
        _number,
        lambda values, labels: (values[:, 0] - labels).square() / VARIANCE,
        outputs=1,
        temperatures=(1.0,),
    ),
    "adapter": replace(SINGLE, adapter="default"),
    "adapter of another name": replace(SINGLE, adapter="mine"),
    "pooled": replace(SINGLE, pooling="mean"),
}


def as_predicted(given: Rows, model: Any = None) -> Rows:
    """Return rows with the labels that a model predicts, by default the ``SINGLE``
    one.
    """
    return {**given, "labels": SINGLE.logits(model or SINGLE.build(), given).argmax(1)}


def edited(node: Client, edit: Callable[[Answer], None]) -> Client:
    """Return a node whose answers are edited before they are sent."""

    def answer(message: Message) -> Message | None:
        found = node(message)
        assert found is not None
        metrics = found.content.metric_records
        arrays = found.content.array_records
        records = {name: dict(record) for name, record in metrics.items()}
        records |= {name: tensors_of(record) for name, record in arrays.items()}
        edit(records)
        for name, record in records.items():
            kind = MetricRecord if name in metrics else ArrayRecord
            found.content[name] = kind(record)
        return found

    return answer
