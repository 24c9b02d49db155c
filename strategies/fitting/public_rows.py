"""``PublicRows``: a task head from noisy sums of the sites, and rows that are nobody's.

Sites with an ``epsilon`` answer one kind of request: counts and sums over clipped rows
with noise of their own (``fedrot.task_head.noisy``). There is no request before it and
none after it, since each would tell about rows. So no held-out rows choose: the head is
taken as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from logging import INFO, WARNING

from flwr.app import RecordDict
from flwr.common import log

from fedrot.errors import FedrotError
from fedrot.strategies.arguments import check_functions
from fedrot.strategies.client.client_rows import Builds, ReadsRows
from fedrot.strategies.fitting.ask import Clients
from fedrot.strategies.fitting.bodies import Body
from fedrot.strategies.fitting.result import FittedTaskHead
from fedrot.strategies.wire.arrays import from_arrays, tensors_in, to_arrays
from fedrot.strategies.wire.fitting_messages import NOISY_SUM, NOISY_SUMS, PUBLIC
from fedrot.strategies.wire.loaded_model import loaded
from fedrot.task_head.noisy.noisy_fit import fit_to_noisy_sums
from fedrot.task_head.noisy.noisy_sums import NoisySums, capped_total, loud
from fedrot.task_head.noisy.public_features import public_features
from fedrot.task_head.outputs import SINGLE


@dataclass(frozen=True)
class PublicRows:
    """Unlabelled rows that are nobody's, from which the server bounds features.

    Texts like those of the sites are best; some hundreds do. They must not come from a
    site: the guarantee of ``Privacy(epsilon=...)`` does not cover them.

    Attributes:
        build: returns the model that the clients build, or a PEFT model.
        batches: returns keyword arguments of the model's forward; labels are not read.

    Example: ``PublicRows(build, lambda: loader)``
    """

    build: Builds
    batches: ReadsRows

    def __post_init__(self) -> None:
        check_functions(self, "build", "batches")


def fit_with_public_rows(
    clients: Clients, body: Body, public: PublicRows
) -> FittedTaskHead:
    """Return a model with a head that is fitted to the sites' noisy sums.

    Sites without an ``epsilon`` answer with sums of clipped rows without noise. A
    site's rows count at most 1.5 times as much as the median site's. No sums are left
    out for making the head worse, since no site evaluates it.

    Args:
        clients: to ask.
        body: the model.
        public: rows that are nobody's.

    Raises:
        FedrotError: the model's problem type is not one class a row, or no site gives a
            usable answer.
    """
    if clients.problem_type != SINGLE:
        raise FedrotError(
            f"The problem type is {clients.problem_type}. Sums with noise are there "
            f"for {SINGLE} alone: several labels of a row, and its numbers, have no "
            "bound that one row keeps. Fit without public=."
        )
    features = public_features(
        loaded(public.build(), from_arrays(body.sent)),
        public.batches(),
        clients.task_head,
    )

    def read(node: int, content: RecordDict) -> NoisySums:
        return NoisySums.unpacked(
            tensors_in(content, NOISY_SUMS), body.unfitted(1.0).weight.shape
        )

    nodes = [*clients.grid.get_node_ids()]
    content = {PUBLIC: to_arrays(vars(features.clipping))}
    answers = clients.ask(nodes, NOISY_SUM, read, content, [body])
    left_out = loud({node: float(sums.variance) for node, sums in answers.items()})
    if left_out:
        log(
            WARNING,
            "Task head: left out are the sums of clients %s: their noise would hide "
            "the rows of all others. Their epsilon is much smaller, or they lie.",
            ", ".join(map(str, left_out)),
        )
    # Sums of floats depend on their order.
    kept = [answers[node] for node in sorted(answers) if node not in left_out]
    total = capped_total(kept)
    weight, offset, priors = fit_to_noisy_sums(total, features, body.has_bias)
    log(
        INFO,
        "Task head: fitted to noisy sums of %d of %d sites, about %.0f rows; a count "
        "of all sites has noise of %.1f rows. No held-out rows have judged it.",
        len(kept),
        len(nodes),
        total.rows,
        float(total.variance.sqrt()),
    )
    return FittedTaskHead(
        body.with_task_head(weight, offset),
        fitted=True,
        clients=len(kept),
        priors=tuple(priors.tolist()),
    )
