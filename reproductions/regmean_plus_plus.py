"""``regmean_plus_plus``: RegMean layer by layer, on the inputs that the merged layers before produce."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from fedrot.aggregation.mean import Mean
from fedrot.aggregation.regmean import RegMean
from fedrot.collect.gram import collect_gram
from fedrot.collect.statistics import TRAINED
from fedrot.errors import FedrotError
from fedrot.tensors import Tensors


@dataclass(frozen=True)
class Candidate:
    """A model to merge, with the data that it was trained on.

    Attributes:
        tensors: in the coordinates of the other candidates.
        weight: of its data, such as the number of rows.
        batches: returns keyword arguments of the model's forward, anew at every call; ``labels`` are not
            passed on.
        trained: masks of the rows that it was trained on, as ``fedrot.completed`` returns them.
    """

    tensors: Tensors
    weight: float
    batches: Callable[[], Iterable[Tensors]]
    trained: Tensors | None = None


def regmean_plus_plus(
    model: nn.Module, candidates: Sequence[Candidate], alpha: float = 0.9, max_batches: int | None = 100
) -> dict[str, Tensor]:
    """Return the merged tensors by RegMean++ (Nguyen et al., arXiv 2508.03121).

    RegMean takes the inputs of a layer from each candidate as a whole. The merged model's layer sees
    other inputs: those that the merged layers before it produce. RegMean++ takes these. Layers are
    merged from first to last. The Gram matrices of a layer come from a model whose earlier layers are
    merged ones, and whose layer is the candidate's. All data have to be in one place.

    Example::

        merged = regmean_plus_plus(model, [
            Candidate(a, 1000, lambda: batches_of_a), Candidate(b, 500, lambda: batches_of_b),
        ])

    Args:
        model: the architecture; its own tensors do not matter, and are not changed.
        candidates: at least one.
        alpha: share of off-diagonal entries, see ``RegMean``.
        max_batches: see ``collect_gram``; every layer reads the batches again.

    Raises:
        FedrotError: there is no candidate, or the model has no list of layers.
        UpdateError: the candidates do not fit each other.
    """
    if not candidates:
        raise FedrotError("There is nothing to merge; give at least one candidate.")
    shell, mean = copy.deepcopy(model).eval(), Mean()
    for candidate in candidates:
        mean.add(candidate.tensors, candidate.weight, _known(candidate, candidate.tensors))
    merged = mean.result()
    for names in merge_order(model):
        merged |= _merged_part(shell, candidates, merged, names, alpha, max_batches)
    return merged


def merge_order(model: nn.Module) -> list[list[str]]:
    """Return the names of the tensors of every layer, first to last, then of what comes after layers.

    What comes before the first layer (embeddings) is left out, and what is tied to it: it is averaged.

    Raises:
        FedrotError: the model has no ``ModuleList`` of layers.
    """
    lists = {
        name: len(m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)
    }
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if not outer:
        raise FedrotError("The model has no list of layers (torch.nn.ModuleList).")
    state = model.state_dict()
    tensors = list(state)
    prefixes = [f"{name}.{i}." for name in outer for i in range(lists[name])]
    layers = [[name for name in tensors if name.startswith(prefix)] for prefix in prefixes]
    inside = {name for layer in layers for name in layer}
    first = min(place for place, name in enumerate(tensors) if name in inside)
    before = {state[name].data_ptr() for name in tensors[:first]}
    behind = [name for name in tensors[first:] if name not in inside]
    return [*layers, [name for name in behind if state[name].data_ptr() not in before]]


def _merged_part(
    shell: nn.Module,
    candidates: Sequence[Candidate],
    merged: Mapping[str, Tensor],
    names: Sequence[str],
    alpha: float,
    max_batches: int | None,
) -> dict[str, Tensor]:
    """Return the tensors of one part of the model; all other tensors are the merged ones."""
    aggregator = RegMean(alpha)
    for candidate in candidates:
        own = {name: candidate.tensors[name] for name in names}
        shell.load_state_dict({**merged, **own})
        grams = collect_gram(shell, candidate.batches(), max_batches=max_batches, names=own)
        if not grams:
            return {}
        aggregator.add(own, candidate.weight, {**grams, **_known(candidate, own)})
    return aggregator.result()


def _known(candidate: Candidate, names: Container[str]) -> dict[str, Tensors]:
    """Return the candidate's masks as statistics."""
    trained = {name: mask for name, mask in (candidate.trained or {}).items() if name in names}
    return {TRAINED: trained} if trained else {}
