"""``fit_task_head``: a classifier's task head, fitted to the rows of all clients.

The server asks for the numbers of rows, then for sums over the training rows. It fits
heads, and clients evaluate the old model and those with fitted heads on their held-out
rows. The lowest loss wins; a quarter of the clients cannot turn the choice
(``fedrot.task_head.votes``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from fedrot.errors import FedrotError
from fedrot.strategies.fitting.ask import Clients
from fedrot.strategies.fitting.bodies import Body
from fedrot.strategies.fitting.exchange import Exchange
from fedrot.strategies.fitting.public_rows import PublicRows, fit_with_public_rows
from fedrot.strategies.fitting.result import FittedTaskHead
from fedrot.strategies.round.outbox import as_sent
from fedrot.strategies.wire.arrays import Precision, from_arrays, to_arrays
from fedrot.strategies.wire.fitting_messages import half_way, hash_of
from fedrot.strategies.wire.label_names import Names
from fedrot.task_head.names import adapter_task_head_of, task_head_of
from fedrot.task_head.outputs import problem_type_of, usual_problem_type
from fedrot.task_head.totals import BYTES

#: The most inputs of a task head that is fitted. With 2,304, the server holds 1 GB of
#: sums and needs two seconds for a decomposition; 7 GB and 50 seconds with this number.
WIDEST = 6144


def fit_task_head(
    grid: Grid,
    arrays: ArrayRecord,
    model_config: object,
    *,
    task_head: str | None = None,
    config: ConfigRecord | None = None,
    timeout: float = 3600,
    wire: Precision = None,
    trusted: bool = False,
    without: Iterable[int] = (),
    public: PublicRows | None = None,
) -> FittedTaskHead:
    """Fit the task head of a model to the rows of all connected clients; nobody trains.

    Clients tell how many rows they have. Then they receive the model, and answer with
    sums over their training rows. Clients with held-out rows receive the heads to
    compare. The server sees each client's sums, which tell what rows it has
    (``docs/explanation/privacy.md``). The task head is fitted by linear discriminant
    analysis, or by ridge regression (``fedrot.task_head.fitted_task_heads``), at
    several shrinkages. It is kept only if its loss on held-out rows is smaller than the
    given head's, each at its best temperature.

    Without ``public``, up to a quarter of the clients may lie. A client's rows count at
    most 1.5 times as much as the median client's, sums without which the head is better
    are left out, and no quarter of the clients turns a choice
    (``fedrot.task_head.votes``).

    Args:
        grid: of the server app. Clients need ``answer_with_sums`` on their
            ``ClientApp``.
        arrays: the model, such as ``strategy.start(...).arrays`` or a pretrained one;
            or an adapter with its task head, from ``fedrot.lora.adapter_tensors``.
        model_config: the model's transformers configuration, or its dictionary; of an
            adapter its ``LoraConfig``.
        task_head: the name of the model's last linear layer; None finds it
            (``fedrot.task_head.task_head_of``).
        config: sent with all requests, like ``train_config`` in a round.
        timeout: seconds to wait for the answers to each request.
        wire: precision of the model that is sent to the clients, as in ``Server``.
        trusted: whether all sites trust each other. No client's sums are then left out
            for making the head worse: labels that one site has alone count in full.
        without: ids of nodes that are not asked, such as those of sites that have left.
            The head has the bits of one that never had them.
        public: rows that are nobody's. Clients are then asked once, for sums with noise
            (``Privacy(epsilon=...)``), and the head is taken unjudged; for classes of
            rows alone. ``trusted`` has no meaning then.

    Example: ``final = fit_task_head(grid, result.arrays, model.config).arrays``

    Raises:
        FedrotError: the model has no such layer, or one of more than ``WIDEST`` inputs;
            no client has held-out rows; or no client gives a usable answer, with the
            last reason.
    """
    fitting = TaskHeadFitting(model_config, task_head, wire, trusted)
    clients = fitting.clients(grid, config, timeout, arrays)
    clients.without = frozenset(map(int, without))
    if public is not None:
        if not isinstance(public, PublicRows):
            raise FedrotError("public has to be a PublicRows(build, batches).")
        return fit_with_public_rows(
            clients, fitting.body(arrays, clients.task_head, built=True), public
        )
    result = fitting.fit(clients, arrays)
    result.log("Task head")
    return result


@dataclass
class TaskHeadFitting:
    """Fits the task heads of one run's models.

    It knows which bodies clients have kept, and the names of their labels.

    Attributes:
        described: the model's configuration; not needed for an adapter.
        task_head: the name of the task head; None finds it.
        wire: as in ``Server``.
        trusted: see ``fit_task_head``.
    """

    described: object
    task_head: str | None
    wire: Precision
    trusted: bool
    #: By the hash of a body: the nodes that have kept it.
    kept_by: dict[str, set[int]] = field(default_factory=dict)
    #: By the hash of a body: the nodes that have said that they lack it.
    lacked_by: dict[str, set[int]] = field(default_factory=dict)
    #: By node; nodes are asked once.
    names: dict[int, Names] = field(default_factory=dict)
    #: Labels of which the log has said that no client sent rows.
    unsent: set[int] = field(default_factory=set)

    def clients(
        self,
        grid: Grid,
        config: ConfigRecord | None,
        timeout: float,
        arrays: ArrayRecord,
    ) -> Clients:
        """Return the clients, to be asked about models like the given one.

        Raises:
            FedrotError: the model has no such task head.
        """
        tensors = from_arrays(arrays)
        is_adapter = any(".lora_" in name for name in tensors)
        # An adapter has no configuration of its model.
        described = None if is_adapter else self.described
        task_head = self.task_head or (
            adapter_task_head_of(tensors)
            if is_adapter
            else task_head_of(described, tensors)
        )
        weight = tensors.get(f"{task_head}.weight")
        if weight is None:
            raise FedrotError(
                f"The model has no layer '{task_head}'; see "
                "fedrot.task_head.task_head_of."
            )
        width = weight.shape[1]
        if width > WIDEST:
            triangle = width**2 / 2
            raise FedrotError(
                f"The task head '{task_head}' reads {width} inputs, at most {WIDEST} "
                f"are fitted: their sums take {4 * triangle / 1e9:.1f} GB for each "
                f"client that answers and {BYTES * triangle / 1e9:.0f} GB at the "
                "server. Read fewer layers, such as layers=[-2, -1] of a "
                "PooledClassifier."
            )
        problem_type = (
            usual_problem_type(len(weight))
            if is_adapter
            else problem_type_of(described)
        )
        return Clients(
            grid,
            task_head,
            problem_type,
            config,
            timeout,
            described,
            self.trusted,
            names=self.names,
            unsent=self.unsent,
        )

    def fit(
        self,
        clients: Clients,
        new: ArrayRecord,
        old: ArrayRecord | None = None,
        half: bool = True,
    ) -> FittedTaskHead:
        """Return the best of a round's models, all but the old one with fitted heads.

        If no head can be fitted or compared, it is the new one as it is.

        Args:
            new: the round's model.
            old: the model before the round, with its head; None for the new one, before
                all rounds.
            half: whether the model half way is a candidate; needs equal shapes.
        """
        after = self.body(new, clients.task_head, built=old is None)
        before = after if old is None else self.body(old, clients.task_head)
        bodies = {1.0: after}
        if half and old is not None:
            after.parents = (before,)
            mean = half_way(before.tensors, after.tensors)
            middle = self.body(as_sent(mean, new), clients.task_head)
            # Clients have rounded bodies, whose mean is not the rounded mean.
            middle.parents = (before,) if self.wire else (before, after)
            bodies[0.5] = middle
        exchange = Exchange(clients, before)
        try:
            result = exchange.best(bodies)
        except FedrotError as error:
            return FittedTaskHead(new, reason=str(error))
        self.kept_by = {body.key: body.kept_by for body in (before, *bodies.values())}
        return result

    def body(self, arrays: ArrayRecord, task_head: str, built: bool = False) -> Body:
        """Return a model as it is sent, with the clients that have kept its body.

        Args:
            built: whether clients may build it; not with another precision of the wire.
        """
        tensors = from_arrays(arrays)
        sent = arrays if self.wire is None else to_arrays(tensors, self.wire)
        key = hash_of(from_arrays(sent), task_head)
        kept_by = self.kept_by.setdefault(key, set())
        lacked_by = self.lacked_by.setdefault(key, set())
        return Body(
            arrays,
            tensors,
            task_head,
            sent,
            key,
            kept_by,
            lacked_by,
            built and not self.wire,
        )
