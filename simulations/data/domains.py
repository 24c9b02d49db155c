"""Several data sets as the domains of one task. Each domain has its own labels and test rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedrot.simulations.data.labels import DataSet
from fedrot.simulations.data.read import DataError, listed
from fedrot.simulations.data.texts import TextData, TextSplit, load_texts

if TYPE_CHECKING:
    from fedrot.simulations.settings import Experiment

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


def load_domains(experiment: Experiment) -> TextData:
    """Load texts; several names in ``data``, or ``unseen_data``, are the domains of one task.

    The labels of the task are the labels of all sets in ``data``; equal names are one label. Limits are
    per domain. Of unseen domains, the test rows and the labels of the task are kept.

    Raises:
        DataError: as ``load_texts``; also if a name occurs twice, if a data set has scores, pairs or
            classes without names, or if an unseen domain has none of the labels.
    """
    names, unseen = (
        tuple(filter(None, map(str.strip, names.split(","))))
        for names in (experiment.data, experiment.unseen_data)
    )
    every = (*names, *unseen)
    if len(every) == 1:
        return load_texts(experiment.model_copy(update={"data": every[0]}))
    twice = next((name for name in every if every.count(name) > 1), None)
    if twice:
        raise DataError(f"the data set '{twice}' is named twice; name every domain once")
    if len(set(map(metric_of, every))) < len(every):
        raise DataError(f"two domains have the same file name among {listed(every)}; rename one")
    loaded = {name: load_texts(experiment.model_copy(update={"data": name})) for name in every}
    for name, data in loaded.items():
        if data.kind == "single" and all(
            label.removeprefix("-").isdigit() for label in data.label_names
        ):
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
    return DomainData(
        ",".join(names),
        "multi",
        labels,
        (SEEN, *([UNSEEN] if unseen else []), *map(metric_of, every)),
        _united({name: (loaded[name], loaded[name].train) for name in names}, labels),
        _united({name: (data, data.test) for name, data in loaded.items()}, labels),
        names,
        unseen,
        note=" ".join(filter(None, (data.note for data in loaded.values()))),
        said=" ".join(filter(None, (data.said for data in loaded.values()))),
    )


def metric_of(domain: str) -> str:
    """Return the metric's name for the macro F1 of one domain."""
    return f"f1_{Path(domain).stem}"


def _united(parts: dict[str, tuple[TextData, TextSplit]], wanted: Sequence[str]) -> TextSplit:
    labels = np.concatenate([_in_order(s.labels, d.label_names, wanted) for d, s in parts.values()])
    texts = tuple(text for _, split in parts.values() for text in split.texts)
    domains = [name for name, (_, split) in parts.items() for _ in range(len(split))]
    return TextSplit(labels, {DOMAIN: domains}, texts, None)


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
