"""Names of a model's labels in messages: their record, and how they are compared."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any
from unicodedata import normalize

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

#: The largest number of characters of all names that a client says.
_LARGEST = 2**18

#: What transformers calls a label without a name.
_UNNAMED = re.compile(r"label_\d+", re.IGNORECASE)


def label_names(config: Any) -> Names:
    """Return the names of a configuration's labels in the order of the outputs.

    They are empty without ``id2label``, or if all are like ``LABEL_0``.
    """
    # A dictionary has no attributes.
    settings = getattr(config, "__dict__", config) or {}
    by_place = settings.get("id2label") or {}
    # Of a JSON file the numbers are texts.
    places = sorted(by_place, key=int)
    names = tuple(normalize("NFC", str(by_place[place])).strip() for place in places)
    return () if all(map(_UNNAMED.fullmatch, names)) else names


def labels_record(model: object) -> ConfigRecord:
    """Return the names of a client's labels, for the server to compare.

    ``answer_with_sums`` sends them by itself. A training reply has them if the client
    adds them; replies with other labels than the server's are then dropped. Labels
    without names, like ``LABEL_0``, are not compared.

    Args:
        model: a transformers or PEFT model, for the ``id2label`` of its ``config``.

    Example: ``content["fedrot-labels"] = labels_record(model)``
    """
    names = label_names(getattr(model, "config", None))
    # Flower sends an empty list as another type.
    return ConfigRecord({NAMES: [*names]} if names else {})


def read_names(content: RecordDict) -> Names:
    """Return the names that a client says; empty if it says none.

    Raises:
        UpdateError: these are no texts, or too many or too long ones.
    """
    records: Any = records_of_type(content, ConfigRecord)
    names = records.get(LABELS, {}).get(NAMES, [])
    if {*map(type, names)} - {str} or len(str(names)) > _LARGEST:
        raise UpdateError(
            f"'{LABELS}' is no list of names, of up to {_LARGEST} characters in all."
        )
    return tuple(names)


def wanted_names(config: object, names: Mapping[int, Names]) -> Names:
    """Return the server's names of labels; without any those that most nodes say.

    Args:
        config: the model's; None for an adapter.
        names: by node.
    """
    ((most, count),) = Counter(names.values()).most_common(1) or [((), 0)]
    return label_names(config) or (most if 2 * count > len(names) else ())


def check_names(names: Names, wanted: Names) -> None:
    """Raise ``UpdateError`` if a client's labels are not those that are wanted.

    The message has both orders, and the line that mends the client. Where either has no
    name, nothing is compared.
    """
    for place, pair in enumerate(zip(names, wanted, strict=False)):
        if len({*pair}) > 1 and not any(map(_UNNAMED.fullmatch, pair)):
            raise UpdateError(
                f"Its labels, from number {place} on, are {[*names[place:]]!s:.60}. "
                f"Number its rows so, and name them so in build(): names = {[*wanted]}"
                "; label = names.index(name); model.config.id2label = "
                "dict(enumerate(names))"
            )
