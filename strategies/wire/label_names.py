"""Names of a model's labels in messages: their record, and how they are compared."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import ConfigRecord, RecordDict

from fedrot.errors import UpdateError
from fedrot.strategies.wire.arrays import records_of_type

#: ConfigRecord of an answer or of a training reply with the names of labels; the key of
#: a request's configuration that asks for it has the same name.
LABELS = "fedrot-labels"

#: The key of the names in this record.
NAMES = "names"

#: Names in the order of a model's outputs; empty if nothing is said.
Names = tuple[str, ...]

#: The largest number of names, and of characters of a name; more are not compared.
_MOST, _LONGEST = 10_000, 200

#: What transformers calls a label without a name.
_UNNAMED = re.compile(r"label_\d+", re.IGNORECASE)


def label_names(config: object) -> Names:
    """Return the names of a configuration's labels in the order of the outputs.

    They are empty without ``id2label``, or if all are like ``LABEL_0``.
    """
    own = getattr(config, "id2label", None)
    if isinstance(config, Mapping):
        own = config.get("id2label")
    if not isinstance(own, Mapping):
        return ()
    # Of a JSON file the numbers are texts.
    ordered = sorted((int(place), str(name)) for place, name in own.items())
    names = tuple(name[:_LONGEST] for _, name in ordered[:_MOST])
    return names if any(map(_is_name, names)) else ()


def labels_record(config: object) -> ConfigRecord:
    """Return the names of a client's labels, for the server to compare.

    ``answer_with_sums`` sends them by itself. A training reply has them if the client
    adds them; replies with other labels than the server's are then dropped. Labels
    without names, like ``LABEL_0``, are not compared.

    Args:
        config: the model's transformers configuration, for its ``id2label``.

    Example: ``content["fedrot-labels"] = labels_record(model.config)``
    """
    names = label_names(config)
    # Flower sends an empty list as another type.
    return ConfigRecord({NAMES: [*names]} if names else {})


def read_names(content: RecordDict) -> Names:
    """Return the names that a client says; empty if it says none.

    Raises:
        UpdateError: these are no texts, or too many or too long ones.
    """
    record = records_of_type(content, ConfigRecord).get(LABELS, ConfigRecord())
    names = record.get(NAMES, [])
    if not isinstance(names, list) or len(names) > _MOST:
        raise UpdateError(f"'{LABELS}' has no list of at most {_MOST} names.")
    texts = [name for name in names if isinstance(name, str) and len(name) <= _LONGEST]
    if len(texts) < len(names):
        raise UpdateError(
            f"'{LABELS}' has names that are no texts of at most {_LONGEST} characters."
        )
    return tuple(texts) if any(map(_is_name, texts)) else ()


@dataclass
class KnownLabels:
    """The names of labels that a server has, and those that nodes say.

    Attributes:
        described: the model's configuration; None for an adapter.
        said: by node, once in a run.
    """

    described: object = None
    said: dict[int, Names] = field(default_factory=dict)

    @property
    def wanted(self) -> Names:
        """The server's names; without any those that most of the nodes say."""
        votes = Counter(self.said.values())
        agreed = [names for names, n in votes.items() if 2 * n > votes.total()]
        return label_names(self.described) or next(iter(agreed), ())

    def check(self, node: int, content: RecordDict) -> None:
        """Check the names in a node's reply, or those that it has said before."""
        names = read_names(content) or self.said.get(node, ())
        check_names(names, self.wanted)


def check_names(names: Names, wanted: Names) -> None:
    """Raise ``UpdateError`` if a client's labels are not those that are wanted.

    The message has both orders, and the line that mends the client. Where either has no
    name, nothing is compared.
    """
    pairs = zip(names, wanted, strict=False)
    clashes = [
        place
        for place, pair in enumerate(pairs)
        if all(map(_is_name, pair)) and len({*pair}) == 2
    ]
    other_number = names and wanted and len(names) != len(wanted)
    if not clashes and not other_number:
        return
    first = clashes[0] if clashes else min(len(names), len(wanted))
    config = "model.config.id2label"
    places = {name: place for place, name in enumerate(wanted)}
    if sorted(names) == sorted(places):
        order = str([places[name] for name in names]).replace(" ", "")
        what = "in another order"
        # Names of a client are no part of what its owner may copy.
        line = (
            f"to = {order}; label = to[label]; "
            f"{config} = {{to[i]: name for i, name in {config}.items()}}"
        )
    else:
        changed = {place: wanted[place] for place in clashes}
        what = "others"
        line = f"{config} |= {changed}"
        if other_number:
            line = f"{config} = dict(enumerate({[*wanted]}))"
    raise UpdateError(
        f"Its labels are {what}: from label {first} on they are "
        f"{_listed(names[first:])}, and should be {_listed(wanted[first:])}. Number "
        f"its rows so, and name them so in build(): {line}"
    )


def _is_name(text: str) -> bool:
    return not _UNNAMED.fullmatch(text)


def _listed(names: Sequence[str]) -> str:
    """Return the first of some names, cut to a sane length."""
    return f"{', '.join(map(repr, names[:9])):.60}" or "none"
