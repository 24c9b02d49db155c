"""Checks of alignment together with Flower's differential-privacy wrappers."""

from __future__ import annotations

from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Strategy,
)

from fedrot.errors import FedrotError
from fedrot.strategies.flower_compat import callers

_CLIENT_SIDE = (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
)
_WRAPPERS = (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    *_CLIENT_SIDE,
)


def check_in_front(strategy: Strategy, anchor: str, other_basis: bool) -> None:
    """Refuse alignment in front of a privacy wrapper if it would break the wrapper's guarantee.

    This is so if clients clip before the server aligns, or if one client's reply moves the updates of
    others: by its ``anchor``, or with ``other_basis``, where a reply can become the anchor.
    """
    if isinstance(strategy, _CLIENT_SIDE):
        raise FedrotError(
            "Clients clip their updates before the server could align them. Align at the clients, "
            "mods=[fixedclipping_mod, align_mod(...)], and give align=False here."
        )
    if isinstance(strategy, _WRAPPERS) and (anchor != "global" or other_basis):
        raise FedrotError(
            "With differential privacy every update must be aligned to the broadcast model alone: "
            "otherwise one client's reply moves the updates of others, and clipping it does not bound "
            "its influence. Give anchor='global', and no other_basis."
        )


def check_not_behind(strategy: Strategy) -> None:
    """Refuse to run inside a privacy wrapper, which clips updates before this strategy aligns them."""
    for caller in callers():
        if isinstance(caller, _WRAPPERS) and caller.strategy is strategy:
            name = type(caller).__name__
            raise FedrotError(
                f"{name} clips updates before {type(strategy).__name__} aligns them. Put alignment in "
                f"front of it: class Private(Aligned, {name}), Private(config, FedAvg(), "
                "anchor='global', ...)."
            )
