"""How many cases are tried, and the mutations that all fuzzing tests share."""

import functools
import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

#: Cases of the whole run, shared out by weight. A run with the default tries the same
#: ones every time.
TOTAL = int(os.environ.get("FEDROT_FUZZ_CASES", "1500"))
REPEATABLE = "FEDROT_FUZZ_CASES" not in os.environ

settings.register_profile(
    "fuzz",
    deadline=None,
    derandomize=REPEATABLE,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


def fuzzed(weight, **arguments):
    """Return the decorator of a test that gets ``weight`` percent of all cases.

    The test returns whether its case was accepted. Some are and some are not, or it
    tests nothing.
    """

    def decorate(test):
        accepted = []

        @functools.wraps(test)
        def counted(**drawn):
            accepted.append(test(**drawn))

        cases = max(1, round(TOTAL * weight / 100))
        limits = settings(settings.get_profile("fuzz"), max_examples=cases)
        tried = limits(given(**arguments)(counted))

        @functools.wraps(tried)
        def guarded():
            tried()
            assert not REPEATABLE or {*accepted} == {False, True}

        # pytest would take the drawn arguments for fixtures.
        del guarded.__wrapped__
        return guarded

    return decorate


#: Integers around everything that sizes break at.
EDGES = (-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 4, 7, 255)
EDGES += (2**16, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64)


@st.composite
def mutated(draw, data):
    """Draw bytes like the given ones: some flipped, put in, taken out, cut off, or
    repeated.
    """
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
def misspelt(draw, text):
    """Draw a text like the given one."""
    return draw(mutated(text.encode())).decode(errors="replace")


def values(more):
    """Return values of a configuration, alone, in lists and in dictionaries; ``more``
    among them.
    """
    one = (
        st.none()
        | st.booleans()
        | st.integers(-2, 40)
        | st.floats(-4, 4)
        | st.floats()
        | more
    )
    return (
        one
        | st.lists(one, max_size=3)
        | st.dictionaries(st.text(max_size=3), one, max_size=2)
    )
