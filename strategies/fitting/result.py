"""``FittedTaskHead``: what an exchange with clients about a task head has chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from logging import INFO, WARNING

from flwr.app import ArrayRecord
from flwr.common import log

from fedrot.strategies.reporting.verdict import HEAD_FAILED
from fedrot.task_head.losses import temperature_in_words

#: With fewer held-out rows of all clients together, a warning is logged.
FEW = 100

#: What is taken of a round's change.
_TAKEN = {1.0: "the new model", 0.5: "the mean of the old and the new model"}


@dataclass(frozen=True)
class FittedTaskHead:
    """A model with its task head, and the losses on held-out rows.

    If no head can be fitted or compared, the model is the given one, and there is a
    ``reason``.

    Attributes:
        arrays: the model that is taken, with the head and the temperature of the lowest
            loss.
        fitted: whether its head is a fitted one.
        temperature: the divisor of the logits.
        losses: loss of a held-out row: of the old model, of the old model at its best
            temperature, and of the best model with a fitted head at its best
            temperature; means with fewer than four clients, else centres
            (``fedrot.task_head.votes``). NaN if no head could be fitted or compared. Of
            a regression: squared errors in units of the labels' variance, summed over
            outputs.
        rows: number of held-out rows that count.
        clients: number of clients that evaluated the models.
        share: how much of a round's change of the body is taken: 0, 0.5 or 1.
        shrinkage: of the fitted head; NaN for the old head.
        change: of the loss, from the old model to the best with a fitted head; negative
            is better.
        error: the standard error of ``change``, from the differences of rows.
        reason: why no head could be fitted or compared; empty if one was.
    """

    arrays: ArrayRecord
    fitted: bool = False
    temperature: float = 1.0
    losses: tuple[float, ...] = (math.nan,) * 3
    rows: float = 0
    clients: int = 0
    share: float = 1.0
    shrinkage: float = math.nan
    change: float = math.nan
    error: float = math.nan
    reason: str = ""

    @property
    def loss(self) -> float:
        """The loss of the model that is taken; NaN if unknown."""
        return self.losses[2] if self.fitted else self.losses[1]

    def after(self, loss: float) -> FittedTaskHead:
        """Return the same with losses from another loss of the old model on.

        Centres of losses and of their changes do not add up: losses of successive
        rounds have one scale if each continues the one before.

        Args:
            loss: NaN changes nothing.
        """
        if math.isnan(loss):
            return self
        shift = loss - self.losses[0]
        return replace(self, losses=tuple(before + shift for before in self.losses))

    def log(self, when: str) -> None:
        """Log what was taken, by how much its loss is lower, and how surely.

        If no head could be fitted or compared, log the reason.
        """
        if self.reason:
            log(WARNING, "%s: the task head is not fitted. %s", when, self.reason)
            return
        certainty = "standard error"
        if abs(self.change) <= 2 * self.error:
            certainty = "standard error: within noise"
        taken = "the model before"
        if self.fitted:
            taken = f"{_TAKEN[self.share]} with a fitted head"
        log(
            INFO,
            "%s, %d clients, %g held-out rows: taken is %s. The loss of the best model "
            "with a fitted head is %.4g, %s than before by %.2g ± %.1g (%s); %s.",
            when,
            self.clients,
            self.rows,
            taken,
            self.losses[2],
            "lower" if self.change < 0 else "higher",
            abs(self.change),
            self.error,
            certainty,
            temperature_in_words(self.temperature),
        )
        if self.rows < FEW:
            log(
                WARNING,
                "%g held-out rows are few: the choice may be noise. Hold out more.",
                self.rows,
            )

    def metrics(self) -> dict[str, float | int]:
        """Return the metrics of a round; of the losses only if they are known."""
        metrics: dict[str, float | int] = {
            "fedrot-head-fitted": int(self.fitted),
            HEAD_FAILED: int(bool(self.reason)),
            "fedrot-head-temperature": self.temperature,
        }
        if not self.reason:
            metrics |= {
                "fedrot-head-loss": self.loss,
                "fedrot-head-step": self.share,
                "fedrot-head-change": self.change,
                "fedrot-head-error": self.error,
            }
        return metrics
