"""Subclasses as Flower's documentation, examples and templates write them, over any
strategy.

Each function returns a subclass of ``base``. What it reads in replies is in its
attribute ``seen``.
"""

from __future__ import annotations

from typing import Any

from flwr.app import (
    ConfigRecord,
    Message,
    RecordDict,
)
from flwr.serverapp.strategy import Result


def megabytes(messages):
    total = 0
    for message in messages:
        if message.has_content():
            records = message.content.array_records.values()
            total += sum(record.count_bytes() for record in records)
    return total / 1024**2


def decaying(base):
    """The tutorial "Use a federated learning strategy", and "Configure clients": a
    learning rate.
    """

    class CustomFedAdagrad(base):
        seen = ()

        def configure_train(self, server_round, arrays, config, grid):
            if server_round % 2 == 0:
                config["lr"] *= 0.5
            return super().configure_train(server_round, arrays, config, grid)

    return CustomFedAdagrad


def looking(base):
    """A strategy that looks at the replies before and after they are aggregated."""

    class LooksAtReplies(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.seen: list[Any] = []

        def aggregate_train(self, server_round, replies):
            self.seen.append([r.content.object_id for r in replies if r.has_content()])
            aggregated = super().aggregate_train(server_round, replies)
            self.seen.append([r.content.object_id for r in replies if r.has_content()])
            return aggregated

        def aggregate_evaluate(self, server_round, replies):
            self.seen.append(sorted(r.metadata.src_node_id for r in replies))
            aggregated = super().aggregate_evaluate(server_round, replies)
            self.seen.append(len([*replies]))
            return aggregated

    return LooksAtReplies


def tracking(base):
    """The four FlowerTune templates: they count the bytes of messages and replies."""

    class FlowerTuneLlm(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.seen: list[float] = []

        def configure_train(self, server_round, arrays, config, grid):
            messages = super().configure_train(server_round, arrays, config, grid)
            self.seen.append(megabytes(messages))
            return messages

        def aggregate_train(self, server_round, replies):
            self.seen.append(megabytes(replies))
            return super().aggregate_train(server_round, replies)

    return FlowerTuneLlm


def exclusive(base):
    """The whisper example: clients that have not trained are left out."""

    class ExclusiveFedAvg(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.seen: list[str] = []

        def aggregate_train(self, server_round, replies):
            trained = [
                r for r in replies if r.has_content() and r.content["state"]["trained"]
            ]
            self.seen.append(f"{len(trained)}/{len(replies)}")
            return super().aggregate_train(server_round, trained)

    return ExclusiveFedAvg


def own_start(base):
    """The tutorial "Build a strategy from scratch", and the example of PyTorch: an own
    ``start``.
    """

    class KeepsTheBest(base):
        seen = ()

        def start(
            self,
            grid,
            initial_arrays,
            num_rounds=3,
            timeout=3600,
            train_config=None,
            evaluate_config=None,
            evaluate_fn=None,
        ):
            self.summary()
            result = Result()
            arrays = initial_arrays
            train = train_config or ConfigRecord()
            evaluate = evaluate_config or ConfigRecord()
            best = []
            for number in range(1, num_rounds + 1):
                messages = self.configure_train(number, arrays, train, grid)
                replies = grid.send_and_receive(messages=messages, timeout=timeout)
                aggregated, metrics = self.aggregate_train(number, replies)
                if aggregated is not None:
                    result.arrays = arrays = aggregated
                if metrics is not None:
                    result.train_metrics_clientapp[number] = metrics
                messages = self.configure_evaluate(number, arrays, evaluate, grid)
                replies = grid.send_and_receive(messages=messages, timeout=timeout)
                metrics = self.aggregate_evaluate(number, replies)
                if metrics is not None:
                    result.evaluate_metrics_clientapp[number] = metrics
                    best.append((float(metrics["score"]), number))
            self.seen = max(best)
            return result

    return KeepsTheBest


def own_messages(base):
    """A strategy that makes its messages itself."""

    class SotaStrategy(base):
        seen = ()

        def configure_train(self, server_round, arrays, config, grid, kind="train"):
            config["server-round"] = server_round
            content = RecordDict({"arrays": arrays, "config": config})
            nodes = sorted(grid.get_node_ids())
            return [Message(content, node, kind) for node in nodes]

        def configure_evaluate(self, *given):
            return self.configure_train(*given, kind="evaluate")

    return SotaStrategy


#: By name; the tutorials and "Configure clients" share two, the FlowerTune templates
#: one.
TEMPLATES = {
    "learning rate": decaying,
    "replies": looking,
    "FlowerTune": tracking,
    "whisper": exclusive,
    "own start": own_start,
    "own messages": own_messages,
    "own messages, replies": lambda base: own_messages(looking(base)),
    "own start and messages": lambda base: own_start(own_messages(base)),
}
