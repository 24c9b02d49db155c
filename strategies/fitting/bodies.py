"""``Body``: a model as the server knows it, and the clients that have kept it.

A request names the bodies that it is about. A client that has answered about a body
keeps it, and receives later requests without it. For the body after a round it receives
only what changed. A first body is not sent at first, since clients may build the same
model. Clients that do not, or that have lost a body, say so, and receive it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from flwr.app import ArrayRecord
from torch import Tensor

from fedrot.changes import packed_change
from fedrot.strategies.wire.arrays import from_arrays, to_arrays
from fedrot.strategies.wire.fitting_messages import CHANGE, MODEL
from fedrot.task_head.choice import Candidate
from fedrot.task_head.fit import with_task_head
from fedrot.task_head.names import task_head_names
from fedrot.tensors import Tensors


@dataclass(eq=False)
class Body:
    """A model as the server knows it, and as it is sent to clients.

    Attributes:
        arrays: of the whole model.
        tensors: the same.
        task_head: the name of its head.
        sent: the model in the precision of the wire.
        key: ``hash_of`` what is sent.
        kept_by: the nodes that have answered about the body.
        lacked_by: the nodes that have said that they lack the body.
        built: whether clients may build a model with this body.
        parents: bodies from which this one is computed. First the body before the
            round, which has the same shapes. The half-way body also has the body after
            the round, if clients get its bits as the mean of the two.
    """

    arrays: ArrayRecord
    tensors: Tensors
    task_head: str
    sent: ArrayRecord
    key: str
    kept_by: set[int]
    lacked_by: set[int]
    built: bool
    parents: tuple[Body, ...] = ()

    def has(self, node: int) -> bool:
        """Return whether a node is known to have the body, or to compute it.

        The new body is asked about before the half-way one, or in the same request.
        """
        computes = len(self.parents) > 1 and self.parents[0].has(node)
        return computes or node in self.kept_by

    def lost_by(self, nodes: Iterable[int]) -> None:
        """Note that nodes lack the body, or what it is computed from."""
        for lost in (self, *self.parents):
            lost.lacked_by.update(nodes)
            lost.kept_by.difference_update(nodes)

    def to_send(self, node: int, place: int) -> dict[str, ArrayRecord]:
        """Return the records that bring the body to a node: nothing, what changed, or
        the whole model.

        Args:
            place: among the bodies of the request.
        """
        may_build = self.built and node not in self.lacked_by
        if self.has(node) or may_build:
            return {}
        if self.parents and self.parents[0].has(node):
            return {f"{CHANGE}-{place}": self.change}
        return {f"{MODEL}-{place}": self.sent}

    @cached_property
    def change(self) -> ArrayRecord:
        """What changed since the body before the round, without the task head."""
        old, new = (from_arrays(body.sent) for body in (self.parents[0], self))
        # A client may have kept the old body with other values in the head.
        for name in new.keys() & task_head_names(self.task_head):
            old[name] = new[name]
        return to_arrays(packed_change(old, new))

    @property
    def has_bias(self) -> bool:
        """Whether the task head has a bias."""
        return task_head_names(self.task_head)[1] in self.tensors

    def unfitted(self, share: float) -> Candidate[Body]:
        """Return the body with its own head; see ``Candidate`` for the share."""
        name, bias = task_head_names(self.task_head)
        weight = self.tensors[name]
        # A layer without a bias is one with a bias of 0.
        zero = weight.new_zeros(len(weight))
        return Candidate(self, weight, self.tensors.get(bias, zero), share)

    def with_task_head(self, weight: Tensor, bias: Tensor) -> ArrayRecord:
        """Return the arrays of the model with another head."""
        names = task_head_names(self.task_head)
        layer = {name: self.tensors[name] for name in names if name in self.tensors}
        head = with_task_head(layer, self.task_head, weight, bias)
        return ArrayRecord({**self.arrays, **to_arrays(head)})
