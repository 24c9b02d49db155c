"""What depends on a classifier's kind of outputs: labels, sums over rows, task head,
loss of a row.

``PROBLEMS`` has the kinds by their names in transformers, the ``problem_type``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedrot.errors import FedrotError, UpdateError
from fedrot.symmetry.resolve import settings_of

SINGLE, SEVERAL, REGRESSION = (
    "single_label_classification",
    "multi_label_classification",
    "regression",
)

#: Accepted rounding error of float64 sums, relative to their size; and of covariances
#: in float32.
ROUNDING, ROUNDING32 = 1e-12, 1e-3

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Inverse:
    """The inverse of a covariance of features, ``S_a = (1 - a) S + a s I`` with the
    shrinkage ``a``.

    ``values`` ``[inputs]`` and ``vectors`` ``[inputs, inputs]`` are those of ``S``;
    ``size`` is the mean square norm of the features.
    """

    values: Tensor
    vectors: Tensor
    size: Tensor
    shrinkage: float

    def solve(self, rows: Tensor, spread: Tensor | None = None) -> Tensor:
        """Return ``rows S_a^-1`` ``[rows, inputs]``; raise ``UpdateError`` if features
        vary too little.

        ``spread`` is ``s``, ``[]`` or one for each row ``[rows]``; None for ``tr(S) /
        inputs``.
        """
        spread = self.values.mean() if spread is None else spread
        if not bool((spread * len(self.values) > ROUNDING * self.size).all()):
            raise UpdateError(
                "The features do not vary inside the classes, or so little beside "
                "their means that sums do not show it. Collect from more rows, or "
                "subtract a constant from the features."
            )
        shrunk = (1 - self.shrinkage) * self.values + self.shrinkage * spread.unsqueeze(
            -1
        )
        check_regular(shrunk.amin(-1) / spread)
        return (rows @ self.vectors / shrunk) @ self.vectors.mT

    def of_one(self, means: Tensor, shares: Tensor) -> Tensor:
        """Return the ridge regression of 1 on the features, ``[inputs]``, by Woodbury's
        identity.

        The covariance of all rows is ``S`` plus that of the classes' means.
        """
        mean = shares @ means
        between = shares.sqrt().unsqueeze(1) * (means - mean)
        spread = self.values.mean() + between.square().sum() / len(mean)
        rows = torch.cat([(1 - self.shrinkage) ** 0.5 * between, mean.unsqueeze(0)])
        solved = self.solve(rows, spread)
        return torch.linalg.solve(
            torch.eye(len(rows)).to(rows) + rows @ solved.mT, solved
        )[-1]


def check_regular(left: Tensor) -> None:
    """Raise ``UpdateError`` if the smallest shares of covariances are rounding
    errors.
    """
    if not bool((left > ROUNDING).all()):
        raise UpdateError(
            "The covariance of the features is singular: raise the shrinkage, or "
            "collect from more rows."
        )


class Problem:
    """A regression; the other problems override what differs.

    ``counts`` ``[k]`` and ``sums`` ``[k, inputs]`` are those of
    ``fedrot.head.ClassSums``. ``centres`` are the sums whose means are subtracted from
    the features in covariances, ``others`` the other sums.
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
        self, counts: Tensor, sums: Tensor, inverse: Inverse, priors: Tensor | None
    ) -> Pair:
        """Return weight ``[outputs, inputs]`` and bias ``[outputs]``; see
        ``fedrot.head.fit_heads``.
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


class _SeveralLabels(Problem):
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
        self, counts: Tensor, sums: Tensor, inverse: Inverse, priors: Tensor | None
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


class _OneClass(Problem):
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
        self, counts: Tensor, sums: Tensor, inverse: Inverse, priors: Tensor | None
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


PROBLEMS = {SINGLE: _OneClass(), SEVERAL: _SeveralLabels(), REGRESSION: Problem()}


def outputs_of(config: object) -> int:
    """Return the number of a classifier's outputs, from its configuration."""
    settings = settings_of(config)
    # transformers does not write the labels of two classes into config.json.
    return int(settings.get("num_labels") or len(settings.get("id2label") or (0, 1)))


def problem_of(config: object, problem: str | None = None) -> str:
    """Return a ``problem_type``: the given one, or that of a transformers
    configuration.

    Without either it is a regression for one output, else one class a row. Example:
    ``problem_of(model.config)``.

    Raises:
        FedrotError: the ``problem_type`` is unknown, or ``config`` is not a
            configuration.
    """
    name = problem or settings_of(config).get("problem_type")
    name = name or (REGRESSION if outputs_of(config) == 1 else SINGLE)
    if name not in PROBLEMS:
        raise FedrotError(
            f"The problem_type '{name}' is unknown; use one of {', '.join(PROBLEMS)}."
        )
    return str(name)
