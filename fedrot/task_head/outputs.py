"""The kinds of a classifier's outputs: their labels, sums, task head and loss.

``OUTPUT_KINDS`` has the kinds by their names in transformers, the ``problem_type``. A
new kind is a subclass of ``OutputKind`` and an entry there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedrot.errors import FedrotError, UpdateError
from fedrot.symmetry.resolve import settings_of
from fedrot.task_head.covariance import (
    ROUNDING,
    ROUNDING32,
    ShrunkCovariance,
    check_regular,
    class_means,
)

SINGLE = "single_label_classification"
SEVERAL = "multi_label_classification"
REGRESSION = "regression"

#: Weight ``[outputs, inputs]`` and bias ``[outputs]`` of a task head.
Layer = tuple[Tensor, Tensor]

#: Labels of rows, by batch.
Labels = Sequence[Tensor]


class OutputKind(ABC):
    """One kind of a classifier's outputs.

    ``counts`` ``[k]`` and ``sums`` ``[k, inputs]`` are those of ``ClassSums``.

    Attributes:
        centres: the sums whose means are subtracted from the features in covariances.
        others: the other sums.
        fewest_outputs: of a classifier of this kind.
        by_class: whether every row belongs to exactly one of the ``counts``.
        moments: of the labels, among the ``counts`` of other kinds.
        has_temperature: whether logits may be divided by a number.
        has_classes: whether outputs are predicted or not, and have shares of rows.
        largest_loss: the largest loss of a row that counts, also for logits that are
            not finite.
    """

    centres: slice
    others: slice
    fewest_outputs = 1
    by_class = False
    moments = 1
    has_temperature = True
    has_classes = True
    largest_loss = 1e6

    @abstractmethod
    def has_label(self, labels: Tensor) -> Tensor:
        """Return which rows have a label, bool ``[rows]``, or ``[rows, tokens]``."""

    def common(self, labels: Labels, minimum: int, training: Labels = ()) -> Tensor:
        """Return the classes that at least ``minimum`` rows have.

        Args:
            labels: of all rows of a site, by batch; of tokens a text is one row.
            minimum: number of rows.
            training: labels whose numbers count for the classes that they have.

        Returns:
            bool ``[2, classes]``: classes that so many rows have, and of several labels
            those that so many rows lack. A regression has no classes.
        """
        return torch.zeros(2, 0, dtype=torch.bool)

    def with_common(self, labels: Tensor, common: Tensor) -> Tensor:
        """Return labels in which rows of classes that are not ``common`` have none."""
        return labels

    @abstractmethod
    def check_labels(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the labels in the shape that ``targets`` and ``loss`` take."""

    @abstractmethod
    def absent(self, counts: Tensor) -> Tensor:
        """Return the outputs of which rows tell nothing, bool ``[outputs]``."""

    @abstractmethod
    def targets(self, labels: Tensor, outputs: int) -> Tensor:
        """Return the factors of the features in the sums, ``[rows, k]``."""

    def sizes(self, counts: Tensor) -> Tensor:
        """Return those of the ``counts`` that are numbers of rows."""
        return counts

    def units(self, counts: Tensor) -> Tensor:
        """Return the units of the labels in ``loss``, ``[outputs]`` or ``[1]``."""
        return torch.ones(1)

    @abstractmethod
    def priors(self, counts: Tensor) -> Tensor:
        """Return the shares in the bias of a head that is fitted, ``[outputs]``.

        Half a row stands for a class that no row has. A regression has none, ``[0]``.
        """

    @abstractmethod
    def constant(self, counts: Tensor) -> Tensor:
        """Return the bias of a head that reads no feature, ``[outputs]``."""

    @abstractmethod
    def shift(self, priors: Tensor, counts: Tensor, strength: float) -> Tensor:
        """Return what a site adds; see ``fedrot.task_head.site_shift``."""

    @abstractmethod
    def check(
        self, counts: Tensor, sums: Tensor, squares: Tensor, covariance: Tensor
    ) -> str:
        """Return what is wrong with sums, or an empty text.

        Args:
            squares: of the features, summed over the rows, ``[inputs]``.
            covariance: inside the classes, or of all rows, ``[inputs, inputs]``.
        """

    @abstractmethod
    def fit(
        self,
        counts: Tensor,
        sums: Tensor,
        covariance: ShrunkCovariance,
        priors: Tensor | None,
    ) -> Layer:
        """Return a task head; see ``fedrot.task_head.fitted_task_heads``."""

    @abstractmethod
    def loss(self, logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
        """Return the losses of rows, ``[heads, rows]``.

        Args:
            logits: ``[heads, rows, outputs]``.
        """

    @abstractmethod
    def predicted(self, logits: Tensor) -> Tensor:
        """Return which classes or labels are predicted, bool ``[..., rows, k]``.

        A regression predicts none, ``k`` is 0.
        """

    def actual(self, labels: Tensor, outputs: int) -> Tensor:
        """Return which classes or labels rows have, as if predicted, ``[rows, k]``."""
        return self.predicted(self.targets(labels, outputs)[:, -outputs:])

    def right(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return which rows are predicted as labelled, bool ``[heads, rows]``.

        In a regression none.
        """
        predicted = self.predicted(logits)
        equal = predicted == self.actual(labels, logits.shape[-1])
        return equal.all(-1) & (predicted.shape[-1] > 0)


class _ValuePerOutput(OutputKind):
    """Every row has a value for each output: the first count is that of all rows."""

    centres = slice(1)
    others = slice(1, None)
    #: The allowed values, for messages.
    values: str

    def has_label(self, labels: Tensor) -> Tensor:
        missing = labels.isnan()
        return ~(missing.any(-1) if labels.ndim > 1 else missing)

    def check_labels(self, labels: Tensor, logits: Tensor) -> Tensor:
        flat = logits.shape[-1] == 1 and labels.shape == logits.shape[:-1]
        columns = labels.unsqueeze(-1) if flat else labels
        unlabelled = columns.isnan().all(-1, keepdim=True)
        right = bool((self._allowed(columns) | unlabelled).all())
        if not (right and labels.is_floating_point() and columns.shape == logits.shape):
            raise FedrotError(
                f"The labels are {labels.dtype} {list(labels.shape)}, the logits "
                f"{list(logits.shape)}. Give floating-point labels of the logits' "
                f"shape, each {self.values}, or NaN for all labels of a row; for one "
                f"class a row, set the config's problem_type to '{SINGLE}'."
            )
        return columns.double()

    @abstractmethod
    def _allowed(self, values: Tensor) -> Tensor:
        """Return which values a label may have."""

    def targets(self, labels: Tensor, outputs: int) -> Tensor:
        powers = [labels**power for power in range(1, 1 + self.moments)]
        return nn.functional.pad(torch.cat(powers, 1), (1, 0), value=1.0)

    def check(
        self, counts: Tensor, sums: Tensor, squares: Tensor, covariance: Tensor
    ) -> str:
        return "" if float(counts[0]) > 0 else "The number of rows is not positive."

    def _centred(self, counts: Tensor, sums: Tensor) -> Tensor:
        """Return the sums of ``y (h - m)``, ``m`` the mean of all rows."""
        return sums[1:] - torch.outer(counts[1:], sums[0] / counts[0])


class Numbers(_ValuePerOutput):
    """Regression: ridge regression on the features.

    The last of the ``counts`` are sums of squares of the labels. They tell the labels'
    units.
    """

    values = "finite"
    moments = 2
    has_temperature = False
    has_classes = False
    # Without units of the labels, a loss may have any size.
    largest_loss = 1e30

    def _allowed(self, values: Tensor) -> Tensor:
        return values.isfinite()

    def absent(self, counts: Tensor) -> Tensor:
        return torch.zeros(len(counts) // 2, dtype=torch.bool)

    def sizes(self, counts: Tensor) -> Tensor:
        return counts[:1]

    def priors(self, counts: Tensor) -> Tensor:
        return counts[:0]

    def constant(self, counts: Tensor) -> Tensor:
        return counts[1 : 1 + len(counts) // 2] / counts[0]

    def shift(self, priors: Tensor, counts: Tensor, strength: float) -> Tensor:
        return counts[1:] / (counts[0] + strength)

    def units(self, counts: Tensor) -> Tensor:
        """Return the deviations of the labels, 1 for labels that are all 0.

        Labels that do not vary have a rounding error as unit.
        """
        means, squares = (counts[1:] / counts[0]).chunk(2)
        variances = torch.maximum(squares - means.square(), ROUNDING * squares)
        return torch.where(variances > 0, variances, 1.0).sqrt()

    def fit(
        self,
        counts: Tensor,
        sums: Tensor,
        covariance: ShrunkCovariance,
        priors: Tensor | None,
    ) -> Layer:
        first = slice(len(counts) // 2 + 1)
        products = self._centred(counts[first], sums[first]) / counts[0]
        weight = (1 - covariance.shrinkage) * covariance.solve(products)
        return weight, self.constant(counts) - weight @ (sums[0] / counts[0])

    def loss(self, logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
        return (logits - labels).square().sum(-1)

    def predicted(self, logits: Tensor) -> Tensor:
        return logits[..., :0] > 0


class SeveralLabels(_ValuePerOutput):
    """Several labels a row, each there or not: a discriminant for every label."""

    values = "0 or 1"

    def _allowed(self, values: Tensor) -> Tensor:
        return (values == 0) | (values == 1)

    def common(self, labels: Labels, minimum: int, training: Labels = ()) -> Tensor:
        if not labels:
            return super().common(labels, minimum)
        seen = torch.zeros_like(self._pairs(labels), dtype=torch.bool)
        common = ~seen
        if training:
            seen = self._pairs(training) > 0
            common = self.common(training, minimum) | ~seen
        while True:
            kept = [self.with_common(batch, common) for batch in labels]
            enough = common & ((self._pairs(kept) >= minimum) | seen)
            if torch.equal(common, enough):
                return common
            # Rows that are left out may leave few of another label.
            common = enough

    @staticmethod
    def _pairs(labels: Labels) -> Tensor:
        """Return how many rows have each label, and lack it, ``[2, classes]``."""
        rows = torch.cat([batch.unsqueeze(-1).flatten(1) for batch in labels])
        return torch.stack([(rows == 1).sum(0), (rows == 0).sum(0)])

    def with_common(self, labels: Tensor, common: Tensor) -> Tensor:
        if not labels.is_floating_point():  # refused where labels are read
            return labels
        columns = labels if labels.ndim > 1 else labels.unsqueeze(1)
        with_label, without = ~common
        left_out = ((columns == 1) & with_label) | ((columns == 0) & without)
        missing = columns.masked_fill(left_out.any(1, keepdim=True), float("nan"))
        return missing.reshape(labels.shape)

    def priors(self, counts: Tensor) -> Tensor:
        n, labelled = counts[0], counts[1:]
        half = torch.where(self.absent(counts), 0.5, 0.0)
        return (labelled + half) / (n + 2 * half)

    def constant(self, counts: Tensor) -> Tensor:
        return self.priors(counts).logit()

    def shift(self, priors: Tensor, counts: Tensor, strength: float) -> Tensor:
        n, labelled = counts[0], counts[1:]
        pairs = torch.stack([labelled, n - labelled])
        priors = torch.stack([priors, 1 - priors])
        with_label, without = _log_ratios(priors, pairs, strength)
        return with_label - without

    def absent(self, counts: Tensor) -> Tensor:
        return (counts[1:] == 0) | (counts[1:] == counts[0])

    def check(
        self, counts: Tensor, sums: Tensor, squares: Tensor, covariance: Tensor
    ) -> str:
        if reason := super().check(counts, sums, squares, covariance):
            return reason
        # The covariance S inside the classes is positive: with k of n rows and c = k
        # (mean of the k rows minus that of all rows), c^T S^-1 c <= k (n - k), where S
        # is that of all rows.
        slack = ROUNDING32 * covariance.diagonal() + torch.finfo(covariance.dtype).tiny
        factor, _ = torch.linalg.cholesky_ex(covariance + torch.diag(slack))
        whitened = torch.linalg.solve_triangular(
            factor, self._centred(counts, sums).mT, upper=False
        )
        lengths = whitened.square().sum(0)
        limits = counts[1:] * (counts[0] - counts[1:])
        most = (1 + ROUNDING32) * limits + ROUNDING * counts[0] ** 2
        if bool((lengths <= most).all()):
            return ""
        return "The counts and sums of labels contradict the moments of all rows."

    def fit(
        self,
        counts: Tensor,
        sums: Tensor,
        covariance: ShrunkCovariance,
        priors: Tensor | None,
    ) -> Layer:
        n, labelled = counts[0], counts[1:]
        varies = ~self.absent(counts)
        centred = self._centred(counts, sums).where(varies.unsqueeze(1), 0.0)
        # A label that does not vary gets weights 0; n / 2 avoids a division by 0.
        with_label = torch.where(varies, labelled, n / 2)
        without = n - with_label
        up = (1 / with_label).unsqueeze(1) * centred
        down = (1 / -without).unsqueeze(1) * centred
        # The covariance of all rows is that inside the two classes and this times
        # ``(up - down)^2``.
        between = with_label * without / n**2
        apart = up - down
        # Each label has another covariance inside its classes, and another diagonal,
        # but one eigendecomposition serves all. So a label's covariance is shrunk to
        # the diagonal of all rows, times the mean share of it that lies inside the
        # classes. The share has a floor above what float32 rounds.
        outside = between * covariance.scaled(apart).square().sum(1)
        spread = (1 - outside / covariance.values.sum()).clamp(min=ROUNDING32)
        solved = covariance.solve(apart, spread)
        explained = (1 - covariance.shrinkage) * between * (apart * solved).sum(1)
        check_regular(1 - explained)
        weight = solved / (1 - explained).unsqueeze(1)
        rows = counts if priors is None else priors
        half = torch.where(varies, 0.0, 0.5)
        odds = (rows[1:] + half) / (rows[0] - rows[1:] + half)
        middle = sums[0] / n + (up + down) / 2
        return weight, odds.log() - (weight * middle).sum(1)

    def loss(self, logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
        losses = nn.functional.binary_cross_entropy_with_logits(
            logits / temperature, labels.expand_as(logits), reduction="none"
        )
        return losses.sum(-1)

    def predicted(self, logits: Tensor) -> Tensor:
        return logits > 0


class OneClass(OutputKind):
    """One class a row: linear discriminant analysis."""

    centres = slice(None)
    others = slice(0)
    fewest_outputs = 2
    by_class = True

    def priors(self, counts: Tensor) -> Tensor:
        return torch.where(counts > 0, counts, 0.5) / counts.sum()

    def constant(self, counts: Tensor) -> Tensor:
        return self.priors(counts).log()

    def shift(self, priors: Tensor, counts: Tensor, strength: float) -> Tensor:
        return _log_ratios(priors, counts, strength)

    def absent(self, counts: Tensor) -> Tensor:
        return counts == 0

    def has_label(self, labels: Tensor) -> Tensor:
        return labels >= 0

    def common(self, labels: Labels, minimum: int, training: Labels = ()) -> Tensor:
        counts = {**self._texts(labels), **self._texts(training)}
        common = torch.zeros(2, 1 + max(counts, default=-1), dtype=torch.bool)
        for c, rows in counts.items():
            common[0, c] = rows >= minimum
        return common

    def _texts(self, labels: Labels) -> Counter[int]:
        """Return how many texts have each class, also of their tokens."""
        counts: Counter[int] = Counter()
        for batch in labels:
            for text in batch:
                counts.update(text[self.has_label(text)].unique().tolist())
        return counts

    def with_common(self, labels: Tensor, common: Tensor) -> Tensor:
        classes = common[0].nonzero().to(labels)
        return labels.masked_fill(~torch.isin(labels, classes), -100)

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
        if bool((sums[counts == 0].square() > limit).any()):
            return "A class without rows has a sum of features that is not 0."
        return ""

    def fit(
        self,
        counts: Tensor,
        sums: Tensor,
        covariance: ShrunkCovariance,
        priors: Tensor | None,
    ) -> Layer:
        present = counts > 0
        if int(present.sum()) < 2:
            raise UpdateError("A task head needs rows of at least two classes.")
        n = counts.sum()
        shares = counts / n
        mean = sums.sum(0) / n
        means = class_means(counts, sums)
        weight = covariance.solve(means - mean)
        expected = shares if priors is None else priors / priors[present].sum()
        log_priors = torch.where(present, expected, 1.0).log()
        biases = -(weight * (means + mean)).sum(1) / 2 + log_priors
        # Absent classes have a share of 0: ``shares @ biases`` is the mean over the
        # others.
        biases = torch.where(present, biases, shares @ biases - (2 * n).log())
        return torch.where(present.unsqueeze(1), weight, 0.0), biases

    def loss(self, logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1) / temperature,
            labels.repeat(len(logits)),
            reduction="none",
        )
        return losses.view(logits.shape[:2])

    def predicted(self, logits: Tensor) -> Tensor:
        classes = nn.functional.one_hot(logits.argmax(-1), logits.shape[-1])
        return classes > 0

    def right(self, logits: Tensor, labels: Tensor) -> Tensor:
        # Without a column for each class: many heads are compared.
        return logits.argmax(-1) == labels


def _log_ratios(priors: Tensor, counts: Tensor, strength: float) -> Tensor:
    """Return the logarithms of a site's shares, divided by those of all rows.

    A class is along the first axis.
    """
    smallest = priors[priors > 0].min()
    known = priors.clamp(min=float(smallest))
    shares = (counts + strength * known) / (counts.sum(0) + strength)
    return (shares / known).log()


OUTPUT_KINDS: dict[str, OutputKind] = {
    SINGLE: OneClass(),
    SEVERAL: SeveralLabels(),
    REGRESSION: Numbers(),
}


def outputs_of(config: object) -> int:
    """Return the number of a classifier's outputs, from its configuration."""
    settings = settings_of(config)
    # transformers does not write the labels of two classes into config.json.
    return int(settings.get("num_labels") or len(settings.get("id2label") or (0, 1)))


def usual_problem_type(outputs: int) -> str:
    """Return the ``problem_type`` of a classifier whose configuration has none."""
    return REGRESSION if outputs == 1 else SINGLE


def problem_type_of(config: object, problem_type: str | None = None) -> str:
    """Return a ``problem_type``, by default that of a transformers configuration.

    Without either it is a regression for one output, else one class a row. Example:
    ``problem_type_of(model.config)``.

    Raises:
        FedrotError: the ``problem_type`` is unknown, or ``config`` is not a
            configuration.
    """
    name = problem_type or settings_of(config).get("problem_type")
    name = name or usual_problem_type(outputs_of(config))
    if name not in OUTPUT_KINDS:
        known = ", ".join(OUTPUT_KINDS)
        raise FedrotError(f"The problem_type '{name}' is unknown; use one of {known}.")
    return str(name)
