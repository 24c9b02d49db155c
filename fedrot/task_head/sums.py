"""``ClassSums``: sums over labelled rows from which a server fits a task head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedrot.collect.statistics import GRAM, kind_named
from fedrot.errors import UpdateError
from fedrot.task_head.covariance import ROUNDING
from fedrot.task_head.outputs import OUTPUT_KINDS, SINGLE, OutputKind, problem_type_of
from fedrot.task_head.rows import labelled_rows
from fedrot.tensors import Tensors, unusable

#: Accepted excess of features over their bounds: clients may compute in bfloat16.
_SLACK = 0.02


@dataclass(frozen=True, eq=False)
class ClassSums:
    """Sums over labelled rows of the inputs ``h`` of a task head; sums of clients add
    up (``+``).

    With several labels ``y`` for a row, and in a regression, the first of ``counts``
    and ``sums`` are the number of rows and the sum of ``h``; the others are, for each
    output, the sum of ``y`` and of ``y h``.

    Attributes:
        counts: rows of each class, float64 ``[classes]``; else ``[1 + outputs]``.
        sums: sum of ``h`` over the rows of each class, float64 ``[classes, inputs]``;
            else ``[1 + outputs, inputs]``.
        gram: sum of ``h h^T`` over all rows, float64 ``[inputs, inputs]``.
        problem_type: the problem_type, see ``fedrot.task_head.outputs``.

    Raises:
        UpdateError: another dtype or shape, not finite, no rows, negative counts, a
            ``gram`` that is not symmetric, or sums that contradict each other.

    Example: ``total = sum(received[1:], received[0])``
    """

    counts: Tensor
    sums: Tensor
    gram: Tensor
    problem_type: str = SINGLE

    def __post_init__(self) -> None:
        classes, size = self.sums.shape if self.sums.ndim == 2 else (0, 0)
        shapes = {"counts": (classes,), "sums": (classes, size), "gram": (size, size)}
        for name, shape in shapes.items():
            value: Tensor = getattr(self, name)
            why = unusable(value)
            if not why and (
                value.dtype != torch.float64 or tuple(value.shape) != shape
            ):
                why = (
                    f"are {value.dtype} of shape {list(value.shape)}, not float64 "
                    f"{list(shape)}"
                )
            if not why and not bool(torch.isfinite(value).all()):
                why = (
                    "hold NaN or Inf. Check the client's training (learning rate, "
                    "mixed precision)"
                )
            if why:
                raise UpdateError(
                    f"Of the sums of features by class, the '{name}' {why}."
                )
        # The second moments inside the classes are a Gram matrix. Constant units leave
        # rounding errors.
        squares = self.gram.diagonal()
        within = self.within() + torch.diag(
            ROUNDING * (squares + ROUNDING * squares.sum()) / self.rows
        )
        if why := self._kind.check(self.counts, self.sums, squares, within):
            raise UpdateError(why)
        if problem_type := kind_named(GRAM).check(within, (classes, size)):
            raise UpdateError(
                "The second moments of the features inside the classes "
                f"{problem_type}. The sums contradict each other; send what "
                "collect_classes returns."
            )

    def __add__(self, other: ClassSums) -> ClassSums:
        """Return the sums over the rows of both; raises ``UpdateError`` if they are of
        other layers.
        """
        ours, theirs = (
            (one.problem_type, list(one.sums.shape)) for one in (self, other)
        )
        if ours != theirs:
            raise UpdateError(
                f"Sums of features are of {ours} and of {theirs}; collect them at the "
                "same layer of the same model."
            )
        counts, sums = self.counts + other.counts, self.sums + other.sums
        return ClassSums(counts, sums, self.gram + other.gram, self.problem_type)

    @property
    def _kind(self) -> OutputKind:
        return OUTPUT_KINDS[self.problem_type]

    @property
    def rows(self) -> float:
        """Number of rows."""
        return float(self.counts[self._kind.centres].sum())

    def packed(self) -> dict[str, Tensor]:
        """Return what a client sends: ``counts``; ``sums`` in float32; and ``scatter``.

        The scatter is the upper triangle of ``rows * within()``, float32 ``[inputs
        (inputs + 1) / 2]``, and sums after the first of several labels and of a
        regression are of ``y (h - m)`` with the mean ``m`` of all rows, so that nothing
        of features with large means is lost.
        """
        sums, others = self.sums.clone(), self._kind.others
        sums[others] -= torch.outer(self.counts[others], self.means()[0])
        scatter = (self.rows * self.within())[*torch.triu_indices(*self.gram.shape)]
        return {"counts": self.counts, "sums": sums.float(), "scatter": scatter.float()}

    @classmethod
    def unpacked(
        cls,
        arrays: Mapping[str, Tensor],
        shape: tuple[int, int],
        problem_type: str = SINGLE,
    ) -> ClassSums:
        """Return the sums that a client has ``packed``; ``shape`` is that of the task
        head's weight.

        Raises:
            UpdateError: other names, dtypes or shapes, or the errors of ``ClassSums``.
        """
        rows, inputs, kind = (
            shape[0] + (problem_type != SINGLE),
            shape[1],
            OUTPUT_KINDS[problem_type],
        )
        shapes = {
            "counts": (rows,),
            "sums": (rows, inputs),
            "scatter": (inputs * (inputs + 1) // 2,),
        }
        given = {
            name: (str(array.dtype), tuple(array.shape))
            for name, array in arrays.items()
        }
        dtypes = ("torch.float64", "torch.float32", "torch.float32")
        expected = {
            name: (dtype, shapes[name])
            for name, dtype in zip(shapes, dtypes, strict=True)
        }
        if given != expected:
            raise UpdateError(
                f"The sums of features are {given}, not {expected}. Send packed sums."
            )
        counts, sums = arrays["counts"], arrays["sums"].double()
        means = _means(counts[kind.centres], sums[kind.centres])
        gram = means.mT @ (means * counts[kind.centres].unsqueeze(1))
        upper = torch.zeros_like(gram)
        upper[*torch.triu_indices(inputs, inputs)] = arrays["scatter"].double()
        sums[kind.others] += torch.outer(counts[kind.others], means[0])
        return cls(counts, sums, gram + upper + upper.triu(1).mT, problem_type)

    @property
    def absent(self) -> Tensor:
        """Outputs of which the rows tell nothing, bool ``[outputs]``: classes or labels
        without rows.
        """
        return self._kind.absent(self.counts)

    def check_within(self, largest: Tensor) -> None:
        """Raise ``UpdateError`` if features are larger than
        ``feature_bounds.largest_inputs``.
        """
        most = largest * (1 + _SLACK)
        if bool((self.means().abs() > most).any()) or bool(
            (self.gram.diagonal() > self.rows * most**2).any()
        ):
            raise UpdateError(
                "The sums of features are larger than the model's features can be. "
                "Send what collect_classes returns."
            )

    def means(self) -> Tensor:
        """Return the classes' means ``[classes, inputs]``, 0 without rows; else that of
        all rows.
        """
        return _means(self.counts[self._kind.centres], self.sums[self._kind.centres])

    def within(self) -> Tensor:
        """Return the covariance inside the classes, or of all rows, float64 ``[inputs,
        inputs]``.
        """
        means, counts = self.means(), self.counts[self._kind.centres]
        return (self.gram - means.mT @ (means * counts.unsqueeze(1))) / self.rows


def _means(counts: Tensor, sums: Tensor) -> Tensor:
    return sums / torch.where(counts > 0, counts, 1.0).unsqueeze(1)


def collect_classes(
    model: nn.Module,
    batches: Iterable[Tensors],
    task_head: str,
    problem_type: str | None = None,
) -> ClassSums:
    """Return the sums over a client's rows from which the server fits the task head.

    The features are the inputs of the task head at the positions of the logits: the
    last token of each row for decoders, every labelled token for token classifiers. The
    client sends only sums, so that secure aggregation works. Sums are float64, on the
    CPU; features are multiplied in float64.

    Args:
        model: a ``transformers`` classifier, usually the merged one, so that all
            clients compute the same features; it is run in evaluation mode, without
            gradients, and is not changed.
        batches: keyword arguments of the model's forward, with ``labels`` ``[rows]`` or
            ``[rows, tokens]``; rows with a negative label are left out. For several
            labels and regressions, labels are floating-point ``[rows, outputs]``; rows
            of NaN are left out.
        task_head: the name of the model's last linear layer, from ``task_head_of``.
        problem_type: a problem_type; None for that of ``model.config``.

    Example: ``sums = collect_classes(model, loader, task_head_of(model.config,
    model.state_dict()))``

    Raises:
        FedrotError: there is no such layer, its outputs are not the model's logits, or
            the batches have no labels for it.
        UpdateError: the features are not finite.
    """
    name = problem_type_of(getattr(model, "config", {}), problem_type)
    total: tuple[Tensor, ...] = (torch.zeros(()),) * 3
    for features, labels, outputs in labelled_rows(model, batches, name, task_head):
        targets = OUTPUT_KINDS[name].targets(labels, outputs).to(features)
        terms = (targets.sum(0), targets.mT @ features, features.mT @ features)
        total = tuple(
            sums + term.cpu() for sums, term in zip(total, terms, strict=True)
        )
    counts, sums, gram = total
    return ClassSums(counts, sums, gram, name)
