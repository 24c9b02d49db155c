"""How many cases are tried, and the mutations that all fuzzing tests share."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

#: Cases of the whole run, shared out by weight. A run with the default tries the same ones every time.
TOTAL = int(os.environ.get("FEDROT_FUZZ_CASES", "4000"))
REPEATABLE = "FEDROT_FUZZ_CASES" not in os.environ

settings.register_profile(
    "fuzz",
    deadline=None,
    derandomize=REPEATABLE,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)

#: Cases tried, and those that were accepted, by test.
COUNTS: Counter[str] = Counter()
ACCEPTED: Counter[str] = Counter()

#: Sum of the weights of all tests, which ``test_cases.py`` checks.
WEIGHTS: dict[str, float] = {}
WEIGHT = 100


def fuzzed(weight: float, **arguments: st.SearchStrategy[Any]) -> Callable[[Any], Any]:
    """Return the decorator of a test that gets ``weight`` percent of all cases.

    The test returns whether its case was accepted. Some are and some are not, or it tests nothing.
    """

    def decorate(test: Callable[..., bool]) -> Any:
        name = test.__name__
        WEIGHTS[name] = weight

        @functools.wraps(test)
        def counted(**drawn: Any) -> None:
            COUNTS[name] += 1
            ACCEPTED[name] += test(**drawn)

        cases = max(1, round(TOTAL * weight / WEIGHT))
        limits = settings(settings.get_profile("fuzz"), max_examples=cases)
        tried = limits(given(**arguments)(counted))

        @functools.wraps(tried)
        def guarded() -> None:
            tried()
            if REPEATABLE:
                assert 0 < ACCEPTED[name] < COUNTS[name]

        # pytest would take the drawn arguments for fixtures.
        del guarded.__wrapped__
        return guarded

    return decorate


#: Integers around everything that sizes break at.
EDGES = (
    -(2**63),
    -(2**31),
    -2,
    -1,
    0,
    1,
    2,
    3,
    4,
    7,
    255,
    2**16,
    2**31,
    2**32,
    2**40,
    2**62,
    2**63,
    2**64,
)


@st.composite
def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """Draw bytes like the given ones: some flipped, put in, taken out, cut off, or repeated."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(found) - 1)))
        match draw(st.integers(0, 5)):
            case 0 if found:
                found[at] ^= 1 << draw(st.integers(0, 7))
            case 1:
                found[at:at] = draw(st.binary(min_size=1, max_size=9))
            case 2:
                del found[at : at + draw(st.integers(1, 9))]
            case 3:
                del found[at:]
            case 4:
                found[at:at] = found[at : at + draw(st.integers(1, 200))]
            case _:
                found[at : at + 4] = draw(st.binary(min_size=4, max_size=4))
    return bytes(found)


@st.composite
def misspelt(draw: st.DrawFn, text: str) -> str:
    """Draw a text like the given one."""
    return draw(mutated(text.encode())).decode(errors="replace")
