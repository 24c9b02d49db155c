"""The ledger of a site: what its noisy answers have told together, in epsilon.

The ledger is the record's lines with a ``multiplier``. ``dp_accounting`` composes them;
fedrot has no formulas of its own for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from fedrot.errors import FedrotError
from fedrot.strategies.client.answer_record import Line
from fedrot.strategies.client.privacy import Privacy

#: Accepted rounding of an accountant, relative to epsilon.
_ROUNDING = 1e-6


class BudgetSpent(FedrotError):
    """A further answer would tell more than the site's epsilon allows."""


def release_of(privacy: Privacy, lines: Iterable[Line]) -> Line:
    """Return what the record says of one more noisy answer.

    ``multiplier``: the deviation of its noise, in units of what one row changes, such
    that ``privacy.releases`` answers have ``privacy.epsilon`` together; and
    ``epsilon``: what has been told after it.

    Args:
        privacy: of the site, with an epsilon.
        lines: of the record.

    Raises:
        BudgetSpent: the answer may not be sent.
        FedrotError: dp-accounting is not installed, or a line has a multiplier that is
            no number above 0.
    """
    assert privacy.epsilon is not None
    try:
        import dp_accounting
        from dp_accounting.pld import PLDAccountant, accountant, common
    except ImportError as error:
        raise FedrotError(
            "Privacy(epsilon=...) counts with dp-accounting, which is not installed: "
            "pip install 'fedrot[privacy]'."
        ) from error
    wanted = common.DifferentialPrivacyParameters(privacy.epsilon, privacy.delta)
    multiplier = accountant.get_smallest_gaussian_noise(wanted, privacy.releases, 1.0)
    earlier = [line["multiplier"] for line in lines if "multiplier" in line]
    told = PLDAccountant()
    for noise in (*earlier, multiplier):
        if not isinstance(noise, int | float) or not 0 < noise < math.inf:
            raise FedrotError(
                f"A line of the record '{privacy.record}' has the multiplier {noise!r}."
                " Restore the record from a copy; nothing is sent."
            )
        told.compose(dp_accounting.GaussianDpEvent(noise))
    epsilon = told.get_epsilon(privacy.delta)
    if epsilon > privacy.epsilon * (1 + _ROUNDING):
        raise BudgetSpent(
            f"The epsilon {privacy.epsilon:g} of the site is spent: with one more "
            f"answer it is {epsilon:.3g}, says '{privacy.record}'. Nothing is sent."
        )
    return {"multiplier": multiplier, "epsilon": epsilon, "delta": privacy.delta}
