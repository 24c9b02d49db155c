"""``ClassSums``: sums over labelled rows from which a server fits a task head."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import InitVar, dataclass

import torch
from torch import Tensor, nn

from fedrot.collect.statistics import GRAM, kind_named
from fedrot.errors import UpdateError
from fedrot.task_head.covariance import ROUNDING, class_means
from fedrot.task_head.labelled_rows import labelled_rows
from fedrot.task_head.outputs import OUTPUT_KINDS, SINGLE, OutputKind, problem_type_of
from fedrot.tensors import Shape, TensorDict, Tensors, unusable

#: Accepted excess of features over their bounds: clients may compute in bfloat16.
_SLACK = 0.02

#: Below this share of a feature's mean square, its variance is that of rounding errors
#: in float32.
_CONSTANT = 1e-10


@dataclass(frozen=True, eq=False)
class ClassSums:
    """Sums over labelled rows of the inputs ``h`` of a task head.

    Sums of clients add up (``+``). With several labels ``y`` for a row, and in a
    regression, the first of ``counts`` and ``sums`` are the number of rows and the sum
    of ``h``; the others are, for each output, the sum of ``y`` and of ``y h``, then in
    a regression of ``y^2`` and of ``y^2 h``.

    Attributes:
        counts: rows of each class, float64 ``[classes]``; of several labels ``[1 +
            outputs]``; of a regression ``[1 + 2 outputs]``.
        sums: sum of ``h`` over the rows of each class, float64 ``[classes, inputs]``;
            else as many rows as ``counts``.
        gram: sum of ``h h^T`` over all rows, float64 ``[inputs, inputs]``.
        problem_type: one of ``fedrot.task_head.outputs.OUTPUT_KINDS``.
        trusted: whether these are sums of sums that were checked, which are not checked
            again.

    Raises:
        UpdateError: another dtype or shape, not finite, no rows, negative counts, a
            ``gram`` that is not symmetric, or sums that contradict each other.

    Example: ``total = sum(received[1:], received[0])``
    """

    counts: Tensor
    sums: Tensor
    gram: Tensor
    problem_type: str = SINGLE
    trusted: InitVar[bool] = False

    def __post_init__(self, trusted: bool) -> None:
        if not trusted:
            self._check()

    def _check(self) -> None:
        classes, size = self.sums.shape if self.sums.ndim == 2 else (0, 0)
        shapes = {"counts": (classes,), "sums": (classes, size), "gram": (size, size)}
        for name, shape in shapes.items():
            value: Tensor = getattr(self, name)
            if reason := unusable(value) or unlike(value, shape):
                raise UpdateError(
                    f"Of the sums of features by class, the '{name}' {reason}."
                )
        # The second moments inside the classes are a Gram matrix. Constant units leave
        # rounding errors.
        squares = self.gram.diagonal()
        slack = ROUNDING * (squares + ROUNDING * squares.sum()) / self.rows
        within = self.within() + torch.diag(slack)
        if reason := self.kind.check(self.counts, self.sums, squares, within):
            raise UpdateError(reason)
        if why := kind_named(GRAM).check(within, (classes, size)):
            raise UpdateError(
                f"The second moments of the features inside the classes {why}. The "
                "sums contradict each other; send what collect_classes returns."
            )

    def __add__(self, other: ClassSums) -> ClassSums:
        """Return the sums over the rows of both.

        Raises:
            UpdateError: the sums are of different layers.
        """
        ours = self.problem_type, list(self.sums.shape)
        others = other.problem_type, list(other.sums.shape)
        if ours != others:
            raise UpdateError(
                f"Sums of features are of {ours} and of {others}; collect them at the "
                "same layer of the same model."
            )
        return ClassSums(
            self.counts + other.counts,
            self.sums + other.sums,
            self.gram + other.gram,
            self.problem_type,
            trusted=True,
        )

    @property
    def kind(self) -> OutputKind:
        """The kind of the classifier's outputs."""
        return OUTPUT_KINDS[self.problem_type]

    @property
    def rows(self) -> float:
        """Number of rows."""
        return float(self.counts[self.kind.centres].sum())

    def packed(self) -> TensorDict:
        """Return what a client sends: ``counts``; ``sums`` in float32; and ``scatter``.

        The scatter is the upper triangle of ``rows * within()``, float32 ``[inputs
        (inputs + 1) / 2]``, and sums after the first of several labels and of a
        regression are of ``y (h - m)`` with the mean ``m`` of all rows, so that nothing
        of features with large means is lost.
        """
        others = self.kind.others
        sums = self.sums.clone()
        sums[others] -= torch.outer(self.counts[others], self.means()[0])
        scatter = self.rows * self.within()
        upper = scatter[*torch.triu_indices(*scatter.shape)]
        return {"counts": self.counts, "sums": sums.float(), "scatter": upper.float()}

    @classmethod
    def unpacked(
        cls,
        arrays: Tensors,
        shape: Shape,
        problem_type: str = SINGLE,
    ) -> ClassSums:
        """Return the sums that a client has ``packed``.

        Args:
            shape: of the task head's weight, ``(outputs, inputs)``.

        Raises:
            UpdateError: other names, dtypes or shapes, or the errors of ``ClassSums``.
        """
        kind = OUTPUT_KINDS[problem_type]
        outputs, inputs = shape
        rows = outputs if kind.by_class else 1 + kind.moments * outputs
        expected = {
            "counts": ("torch.float64", (rows,)),
            "sums": ("torch.float32", (rows, inputs)),
            "scatter": ("torch.float32", (inputs * (inputs + 1) // 2,)),
        }
        claims = {
            name: (str(array.dtype), tuple(array.shape))
            for name, array in arrays.items()
        }
        if claims != expected:
            raise UpdateError(
                f"The sums of features are {claims}, not {expected}. Send packed sums."
            )
        counts = arrays["counts"]
        sums = arrays["sums"].double()
        means = class_means(counts[kind.centres], sums[kind.centres])
        between = means.mT @ sums[kind.centres]
        sums[kind.others] += torch.outer(counts[kind.others], means[0])
        gram = between + from_triangle(arrays["scatter"].double(), inputs)
        return cls(counts, sums, gram, problem_type)

    @property
    def absent(self) -> Tensor:
        """Outputs of which the rows tell nothing, bool ``[outputs]``."""
        return self.kind.absent(self.counts)

    def check_within(self, largest: Tensor) -> None:
        """Raise ``UpdateError`` if features are above ``bounds.largest_inputs``."""
        most = largest * (1 + _SLACK)
        large_mean = (self.means().abs() > most).any()
        large_square = (self.gram.diagonal() > self.rows * most**2).any()
        if bool(large_mean | large_square):
            raise UpdateError(
                "The sums of features are larger than the model's features can be. "
                "Send what collect_classes returns."
            )

    def means(self) -> Tensor:
        """Return the means that covariances leave out, ``[classes, inputs]``.

        Those of classes, 0 without rows; of other kinds the mean of all rows.
        """
        return class_means(self.counts[self.kind.centres], self.sums[self.kind.centres])

    def deviations(self) -> Tensor:
        """Return the features' deviations inside the classes, float64 ``[inputs]``.

        They have a floor, so that classes whose rows are equal are no error: ``n`` rows
        do not tell a variance below ``1 / n`` of that of all rows, and float32 tells
        none below ``1e-10`` of the mean square. A feature that is always 0 has 1.

        Raises:
            UpdateError: no feature varies.
        """
        squares = self.gram.diagonal() / self.rows
        mean = self.sums[self.kind.centres].sum(0) / self.rows
        of_all = squares - mean.square()
        if not (of_all > ROUNDING * squares).any():
            raise UpdateError(
                "The features do not vary, or so little beside their means that sums "
                "do not show it. Collect from other rows, or subtract a constant from "
                "the features."
            )
        floor = torch.maximum(of_all / self.rows, _CONSTANT * squares)
        variances = torch.maximum(self.within().diagonal(), floor)
        return torch.where(variances > 0, variances, 1.0).sqrt()

    def within(self) -> Tensor:
        """Return the covariance inside the classes, or of all rows.

        float64 ``[inputs, inputs]``.
        """
        between = self.means().mT @ self.sums[self.kind.centres]
        return (self.gram - between) / self.rows


def unlike(value: Tensor, shape: Shape) -> str:
    """Return why a tensor is not finite float64 of a shape; empty if it is."""
    if value.dtype != torch.float64 or tuple(value.shape) != shape:
        actual = f"{value.dtype} of shape {list(value.shape)}"
        return f"are {actual}, not float64 {list(shape)}"
    if not torch.isfinite(value).all():
        return (
            "hold NaN or Inf. Check the client's training (learning rate, mixed "
            "precision)"
        )
    return ""


def from_triangle(triangle: Tensor, size: int) -> Tensor:
    """Return the symmetric matrix ``[size, size]`` with an upper triangle.

    Args:
        triangle: ``[size (size + 1) / 2]``.
    """
    upper = torch.zeros(size, size, dtype=triangle.dtype)
    upper[*torch.triu_indices(size, size)] = triangle
    return upper + upper.triu(1).mT


def collect_classes(
    model: nn.Module,
    batches: Iterable[Tensors],
    task_head: str,
    problem_type: str | None = None,
) -> ClassSums:
    """Return the sums over a client's rows from which the server fits the task head.

    The features are the inputs of the task head at the positions of the logits: the
    last token of each row for decoders, every labelled token for token classifiers. The
    client sends sums alone. They tell which rows it has: see
    ``docs/explanation/privacy.md``. Sums are float64, on the CPU; features are
    multiplied in float64.

    Args:
        model: a ``transformers`` classifier, usually the merged one, so that all
            clients compute the same features; it is run in evaluation mode, without
            gradients, and is not changed.
        batches: keyword arguments of the model's forward, with ``labels`` ``[rows]`` or
            ``[rows, tokens]``; rows with a negative label are left out. For several
            labels and regressions, labels are floating-point ``[rows, outputs]``; rows
            of NaN are left out.
        task_head: the name of the model's last linear layer, from ``task_head_of``.
        problem_type: one of transformers' problem types; None for that of
            ``model.config``.

    Example: ``sums = collect_classes(model, loader, "classifier")``

    Raises:
        FedrotError: there is no such layer, its outputs are not the model's logits, or
            the batches have no labels for it.
        UpdateError: the features are not finite.
    """
    name = problem_type_of(getattr(model, "config", {}), problem_type)
    kind = OUTPUT_KINDS[name]
    counts = sums = gram = torch.zeros(())
    for features, labels, outputs in labelled_rows(model, batches, name, task_head):
        targets = kind.targets(labels, outputs).to(features)
        counts = counts + targets.sum(0).cpu()
        sums = sums + (targets.mT @ features).cpu()
        gram = gram + (features.mT @ features).cpu()
    return ClassSums(counts, sums, gram, name)
