"""What depends on the kind of a classifier's outputs: labels, sums over rows, task head and loss.

``PROBLEMS`` has the three kinds by their names in transformers (``problem_type``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from fedrot.errors import FedrotError, UpdateError
from fedrot.spectrum import ROUNDING, Spectrum
from fedrot.symmetry.resolve import settings_of

SINGLE, SEVERAL, REGRESSION = "single_label_classification", "multi_label_classification", "regression"

#: Accepted excess of the variance between rows with and without a label over the whole variance:
#: clients send float32.
_EXCESS = 1e-3


class Problem(ABC):
    """A kind of outputs; ``counts`` ``[k]`` and ``sums`` ``[k, inputs]``: see ``fedrot.head.ClassSums``.

    Attributes:
        centres: the sums whose means are subtracted from features in the covariance inside the classes.
        others: the other sums.
    """

    centres, others = slice(1), slice(1, None)

    @abstractmethod
    def has_label(self, labels: Tensor) -> Tensor:
        """Return which rows have a label, bool ``[rows]``, or ``[rows, tokens]``."""

    @abstractmethod
    def check_labels(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the labels in the shape of ``targets`` and ``loss``; raise ``FedrotError`` if wrong."""

    @abstractmethod
    def targets(self, labels: Tensor, outputs: int) -> Tensor:
        """Return the factors of ``h`` in the sums, ``[rows, k]``."""

    @abstractmethod
    def check(self, counts: Tensor, sums: Tensor, squares: Tensor) -> str:
        """Return what is wrong with sums, or an empty text; ``squares`` are summed, ``[inputs]``."""

    def absent(self, counts: Tensor) -> Tensor:
        """Return the outputs of which rows with such counts tell nothing, bool ``[outputs]``."""
        return (counts[self.others] == 0) | (counts[self.others] == counts[0])

    def contradicts(self, counts: Tensor, sums: Tensor, covariance: Tensor) -> bool:
        """Return whether sums contradict the covariance of all rows."""
        return False

    @abstractmethod
    def fit(
        self, counts: Tensor, sums: Tensor, spectrum: Spectrum, shrinkage: float, priors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return weight ``[outputs, inputs]`` and bias ``[outputs]``; see ``fedrot.head.fit_heads``."""

    @abstractmethod
    def loss(self, logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
        """Return the loss of every row ``[heads, rows]`` of logits ``[heads, rows, outputs]``."""

    @abstractmethod
    def right(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return which rows are predicted as they are labelled, bool ``[heads, rows]``."""


class _OneClass(Problem):
    """One class for every row; a negative label is none. Linear discriminant analysis."""

    centres, others = slice(None), slice(0)

    def absent(self, counts: Tensor) -> Tensor:
        return counts == 0

    def has_label(self, labels: Tensor) -> Tensor:
        return labels >= 0

    def check_labels(self, labels: Tensor, logits: Tensor) -> Tensor:
        *places, classes = logits.shape
        if labels.is_floating_point() or list(labels.shape) != places:
            raise FedrotError(
                f"The labels are {labels.dtype} {list(labels.shape)}, the logits {list(logits.shape)}. "
                f"Give integer labels of shape {places}, one class each. For several labels a row, or a "
                "regression, set the problem_type of the model's config."
            )
        if bool((labels >= classes).any()):
            raise FedrotError(
                f"A label is {int(labels.max())}, but the model has {classes} classes, 0 to "
                f"{classes - 1}. Build the model with the num_labels of the data."
            )
        return labels.long()

    def targets(self, labels: Tensor, outputs: int) -> Tensor:
        return nn.functional.one_hot(labels, outputs)

    def check(self, counts: Tensor, sums: Tensor, squares: Tensor) -> str:
        if bool((counts < 0).any()) or not float(counts.sum()) > 0:
            return "The counts of rows by class are negative, or all 0."
        limit = ROUNDING * counts.sum() * squares.abs()
        nothing = bool((sums[counts == 0].square() <= limit).all())
        return "" if nothing else "A class without rows has a sum of features that is not 0."

    def fit(
        self, counts: Tensor, sums: Tensor, spectrum: Spectrum, shrinkage: float, priors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        n, present = counts.sum(), counts > 0
        if int(present.sum()) < 2:
            raise UpdateError("A task head needs rows of at least two classes.")
        shares, mean = counts / n, sums.sum(0) / n
        means = sums / torch.where(present, counts, 1.0).unsqueeze(1)
        weight = spectrum.solve(means - mean, shrinkage)
        expected = shares if priors is None else priors / priors[present].sum()
        biases = -(weight * (means + mean)).sum(1) / 2 + torch.where(present, expected, 1.0).log()
        weight = torch.where(present.unsqueeze(1), weight, 0.0)
        # Classes without rows have a share of 0: ``shares @ biases`` is the mean over the others.
        return weight, torch.where(present, biases, shares @ biases - (2 * n).log())

    def loss(self, logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
        flat, repeated = logits.flatten(0, 1) / temperature, labels.repeat(len(logits))
        losses = nn.functional.cross_entropy(flat, repeated, reduction="none")
        return losses.reshape(logits.shape[:2])

    def right(self, logits: Tensor, labels: Tensor) -> Tensor:
        return logits.argmax(-1) == labels


PROBLEMS: dict[str, Problem] = {SINGLE: _OneClass()}


def outputs_of(config: object) -> int:
    """Return the number of a classifier's outputs, from its configuration."""
    settings = settings_of(config)
    # transformers does not write the labels of two classes into config.json.
    return int(settings.get("num_labels") or len(settings.get("id2label") or (0, 1)))


def problem_of(config: object) -> str:
    """Return the ``problem_type`` of a transformers configuration, or of its dictionary.

    Without one, a single output is a regression, and several outputs are classes, one for every row.

    Raises:
        FedrotError: the ``problem_type`` is unknown.
        SymmetryError: ``config`` is not a configuration.

    Example: ``problem_of(model.config)``
    """
    given = settings_of(config).get("problem_type")
    return checked_problem(given or (REGRESSION if outputs_of(config) == 1 else SINGLE))


def checked_problem(problem: str) -> str:
    """Return the name of a problem; raise ``FedrotError`` if there is none of this name."""
    if problem not in PROBLEMS:
        raise FedrotError(f"The problem_type '{problem}' is unknown; use one of {', '.join(PROBLEMS)}.")
    return problem


def problem_for(model: nn.Module, problem: str | None) -> str:
    """Return a problem's name; None takes that of the model's configuration."""
    return checked_problem(problem) if problem else problem_of(getattr(model, "config", {}))
