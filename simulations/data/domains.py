"""Several data sets as the domains of one task. Each domain has its own labels and test rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import numpy as np
import numpy.typing as npt

from fedrot.simulations.data.data_set import DataSet
from fedrot.simulations.data.sources import DataError, Selection, listed
from fedrot.simulations.data.texts import TextData, TextSplit, load_text_data

#: The column with the name of a row's domain.
DOMAIN = "domain"
#: The metrics over all domains with training rows, and over those without.
SEEN, UNSEEN = "macro_f1", "unseen_macro_f1"


@dataclass(frozen=True)
class DomainData(DataSet[TextSplit]):
    """Texts of several domains, multi-label. Labels that a domain lacks are NaN in its rows.

    ``domains`` have training and test rows; ``unseen`` domains have only test rows.
    """

    domains: tuple[str, ...]
    unseen: tuple[str, ...]


def load_domains(
    names: Sequence[str],
    data_dir: Path | None = None,
    unseen: Sequence[str] = (),
    **selection: Unpack[Selection],
) -> DomainData:
    """Load data sets of classified texts as the domains of one task.

    The labels of the task are the labels of all ``names``; equal names are one label. A selection's
    limits are per domain. Of ``unseen`` domains, the test rows and the labels of the task are kept.

    Raises:
        DataError: as ``load_text_data``; also if a name occurs twice, if a data set has scores, pairs or
            classes without names, or if an unseen domain has none of the labels.
    """
    twice = sorted({name for name in (*names, *unseen) if (*names, *unseen).count(name) > 1})
    if twice:
        raise DataError(f"the data set '{twice[0]}' is named twice; name every domain once")
    loaded = {name: load_text_data(name, data_dir, **selection) for name in (*names, *unseen)}
    if len(set(map(metric_of, loaded))) < len(loaded):
        raise DataError(f"two domains have the same file name among {', '.join(loaded)}; rename one")
    for name, data in loaded.items():
        if data.kind == "single" and all(label.isdigit() for label in data.label_names):
            raise DataError(f"the classes of '{name}' are numbers; domains need classes with names")
        if data.kind == "regression" or data.train.pairs is not None:
            raise DataError(
                f"'{name}' has scores or pairs of texts; domains need classes of single texts"
            )
    labels = tuple(dict.fromkeys(label for name in names for label in loaded[name].label_names))
    for name in unseen:
        if not set(loaded[name].label_names) & set(labels):
            own = listed(loaded[name].label_names)
            raise DataError(f"'{name}' has none of the labels {listed(labels)}; it has {own}")
    train = _united([(name, loaded[name], loaded[name].train) for name in names], labels)
    test = _united([(name, data, data.test) for name, data in loaded.items()], labels)
    notes = " ".join(filter(None, (data.note for data in loaded.values())))
    domains = tuple(names), tuple(unseen)
    metrics = (SEEN, *([UNSEEN] if unseen else []), *map(metric_of, loaded))
    joined = ",".join(names)
    said = " ".join(filter(None, (data.said for data in loaded.values())))
    return DomainData(joined, "multi", labels, metrics, train, test, *domains, note=notes, said=said)


def metric_of(domain: str) -> str:
    """Return the metric's name for the macro F1 of one domain."""
    return f"f1_{Path(domain).stem}"


def _united(parts: Sequence[tuple[str, TextData, TextSplit]], labels: Sequence[str]) -> TextSplit:
    known = [_in_order(split.labels, data.label_names, labels) for _, data, split in parts]
    texts = tuple(text for _, _, split in parts for text in split.texts)
    domains = [name for name, _, split in parts for _ in range(len(split))]
    return TextSplit(np.concatenate(known), {DOMAIN: domains}, texts, None)


def _in_order(
    labels: npt.NDArray[np.generic], own: Sequence[str], wanted: Sequence[str]
) -> npt.NDArray[np.float32]:
    """Return the domain's labels as float32 ``[rows, wanted]``; NaN for labels that it lacks."""
    several = labels if labels.ndim == 2 else np.eye(len(own))[labels]
    found = np.full((len(labels), len(wanted)), np.nan, dtype=np.float32)
    for place, label in enumerate(wanted):
        if label in own:
            found[:, place] = several[:, own.index(label)]
    return found
