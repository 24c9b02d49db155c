"""Memory and seconds of a task head that is fitted to the sums of many clients.

The clients answer with sums of random features and have no network, so that the memory
is the server's: the model that it sends, and what it keeps of the answers. Printed are
the largest memory of the process beyond that before the fit, in sizes of the model and
in GB, and the seconds of the fit without those in which clients answer, for each number
of clients. The default is the size of BERT-base.

    python benchmarks/head.py [--clients 4 50 200] [--width 768] [--megabytes 440]

With `--seconds` the clients have a network of MiniLM's shape and 160 rows each. Printed
are seconds of whole fits: without minimum counts, with the defaults, with a record, and
with an epsilon, as ratios to the first in the same turn. The first turn is left out.

    python benchmarks/head.py --seconds [--turns 6]
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from transformers import BertConfig, BertForSequenceClassification

from fedrot.simulations.federation.grids import LocalGrid
from fedrot.strategies import (
    LabelledRows,
    Privacy,
    PublicRows,
    answer_with_sums,
    fit_task_head,
    to_arrays,
)
from fedrot.strategies.wire.fitting_messages import (
    COUNT,
    LOSSES,
    ROWS,
    STAGE,
    SUM,
    SUMS,
    TASK_HEADS,
)
from fedrot.strategies.wire.flower_compat import outside_of_the_engine
from fedrot.task_head.losses import TEMPERATURES
from fedrot.task_head.sums import ClassSums

CLASSES, ROWS_OF_A_CLIENT = 6, 100


class Clock:
    """Adds up the seconds of clients' answers."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, node: Callable[[Message], Message]) -> Callable[[Message], Message]:
        """Return a node whose answers are timed."""

        def answer(message: Message) -> Message:
            start = time.perf_counter()
            reply = node(message)
            self.seconds += time.perf_counter() - start
            return reply

        return answer


def client(seed: int, width: int) -> Callable[[Message], Message]:
    """Return a node that answers with sums of random features."""

    def answer(message: Message) -> Message:
        (config,) = message.content.config_records.values()
        if config[STAGE] == COUNT:
            counts = {"training": ROWS_OF_A_CLIENT, "held_out": ROWS_OF_A_CLIENT}
            return Message(
                RecordDict({ROWS: MetricRecord({**counts})}), reply_to=message
            )
        if config[STAGE] == SUM:
            features = torch.randn(
                ROWS_OF_A_CLIENT, width, generator=torch.Generator().manual_seed(seed)
            )
            hot = torch.nn.functional.one_hot(
                torch.arange(ROWS_OF_A_CLIENT) % CLASSES, CLASSES
            ).double()
            wide = features.double()
            sums = ClassSums(hot.sum(0), hot.mT @ wide, wide.mT @ wide)
            return Message(
                RecordDict({SUMS: to_arrays(sums.packed())}), reply_to=message
            )
        heads = message.content.array_records[f"{TASK_HEADS}-0"]["bias"].shape[0]
        losses = torch.full(
            (heads, len(TEMPERATURES)), 100.0 + seed, dtype=torch.float64
        )
        counts = torch.full((1 + heads,), float(ROWS_OF_A_CLIENT), dtype=torch.float64)
        found = {"losses": losses, "squares": losses, "counts": counts}
        return Message(RecordDict({LOSSES: to_arrays(found)}), reply_to=message)

    return answer


def measure(clients: int, width: int, megabytes: int) -> tuple[float, float]:
    """Return the additional memory of a fit, in sizes of the model, and its seconds."""
    rows = megabytes * 2**18 // width
    model = {"embeddings.weight": torch.randn(rows, width)}
    model |= {
        "classifier.weight": torch.zeros(CLASSES, width),
        "classifier.bias": torch.zeros(CLASSES),
    }
    arrays = ArrayRecord(model)
    clock = Clock()
    nodes = {node: clock.timed(client(node, width)) for node in range(1, clients + 1)}
    grid = LocalGrid(nodes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    with outside_of_the_engine():
        fit_task_head(
            grid, arrays, {"model_type": "distilbert"}, task_head="classifier"
        )
    seconds = time.perf_counter() - start - clock.seconds
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (after - before) / 2**10 / megabytes, seconds


def site(
    number: int, build: Callable[[], torch.nn.Module], privacy: Privacy, folder: Path
) -> Callable[[Message], Message]:
    """Return a node that answers with sums over texts of its own."""
    generator = torch.Generator().manual_seed(number)
    batches = [
        {
            "input_ids": torch.randint(1000, (40, 32), generator=generator),
            "attention_mask": torch.ones(40, 32, dtype=torch.int64),
            "labels": torch.randint(CLASSES, (40,), generator=generator),
        }
        for _ in range(5)
    ]
    rows = LabelledRows(build, lambda: batches[:4], lambda: batches[4:])
    app = ClientApp()
    answer_with_sums(app, lambda message, context: rows, folder=folder, privacy=privacy)
    context = Context(
        run_id=1, node_id=number, node_config={}, state=RecordDict(), run_config={}
    )

    def answer(message: Message) -> Message:
        return app(message, context)

    return answer


def compare_seconds(turns: int, clients: int = 3) -> None:
    """Print the seconds of fits, and their ratios to one of the same turn.

    That one leaves no row out; it reads the labels as the others do.
    """
    torch.set_num_threads(1)
    config = BertConfig(
        vocab_size=1000,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        num_labels=CLASSES,
    )
    model = BertForSequenceClassification(config)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    public_batches = [{"input_ids": torch.randint(1000, (40, 32))} for _ in range(5)]
    public = PublicRows(lambda: model, lambda: public_batches)
    seconds: dict[str, list[float]] = {}
    for turn in range(turns + 1):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            records = [folder / f"{number}.jsonl" for number in range(clients)]
            ways = {
                "no minimum": [Privacy(1, 1)] * clients,
                "defaults": [Privacy()] * clients,
                "record": [Privacy(record=record) for record in records],
                "epsilon": [
                    Privacy(record=f"{record}.noise", epsilon=3.0) for record in records
                ],
            }
            for way, settings in ways.items():
                nodes = {
                    number: site(number, lambda: model, privacy, folder / way)
                    for number, privacy in enumerate(settings, 1)
                }
                start = time.perf_counter()
                with outside_of_the_engine():
                    fit_task_head(
                        LocalGrid(nodes),
                        ArrayRecord(state),
                        config,
                        public=public if way == "epsilon" else None,
                    )
                if turn:
                    seconds.setdefault(way, []).append(time.perf_counter() - start)
    for way, took in seconds.items():
        pairs = zip(took, seconds["no minimum"], strict=True)
        ratios = sorted(one / other for one, other in pairs)
        print(
            f"{way}: {median(took):.2f} s, ratio {median(ratios):.3f} "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )


def main() -> None:
    """Measure each number of clients in a process of its own, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[4, 50, 200])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--megabytes", type=int, default=440)
    parser.add_argument("--seconds", action="store_true")
    parser.add_argument("--turns", type=int, default=6)
    options = parser.parse_args()
    if options.seconds:
        compare_seconds(options.turns)
        return
    for clients in options.clients:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            sizes, seconds = pool.apply(
                measure, (clients, options.width, options.megabytes)
            )
        print(
            f"{clients} clients, width {options.width}: {sizes:.2f} sizes of a model "
            f"of {options.megabytes} MB, {sizes * options.megabytes / 2**10:.2f} GB, "
            f"{seconds:.2f} s"
        )


if __name__ == "__main__":
    main()
