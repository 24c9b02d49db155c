"""``report_sites``: what each site gains, measured at the sites."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from logging import INFO, WARNING
from statistics import fmean
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from fedrot.errors import FedrotError, UpdateError, legible
from fedrot.strategies.fitting.ask import LARGEST, Clients
from fedrot.strategies.fitting.bodies import Body
from fedrot.strategies.fitting.class_priors import priors_of
from fedrot.strategies.fitting.fit_task_head import TaskHeadFitting
from fedrot.strategies.wire.arrays import (
    array_record,
    from_arrays,
    records_of_type,
    shapes_of,
    to_arrays,
)
from fedrot.strategies.wire.fitting_messages import (
    ALONE,
    FIGURES,
    FIRST,
    LACKS_ALONE,
    REPORT,
    SITE,
    TASK_HEADS,
    WHY_NOT_ALONE,
    WITHHELD,
)
from fedrot.symmetry.resolve import settings_of
from fedrot.task_head.names import task_head_names
from fedrot.task_head.outputs import OUTPUT_KINDS, REGRESSION

#: Whose figures a site reports: of the head that it fits alone, of the head of all, and
#: of its own.
HEADS = ("alone", "global", "own")

#: The figures of a head. A regression has the first one.
NAMES = ("loss", "accuracy", "macro_f1")

#: Sites with a line in the log.
MOST_LINES = 20

#: The longest name of a site, in characters.
LONGEST_NAME = 60

#: A row of a site, see ``Sites``.
Row = dict[str, Any]


@dataclass(frozen=True)
class Sites:
    """What the sites have reported.

    Attributes:
        measure: by which sites are compared: ``accuracy``, of a regression ``loss``.
        rows: one for each site, in the order of node ids: ``client``, the id of its
            node; ``site``, its name or empty; ``rows`` of the report and ``training``
            rows; ``chose``, whether rows of the report also chose heads; ``classes``,
            training rows and rows of the report by label; ``loss``, ``accuracy`` and
            ``macro_f1`` (of a regression the loss) of the heads ``alone``, ``global``
            and ``own``; and ``gain``, the accuracy of ``own`` minus that of ``alone``
            (of a regression the loss of ``alone`` minus that of ``own``) and its 95 %
            interval over the site's rows.
        withheld: number of sites with ``LabelledRows(report=False)``.
    """

    measure: str
    rows: list[Row]
    withheld: int

    @property
    def worst(self) -> Row:
        """The row of the site with the worst own head."""
        worst = min if self.measure == "accuracy" else max
        return worst(self.rows, key=lambda row: row["own"][self.measure])

    def metrics(self) -> dict[str, float]:
        """Return numbers of sites, and means over them.

        Better and worse are sites whose own head differs from the head alone by more
        than their interval.
        """
        metrics: dict[str, float] = {
            "sites": len(self.rows),
            "withheld": self.withheld,
            "sites-better": sum(row["gain"][1] > 0 for row in self.rows),
            "sites-worse": sum(row["gain"][2] < 0 for row in self.rows),
        }
        if self.rows:
            name = self.measure
            for head in HEADS:
                metrics[f"{head}-{name}"] = fmean(row[head][name] for row in self.rows)
            metrics[f"own-{name}-worst"] = self.worst["own"][name]
        return metrics

    def log(self) -> None:
        """Log a line for each of the first sites, and how many gain."""
        name = self.measure
        for row in self.rows[:MOST_LINES]:
            figures = ", ".join(f"{head} {row[head][name]:.4g}" for head in HEADS)
            on = "rows that also chose" if row["chose"] else "rows"
            log(INFO, f"%s: {name} {figures} on %d {on}", _who(row), row["rows"])
        log(INFO, "%d sites withhold their figures.", self.withheld)
        if self.rows:
            worst = self.worst
            log(
                INFO,
                "%d of %d sites are better with their own head than alone (beyond "
                "noise %d); the worst site, %s, has %.4g (alone %.4g)",
                sum(row["gain"][0] > 0 for row in self.rows),
                len(self.rows),
                self.metrics()["sites-better"],
                _who(worst),
                worst["own"][name],
                worst["alone"][name],
            )


def _who(row: Row) -> str:
    return row["site"] or f"client {row['client']}"


def report_sites(
    grid: Grid,
    arrays: ArrayRecord,
    model_config: object,
    *,
    first: ArrayRecord | None = None,
    priors: Sequence[float] = (),
    task_head: str | None = None,
    config: ConfigRecord | None = None,
    timeout: float = 3600,
    wire: torch.dtype | None = None,
) -> Sites:
    """Return what each site has from a model, and what it would have alone.

    Each client measures three heads on rows of its own: that of the model; its own,
    which is the same with the site's shares of classes (``site_model``); and one that
    is fitted to its rows alone, with the body of the first model. No rows leave a
    client. It sends its name, the numbers of its rows by class, and the figures of
    ``Sites``; nothing with ``LabelledRows(report=False)``. These figures change
    nobody's model, and a client may lie about itself. Sites without rows, and those
    that fail, are named in warnings and left out.

    Args:
        grid: of the server app. Clients need ``answer_with_sums`` on their
            ``ClientApp``.
        arrays: the model of any strategy, or an adapter, as for ``fit_task_head``.
        model_config: as for ``fit_task_head``.
        first: the model before all training; None if nobody trained. A client that has
            fitted a head to it in this run does not receive it.
        priors: shares of classes in the model's bias; without any the clients are asked
            (``class_priors``).
        task_head: as for ``fit_task_head``, like the other arguments.

    Example: ``report_sites(grid, result.arrays, model.config, first=initial).log()``

    Raises:
        FedrotError: the model has no such layer, or no client gives a usable answer.
    """
    fitting = TaskHeadFitting(model_config, task_head, wire, trusted=False)
    clients = fitting.clients(grid, config or ConfigRecord(), timeout, arrays)
    return reported(fitting, clients, arrays, first or arrays, priors)


def reported(
    fitting: TaskHeadFitting,
    clients: Clients,
    arrays: ArrayRecord,
    first: ArrayRecord,
    priors: Sequence[float],
) -> Sites:
    """Return ``report_sites``, with the bodies that clients have kept."""
    body = fitting.body(arrays, clients.task_head)
    before = fitting.body(first, clients.task_head)
    weight, bias = map(body.tensors.get, task_head_names(clients.task_head))
    assert weight is not None  # from TaskHeadFitting.clients
    labels = _labels(clients, len(weight))
    priors = priors or priors_of(clients, len(weight))
    head = {
        "weight": weight,
        "bias": weight.new_zeros(len(weight)) if bias is None else bias,
        "priors": torch.tensor(priors).double(),
    }

    def ask(nodes: Collection[int]) -> dict[int, Row | str]:
        return _of_first(clients, before).ask_about(
            [body],
            nodes,
            REPORT,
            partial(_read, labels=labels),
            {f"{TASK_HEADS}-0": to_arrays(head)},
        )

    answers = ask([*clients.grid.get_node_ids()])
    lacking = [node for node, answer in answers.items() if answer == LACKS_ALONE]
    reasons = dict[int, str]()
    with suppress(FedrotError):
        if lacking:
            reasons = ask_alone(clients, before, lacking, keep=[body])
            answers |= ask([node for node, reason in reasons.items() if not reason])
    rows, taken = list[Row](), set[str]()
    for node, answer in sorted(answers.items()):
        if answer == LACKS_ALONE:
            # One that has a head alone has noted other rows.
            reason = reasons.get(node) or "test rows must be the same in every call."
            log(WARNING, "Client %d is left out of the report: %s", node, reason)
        elif isinstance(answer, dict):
            name = _new(answer["site"], taken)
            taken.add(name)
            rows.append({"client": node, **answer, "site": name})
    measure = NAMES[1 if labels else 0]
    return Sites(measure, rows, [*answers.values()].count(WITHHELD))


def ask_alone(
    clients: Clients, first: Body, nodes: Collection[int], keep: Sequence[Body] = ()
) -> dict[int, str]:
    """Let clients fit heads alone; return by node why they have none, or an empty text.

    Args:
        first: of the first model.
        keep: bodies that clients shall keep beside it.
    """
    return _of_first(clients, first).ask_about(
        [first], nodes, ALONE, _why_not, keep=keep
    )


def _of_first(clients: Clients, first: Body) -> Clients:
    """Return clients whose requests name the body of the head alone."""
    config = ConfigRecord({**(clients.config or {}), FIRST: first.key})
    return replace(clients, config=config)


def _why_not(node: int, content: RecordDict) -> str:
    reasons = records_of_type(content, ConfigRecord).get(WHY_NOT_ALONE, {})
    return legible(str(reasons.get("reason", "")))


def _labels(clients: Clients, outputs: int) -> list[str]:
    """Return the names of the classes; numbers if the server has none."""
    if clients.problem_type == REGRESSION:
        return []
    names = settings_of(clients.described or {}).get("id2label") or {}
    named = {int(place): str(name) for place, name in names.items()}
    return [named.get(place, str(place)) for place in range(outputs)]


def _read(node: int, content: RecordDict, labels: Sequence[str]) -> Row | str:
    """Return a site's row; ``WITHHELD`` or ``LACKS_ALONE`` if there is none.

    Raises:
        UpdateError: figures are not in their range.
    """
    configs = records_of_type(content, ConfigRecord)
    for mark in {WITHHELD, LACKS_ALONE} & configs.keys():
        return mark
    sent = from_arrays(array_record(content, FIGURES))
    names = NAMES if labels else NAMES[:1]
    expected = {"heads": (3, len(names)), "noise": (2,), "rows": (2, 1 + len(labels))}
    if shapes_of(sent) != expected:
        raise UpdateError(f"The figures are {shapes_of(sent)}, not {expected}.")
    heads, noise, rows = (sent[name].double() for name in expected)
    largest = OUTPUT_KINDS[REGRESSION].largest_loss
    most = torch.tensor([largest, 1, 1])[: len(names)]
    fits = [
        (heads >= 0) & (heads <= most),
        (noise.abs() <= most[:2][-1]) & (noise[0] <= noise[1]),
        (rows >= 0) & (rows <= rows[:, :1]) & (rows <= LARGEST),
        (rows == rows.floor()) & (rows[1, 0] > 0),
    ]
    # Comparisons with NaN are false.
    if not all(bool(fit.all()) for fit in fits):
        values = {name: tensor.tolist() for name, tensor in sent.items()}
        raise UpdateError(f"Figures of the report are out of range: {values}.")
    # Of a regression a lower value is better.
    alone, _, own = heads[:, :2][:, -1] * (1 if labels else -1)
    (training, reported_on), *by_class = rows.long().mT.tolist()
    of_heads = [dict(zip(names, values, strict=True)) for values in heads.tolist()]
    site = configs[SITE]
    return {
        "site": legible(str(site["name"]))[:LONGEST_NAME].strip(),
        "rows": reported_on,
        "training": training,
        "chose": bool(site["chose"]),
        "classes": dict(zip(labels, by_class, strict=True)),
        **dict(zip(HEADS, of_heads, strict=True)),
        "gain": [float(own - alone), *noise.tolist()],
    }


def _new(name: str, taken: Collection[str]) -> str:
    """Return a name that is not taken: a second "A" becomes "A (2)"."""
    number, new = 1, name
    while name and new in taken:
        number += 1
        new = f"{name} ({number})"
    return new
