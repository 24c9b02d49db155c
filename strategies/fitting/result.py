"""``FittedTaskHead``: what an exchange with clients about a task head has chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from logging import INFO, WARNING

from flwr.app import ArrayRecord
from flwr.common import log

from fedrot.strategies.reporting.verdict import HEAD_FAILED, Metrics
from fedrot.task_head.losses import temperature_in_words
from fedrot.task_head.votes import FEWEST

#: With fewer held-out rows of all clients together, a warning is logged.
FEW = 100

#: Smaller changes of a loss are rounding errors.
ROUNDING = 1e-6

#: What is taken of a round's change.
_TAKEN = {1.0: "the new model", 0.5: "the mean of the old and the new model"}


@dataclass(frozen=True)
class FittedTaskHead:
    """A model with its task head, and the losses on held-out rows.

    If no head can be fitted or compared, the model is the given one, and there is a
    ``reason``. With ``public`` of ``fit_task_head`` nobody evaluates: losses,
    shrinkage, change and error are NaN, there are 0 rows, and clients are those whose
    sums are used.

    Attributes:
        arrays: the model that is taken, with the head and the temperature of the lowest
            loss.
        fitted: whether its head is a fitted one.
        temperature: the divisor of the logits.
        losses: mean losses over all held-out rows: of the old model, of the old model
            at its best temperature, and of the best model with a fitted head at its
            best temperature. NaN if no head could be fitted or compared. Of a
            regression: squared errors in units of the labels' variance, summed over
            outputs.
        rows: number of held-out rows.
        clients: number of clients that evaluated the models.
        share: how much of a round's change of the body is taken: 0, 0.5 or 1.
        shrinkage: of the fitted head; NaN for the old head.
        change: of the loss, from the old model to the best with a fitted head; negative
            is better. The choice goes by it: with four clients and more it is no
            difference of ``losses``, but the centre of the clients' changes
            (``fedrot.task_head.votes``).
        error: the standard error of ``change``, from the differences of rows.
        reason: why no head could be fitted or compared; empty if one was.
        priors: shares of classes in the bias of a fitted head, for ``site_model``: of
            capped rows, without the sums that were left out. Empty if they are not
            known, or in a regression.
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
    priors: tuple[float, ...] = ()

    @property
    def loss(self) -> float:
        """The mean loss of the model that is taken; NaN if unknown."""
        return self.losses[2] if self.fitted else self.losses[1]

    @property
    def _difference(self) -> str:
        """The change in words, and how sure it is."""
        if abs(self.change) < ROUNDING:
            return "the same as the old model's"
        certainty = "standard error"
        if abs(self.change) <= 2 * self.error:
            certainty = "standard error: within noise"
        size = f"{abs(self.change):.2g} ± {self.error:.1g} ({certainty})"
        return (
            f"{'lower' if self.change < 0 else 'higher'} than the old model's by {size}"
        )

    def log(self, when: str) -> None:
        """Log what was taken, its loss, and the change by which it was chosen.

        If no head could be fitted or compared, log the reason.
        """
        if self.reason:
            log(
                WARNING,
                "%s: the task head is not fitted; the model is taken as it is. %s",
                when,
                self.reason,
            )
            return
        taken = "the old model"
        if self.fitted:
            taken = f"{_TAKEN[self.share]} with a fitted head"
        log(
            INFO,
            "%s, %d clients, %g held-out rows: taken is %s. Its mean loss on all these "
            "rows is %s. By the %s of the clients' changes, which decides, the loss of "
            "the best model with a fitted head is %s; %s.",
            when,
            self.clients,
            self.rows,
            taken,
            f"{self.loss:z.4g}",
            "mean" if self.clients < FEWEST else "trimmed mean",
            self._difference,
            temperature_in_words(self.temperature),
        )
        if self.rows < FEW:
            log(
                WARNING,
                "%g held-out rows are few: the choice may be noise. Hold out more.",
                self.rows,
            )

    def metrics(self) -> Metrics:
        """Return the metrics of a round; of the losses only if they are known."""
        metrics: Metrics = {
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
