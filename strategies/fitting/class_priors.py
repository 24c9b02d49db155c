"""``class_priors``: the clients' shares of classes, from one exchange of counts."""

from __future__ import annotations

import torch
from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fedrot.errors import FedrotError, UpdateError
from fedrot.strategies.fitting.ask import Clients, are_counts
from fedrot.strategies.wire.arrays import tensors_in
from fedrot.strategies.wire.fitting_messages import COUNT_CLASSES, COUNTS
from fedrot.task_head.outputs import (
    OUTPUT_KINDS,
    outputs_of,
    problem_type_of,
)
from fedrot.task_head.votes import capped


def class_priors(
    grid: Grid,
    model_config: object,
    *,
    config: ConfigRecord | None = None,
    timeout: float = 3600,
) -> list[float]:
    """Return the shares of classes among all training rows, for ``site_model``.

    A model of FedAvg, FedProx or any other strategy has about these shares in its bias.
    Clients send how many training rows of each class they have; a client with
    ``LabelledRows(report=False)`` sends them, too. ``fit_task_head`` and
    ``FedRot(fit_head=True)`` know the shares without this exchange.

    Clients may send any numbers. A client's rows count at most 1.5 times as much as the
    median client's: of four clients with equally many rows, no one moves a share by
    more than 1/3. It is no trimmed mean, which would lose the classes of one client.

    Args:
        grid: of the server app. Clients need ``answer_with_sums`` on their
            ``ClientApp``.
        model_config: the model's transformers configuration, or its dictionary; of an
            adapter that of its base model.
        config: sent with all requests.
        timeout: seconds to wait for the answers.

    Returns:
        a share for each class, or of rows with each label. Half a row stands for a
        class without rows. Empty for a regression, which needs none: nobody is asked.

    Example: ``model.config.fedrot = {"priors": class_priors(grid, model.config)}``

    Raises:
        FedrotError: no client gives a usable answer, or none has labelled rows.
    """
    return priors_of(
        Clients(
            grid,
            problem_type=problem_type_of(model_config),
            config=config,
            timeout=timeout,
            described=model_config,
        ),
        outputs_of(model_config),
    )


def priors_of(clients: Clients, outputs: int) -> list[float]:
    """Return ``class_priors`` of so many outputs."""
    kind = OUTPUT_KINDS[clients.problem_type]
    if not kind.has_classes:
        return []
    size = outputs if kind.by_class else 1 + outputs

    def read(node: int, content: RecordDict) -> Tensor:
        """Return a client's numbers of rows by class, or with each label."""
        counts = tensors_in(content, COUNTS)["counts"]
        fits = counts.shape == (size,) and counts.dtype == torch.float64
        # No label has more rows than there are.
        possible = are_counts(counts) & (counts <= counts[kind.centres].sum())
        if not fits or not possible.all():
            raise UpdateError(
                f"The counts are {counts.dtype} {counts.tolist()!r:.100}, not {size} "
                "numbers of rows in float64."
            )
        return counts

    answers = clients.ask(clients.grid.get_node_ids(), COUNT_CLASSES, read)
    # Sums of floats depend on their order.
    counts = torch.stack([answers[node] for node in sorted(answers)])
    counts = counts[counts.any(1)]
    if not len(counts):
        raise FedrotError("No client has training rows with 'labels'.")
    rows = counts[:, kind.centres].sum(1)
    weights = torch.tensor(capped(rows.tolist())).double() / rows
    return kind.priors(weights @ counts).tolist()
