"""A configuration and shapes give a symmetry of these shapes, or ``SymmetryError``."""

from functools import cache

from hypothesis import strategies as st

import fedrot
from fedrot.errors import SymmetryError
from tests.families import MEMBERS, config_of, state_of
from tests.fuzz.cases import fuzzed, misspelt, values

WORDS = ("gelu", "bert", "llama", "c2p|p2c", "")
shapes = st.lists(st.integers(-1, 50), max_size=4).map(tuple)


@cache
def model(name):
    return config_of(name).to_dict(), {
        key: tuple(value.shape) for key, value in state_of(name).items()
    }


@st.composite
def models(draw):
    """Draw a configuration and shapes that hardly differ from a real model's."""
    config, tensors = (
        dict(part) for part in model(draw(st.sampled_from(sorted(MEMBERS))))
    )
    # What the families read, among the many settings that none does.
    read = [
        key
        for key, value in config.items()
        if key != "architectures" and value is not None
    ]
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(sorted(tensors) or [""]))
        match draw(st.integers(0, 7)):
            case 0 | 1:
                config[draw(st.sampled_from(read))] = draw(
                    values(st.sampled_from(WORDS))
                )
            case 2:
                config.pop(draw(st.sampled_from(read)), None)
            case 3:
                tensors.pop(name, None)
            case 4:
                tensors[name] = draw(shapes)
            case 5:
                tensors[draw(misspelt(name))] = tensors.pop(name, ())
            case 6:
                prefix = draw(
                    st.sampled_from(("module.", "bert.", "model.", "a.b.", "."))
                )
                tensors = {prefix + key: shape for key, shape in tensors.items()}
            case _:
                other = model(draw(st.sampled_from(sorted(MEMBERS))))[
                    draw(st.integers(0, 1))
                ]
                if other is not None and draw(st.booleans()):
                    config = {
                        **config,
                        "model_type": draw(
                            st.sampled_from(fedrot.symmetry.supported())
                        ),
                    }
    return config, tensors


@fuzzed(14, drawn=models())
def test_a_model_has_a_symmetry_or_the_error_says_why(drawn):
    config, tensors = drawn
    try:
        symmetry = fedrot.symmetry_of(config, tensors)
    except SymmetryError:
        return False
    assert symmetry.shapes == tensors
    for group in symmetry.groups:
        for slot in group.slots:
            assert (
                0
                <= slot.slice.start
                <= slot.slice.stop
                <= tensors[slot.tensor][slot.axis]
            )
    return True
