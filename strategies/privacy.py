"""What Flower's differential-privacy wrappers ask of alignment: it comes first, client by client."""

from __future__ import annotations

import inspect

from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Strategy,
)

from fedrot.errors import FedrotError

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
    """Refuse an alignment in front of a privacy wrapper that would undo what it promises.

    Args:
        strategy: the aligned strategy, perhaps a wrapper itself.
        anchor: whom it aligns to.
        other_basis: whether replies from other bases are matched, so that one can become the anchor.

    Raises:
        FedrotError: clients clip before the server aligns; or what one client sends would move the
            others' updates, so that clipping its own does not bound what it changes.
    """
    if isinstance(strategy, _CLIENT_SIDE):
        raise FedrotError(
            "Clients clip their updates before the server could align them. Align at the clients, "
            "mods=[fixedclipping_mod, align_mod(...)], and give align=False here."
        )
    if isinstance(strategy, _WRAPPERS) and (anchor != "global" or other_basis):
        raise FedrotError(
            "With differential privacy every update must be aligned to the broadcast model alone: one "
            "client would move the others' updates otherwise, and clipping its own bounds nothing. "
            "Give anchor='global', and neither model nor other_basis."
        )


def check_not_behind(strategy: Strategy) -> None:
    """Refuse to run inside of a privacy wrapper, which clips before this strategy could align.

    Raises:
        FedrotError: a wrapper around this strategy is among the callers.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, _WRAPPERS) and caller.strategy is strategy:
            name = type(caller).__name__
            raise FedrotError(
                f"{name} clips updates before {type(strategy).__name__} aligns them. Put alignment in "
                f"front of it: class Private(Aligned, {name}), Private(config, FedAvg(), "
                "anchor='global', ...)."
            )
        frame = frame.f_back
