"""``report_sites``: what each site gains, measured at the sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from logging import INFO
from statistics import fmean

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from fedrot.errors import UpdateError, legible
from fedrot.strategies.fitting.ask import Clients, are_counts
from fedrot.strategies.fitting.class_priors import priors_of
from fedrot.strategies.fitting.fit_task_head import TaskHeadFitting
from fedrot.strategies.reporting.verdict import Metrics, Row
from fedrot.strategies.wire.arrays import (
    Precision,
    records_of_type,
    shapes_of,
    tensors_in,
    to_arrays,
)
from fedrot.strategies.wire.fitting_messages import (
    FIGURES,
    REPORT,
    SITE,
    TASK_HEADS,
    WITHHELD,
)
from fedrot.task_head.outputs import OUTPUT_KINDS

#: Whose figures a site reports: of the head that it fits alone, of the head of all, and
#: of its own.
HEADS = ("alone", "global", "own")

#: The figures of a head. A regression has the first one.
NAMES = ("loss", "accuracy", "macro_f1")

#: Sites with a line in the log.
MOST_LINES = 20

#: The longest name of a site, in characters.
LONGEST_NAME = 60


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
        withheld: number of sites that report nothing: ``LabelledRows(report=False)``,
            an epsilon, or too few rows for their ``Privacy``.
    """

    measure: str
    rows: list[Row]
    withheld: int

    @property
    def worst(self) -> Row:
        """The row of the site with the worst own head."""
        sign = 1 if self.measure == "accuracy" else -1
        return min(self.rows, key=lambda row: sign * row["own"][self.measure])

    def metrics(self) -> Metrics:
        """Return numbers of sites, and means over them.

        Better and worse are sites whose own head differs from the head alone by more
        than their interval.
        """
        metrics: Metrics = {
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
        for row in self.rows[:MOST_LINES]:
            log(INFO, "%s", self._line(row))
        log(INFO, "%d sites withhold their figures.", self.withheld)
        if self.rows:
            log(
                INFO,
                "%d of %d sites are better with their own head than alone, beyond "
                "noise. The worst is %s",
                self.metrics()["sites-better"],
                len(self.rows),
                self._line(self.worst),
            )

    def _line(self, row: Row) -> str:
        values = ", ".join(f"{head} {row[head][self.measure]:.4g}" for head in HEADS)
        who = row["site"] or f"client {row['client']}"
        chose = " that also chose" if row["chose"] else ""
        return f"{who}: {self.measure} {values} on {row['rows']} rows{chose}"


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
    wire: Precision = None,
) -> Sites:
    """Return what each site has from a model, and what it would have alone.

    Each client measures three heads on rows of its own: that of the model; its own,
    which is the same with the site's shares of classes (``site_model``); and one that
    is fitted to its rows alone, with the body of the first model. It sends its name,
    the numbers of its rows by class, and the figures of ``Sites``, but no row as it is;
    nothing with ``LabelledRows(report=False)``. These figures change nobody's model,
    and a client may lie about itself. Sites without rows, and those that fail, are
    named in warnings and left out.

    A client receives both models, unless it has kept them.

    Args:
        grid: of the server app. Clients need ``answer_with_sums`` on their
            ``ClientApp``.
        arrays: the model of any strategy, or an adapter, as for ``fit_task_head``.
        model_config: as for ``fit_task_head``.
        first: the model before all training; None if nobody trained.
        priors: shares of classes in the model's bias; without any the clients are asked
            (``class_priors``).
        task_head: as for ``fit_task_head``, like the other arguments.

    Example: ``report_sites(grid, result.arrays, model.config, first=initial).log()``

    Raises:
        FedrotError: the model has no such layer, or no client gives a usable answer.
    """
    fitting = TaskHeadFitting(model_config, task_head, wire, trusted=False)
    clients = fitting.clients(grid, config, timeout, arrays)
    return reported(fitting, clients, arrays, first or arrays, priors)


def reported(
    fitting: TaskHeadFitting,
    clients: Clients,
    arrays: ArrayRecord,
    first: ArrayRecord,
    priors: Sequence[float],
) -> Sites:
    """Return ``report_sites``, with the bodies that clients have kept."""
    before = fitting.body(first, clients.task_head, built=True)
    after = fitting.body(arrays, clients.task_head)
    head = after.unfitted(1.0)
    outputs = len(head.bias)
    if not len(priors):
        priors = priors_of(clients, outputs)
    sent = {
        "weight": head.weight,
        "bias": head.bias,
        "priors": torch.as_tensor(priors, dtype=torch.float64),
    }
    kind = OUTPUT_KINDS[clients.problem_type]
    labels, largest = (outputs, 1.0) if kind.has_classes else (0, kind.largest_loss)
    answers = clients.ask(
        clients.grid.get_node_ids(),
        REPORT,
        partial(_read, labels=labels, largest=largest),
        {f"{TASK_HEADS}-0": to_arrays(sent)},
        # A model that nobody has trained is the first one.
        [before, after] if before.key != after.key else [after],
    )
    names = clients.label_names(labels)
    rows = [row for _, row in sorted(answers.items()) if row]
    # So sites without a name are called.
    taken: set[str | None] = {f"client {row['client']}" for row in rows}
    for row in rows:
        name = row["site"]
        numbers = count(2)
        while row["site"] in taken:
            row["site"] = f"{name} ({next(numbers)})"
        # Sites without a name have the same one.
        taken.add(row["site"] or None)
        row["classes"] = dict(zip(names, row["classes"], strict=True))
    return Sites(NAMES[labels > 0], rows, len(answers) - len(rows))


def _read(node: int, content: RecordDict, labels: int, largest: float) -> Row | None:
    """Return a site's row, its classes without names; None if it is withheld.

    Args:
        labels: number of classes or labels.
        largest: of the figures by which sites are compared.

    Raises:
        UpdateError: figures are not in their range.
    """
    configs = records_of_type(content, ConfigRecord)
    if WITHHELD in configs:
        return None
    sent = tensors_in(content, FIGURES)
    expected = {"heads": (3, 3), "gain": (3,), "rows": (2, 1 + labels)}
    if shapes_of(sent) != expected:
        raise UpdateError(f"The figures are {shapes_of(sent)}, not {expected}.")
    heads, gain, rows = (sent[name].double() for name in expected)
    fits = [
        are_counts(rows) & (rows <= rows[:, :1]) & (rows[1, 0] > 0),
        (heads >= 0) & heads.isfinite(),
        heads[:, labels > 0 :] <= largest,
        (gain.abs() <= largest) & (gain[1] <= gain[2]),
    ]
    # Comparisons with NaN are false.
    if not all(map(torch.all, fits)):
        values = {name: tensor.tolist() for name, tensor in sent.items()}
        raise UpdateError(f"Figures of the report are out of range: {values}.")
    names = NAMES if labels else NAMES[:1]
    of_heads = [dict(zip(names, values, strict=False)) for values in heads.tolist()]
    (training, reported_on), *by_class = rows.long().mT.tolist()
    site = configs[SITE]
    return {
        "client": node,
        "site": legible(str(site["name"]))[:LONGEST_NAME].strip(),
        "rows": reported_on,
        "training": training,
        "chose": bool(site["chose"]),
        "classes": by_class,
        **dict(zip(HEADS, of_heads, strict=True)),
        "gain": gain.tolist(),
    }
