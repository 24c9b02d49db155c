"""What depends on a classifier's kind of outputs: labels, sums, task head, loss.

``OUTPUT_KINDS`` has the kinds by their names in transformers, the ``problem_type``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedrot.errors import FedrotError, UpdateError
from fedrot.symmetry.resolve import settings_of
from fedrot.task_head.covariance import (
    ROUNDING,
    ROUNDING32,
    ShrunkCovariance,
    check_regular,
)

SINGLE, SEVERAL, REGRESSION = (
    "single_label_classification",
    "multi_label_classification",
    "regression",
)


Pair = tuple[Tensor, Tensor]


class OutputKind:
    """A regression; the other problems override what differs.

    ``counts`` ``[k]`` and ``sums`` ``[k, inputs]`` are those of
    ``fedrot.task_head.ClassSums``. ``centres`` are the sums whose means are subtracted
    from the features in covariances, ``others`` the other sums.
    """

    centres, others, values = slice(1), slice(1, None), "finite"

    def has_label(self, labels: Tensor) -> Tensor:
        """Return which rows have a label, bool ``[rows]``, or ``[rows, tokens]``."""
        return ~labels.isnan().any(-1) if labels.ndim > 1 else ~labels.isnan()

    def check_labels(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the labels in the shape that ``targets`` and ``loss`` take."""
        single = logits.shape[-1] == 1 and labels.shape == logits.shape[:-1]
        given = labels.unsqueeze(-1) if single else labels
        right = self._allowed(given) | given.isnan().all(-1, keepdim=True)
        if not (
            labels.is_floating_point()
            and given.shape == logits.shape
            and bool(right.all())
        ):
            raise FedrotError(
                f"The labels are {labels.dtype} {list(labels.shape)}, the logits "
                f"{list(logits.shape)}. Give floating-point labels of the logits' "
                f"shape, each {self.values}, or NaN for all labels of a row; for one "
                f"class a row, set the config's problem_type to '{SINGLE}'."
            )
        return given.double()

    def _allowed(self, values: Tensor) -> Tensor:
        return values.isfinite()

    def absent(self, counts: Tensor) -> Tensor:
        """Return the outputs of which rows with such counts tell nothing, bool
        ``[outputs]``.
        """
        return torch.zeros(len(counts) - 1, dtype=torch.bool)

    def targets(self, labels: Tensor, outputs: int) -> Tensor:
        """Return the factors of the features in the sums, ``[rows, k]``."""
        return nn.functional.pad(labels, (1, 0), value=1.0)

    def check(
        self, counts: Tensor, sums: Tensor, squares: Tensor, covariance: Tensor
    ) -> str:
        """Return what is wrong with sums, or an empty text; ``squares`` of features are
        summed.
        """
        return "" if float(counts[0]) > 0 else "The number of rows is not positive."

    def fit(
        self,
        counts: Tensor,
        sums: Tensor,
        inverse: ShrunkCovariance,
        priors: Tensor | None,
    ) -> Pair:
        """Return weight ``[outputs, inputs]`` and bias ``[outputs]``; see
        ``fedrot.task_head.fitted_task_heads``.
        """
        covariances = self._centred(counts, sums) / counts[0]
        weight = (1 - inverse.shrinkage) * inverse.solve(covariances)
        return weight, counts[1:] / counts[0] - weight @ (sums[0] / counts[0])

    def _centred(self, counts: Tensor, sums: Tensor) -> Tensor:
        """Return the sums of ``y (h - m)``, with the mean ``m`` of all rows,
        ``[outputs, inputs]``.
        """
        return sums[1:] - torch.outer(counts[1:], sums[0] / counts[0])

    def loss(self, logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
        """Return the loss of every row ``[heads, rows]`` of logits ``[heads, rows,
        outputs]``.
        """
        return (logits - labels).square().sum(-1)

    def right(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return which rows are predicted as they are labelled, bool ``[heads,
        rows]``.
        """
        return torch.zeros(logits.shape[:2], dtype=torch.bool, device=logits.device)


class SeveralLabels(OutputKind):
    values = "0 or 1"

    def absent(self, counts: Tensor) -> Tensor:
        return (counts[1:] == 0) | (counts[1:] == counts[0])

    def _allowed(self, values: Tensor) -> Tensor:
        return (values == 0) | (values == 1)

    def check(
        self, counts: Tensor, sums: Tensor, squares: Tensor, covariance: Tensor
    ) -> str:
        if why := super().check(counts, sums, squares, covariance):
            return why
        # The covariance S inside the classes is positive: with k of n rows and c = k
        # (mean of the k rows minus that of all rows), c^T S^-1 c <= k (n - k), where S
        # is that of all rows.
        slack = ROUNDING32 * covariance.diagonal() + torch.finfo(covariance.dtype).tiny
        factor, _ = torch.linalg.cholesky_ex(covariance + torch.diag(slack))
        centred, limit = (
            self._centred(counts, sums),
            counts[1:] * (counts[0] - counts[1:]),
        )
        length = (
            torch.linalg.solve_triangular(factor, centred.mT, upper=False)
            .square()
            .sum(0)
        )
        right = bool(
            (length <= (1 + ROUNDING32) * limit + ROUNDING * counts[0] ** 2).all()
        )
        return (
            ""
            if right
            else "The counts and sums of labels contradict the moments of all rows."
        )

    def fit(
        self,
        counts: Tensor,
        sums: Tensor,
        inverse: ShrunkCovariance,
        priors: Tensor | None,
    ) -> Pair:
        n, own, centred = counts[0], counts[1:], self._centred(counts, sums)
        varies = (own > 0) & (own < n)
        k, rest = (torch.where(varies, rows, n / 2) for rows in (own, n - own))
        one, other = (
            torch.where(varies, 1 / x, 0.0).unsqueeze(1) * centred for x in (k, -rest)
        )
        # The covariance of all rows is that inside the two classes and this times
        # ``(one - other)^2``.
        between = k * rest / n**2
        spread = inverse.values.mean() - between * (one - other).square().mean(1)
        solved = inverse.solve(one - other, spread)
        left = 1 - (1 - inverse.shrinkage) * between * ((one - other) * solved).sum(1)
        check_regular(left)
        weight, rows = solved / left.unsqueeze(1), counts if priors is None else priors
        half = torch.where(varies, 0.0, 0.5)
        odds = (rows[1:] + half) / (rows[0] - rows[1:] + half)
        return weight, odds.log() - (weight * (sums[0] / n + (one + other) / 2)).sum(1)

    def loss(self, logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
        each = nn.functional.binary_cross_entropy_with_logits
        return each(
            logits / temperature, labels.expand_as(logits), reduction="none"
        ).sum(-1)

    def right(self, logits: Tensor, labels: Tensor) -> Tensor:
        return ((logits > 0) == (labels > 0)).all(-1)


class OneClass(OutputKind):
    centres, others = slice(None), slice(0)

    def absent(self, counts: Tensor) -> Tensor:
        return counts == 0

    def has_label(self, labels: Tensor) -> Tensor:
        return labels >= 0

    def check_labels(self, labels: Tensor, logits: Tensor) -> Tensor:
        *places, classes = logits.shape
        if labels.is_floating_point() or list(labels.shape) != places:
            raise FedrotError(
                f"The labels are {labels.dtype} {list(labels.shape)}, the logits "
                f"{list(logits.shape)}. Give integer labels of shape {places}, one "
                "class each; or, for other labels, set the problem_type in the model's "
                f"config to '{SEVERAL}' or '{REGRESSION}'."
            )
        if bool((labels >= classes).any()):
            raise FedrotError(
                f"A label is {int(labels.max())}, but the model has {classes} classes, "
                f"0 to {classes - 1}. Build the model with the num_labels of the data."
            )
        return labels.long()

    def targets(self, labels: Tensor, outputs: int) -> Tensor:
        return nn.functional.one_hot(labels, outputs)

    def check(
        self, counts: Tensor, sums: Tensor, squares: Tensor, covariance: Tensor
    ) -> str:
        if bool((counts < 0).any()) or not float(counts.sum()) > 0:
            return "The counts of rows by class are negative, or all 0."
        limit = ROUNDING * counts.sum() * squares.abs()
        wrong = bool((sums[counts == 0].square() > limit).any())
        return (
            "A class without rows has a sum of features that is not 0." if wrong else ""
        )

    def fit(
        self,
        counts: Tensor,
        sums: Tensor,
        inverse: ShrunkCovariance,
        priors: Tensor | None,
    ) -> Pair:
        n, present = counts.sum(), counts > 0
        if int(present.sum()) < 2:
            raise UpdateError("A task head needs rows of at least two classes.")
        shares, mean = counts / n, sums.sum(0) / n
        means = sums / torch.where(present, counts, 1.0).unsqueeze(1)
        weight = inverse.solve(means - mean)
        expected = shares if priors is None else priors / priors[present].sum()
        biases = (
            -(weight * (means + mean)).sum(1) / 2
            + torch.where(present, expected, 1.0).log()
        )
        # Classes without rows have a share of 0: ``shares @ biases`` is the mean over
        # the others.
        biases = torch.where(present, biases, shares @ biases - (2 * n).log())
        return torch.where(present.unsqueeze(1), weight, 0.0), biases

    def loss(self, logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
        flat, repeated = logits.flatten(0, 1) / temperature, labels.repeat(len(logits))
        return nn.functional.cross_entropy(flat, repeated, reduction="none").view(
            logits.shape[:2]
        )

    def right(self, logits: Tensor, labels: Tensor) -> Tensor:
        return logits.argmax(-1) == labels


OUTPUT_KINDS = {SINGLE: OneClass(), SEVERAL: SeveralLabels(), REGRESSION: OutputKind()}


def outputs_of(config: object) -> int:
    """Return the number of a classifier's outputs, from its configuration."""
    settings = settings_of(config)
    # transformers does not write the labels of two classes into config.json.
    return int(settings.get("num_labels") or len(settings.get("id2label") or (0, 1)))


def problem_type_of(config: object, problem_type: str | None = None) -> str:
    """Return a ``problem_type``: the given one, or that of a transformers
    configuration.

    Without either it is a regression for one output, else one class a row. Example:
    ``problem_type_of(model.config)``.

    Raises:
        FedrotError: the ``problem_type`` is unknown, or ``config`` is not a
            configuration.
    """
    name = problem_type or settings_of(config).get("problem_type")
    name = name or (REGRESSION if outputs_of(config) == 1 else SINGLE)
    if name not in OUTPUT_KINDS:
        raise FedrotError(
            f"The problem_type '{name}' is unknown; use one of "
            f"{', '.join(OUTPUT_KINDS)}."
        )
    return str(name)
