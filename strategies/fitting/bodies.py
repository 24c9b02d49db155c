"""``Body``: a model as the server knows it, and the clients that have kept it.

A request names the bodies that it is about. A client that has answered about a body
keeps it, and receives later requests without it. A client that has lost it says so,
and receives it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flwr.app import ArrayRecord
from torch import Tensor

from fedrot.strategies.wire.arrays import to_arrays
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
        between: the two bodies whose ``half_way`` this is, if they may have the same
            bits.
        kept_by: the nodes that have answered about the body.
    """

    arrays: ArrayRecord
    tensors: Tensors
    task_head: str
    sent: ArrayRecord
    key: str
    between: tuple[Body, ...] = ()
    kept_by: set[int] = field(default_factory=set)

    def has(self, node: int) -> bool:
        """Return whether the server knows that a node has the body, or its halves."""
        if node in self.kept_by:
            return True
        return bool(self.between) and all(node in b.kept_by for b in self.between)

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
