"""Masks of the rows that a client has trained; only these rows are averaged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from fedrot.collect.statistics import TRAINED, Collected, along_rows
from fedrot.errors import UpdateError
from fedrot.tensors import TensorDict, Tensors, check_update


def completed(
    update: Tensors,
    received: Tensors,
    rows: Mapping[str, Iterable[int]] | None = None,
) -> tuple[TensorDict, Collected]:
    """Complete a partly trained update with the received tensors, and mark them.

    They are marked as not trained.

    Args:
        update: the client's tensors; tensors that it has not trained (a task head) may
            be absent.
        received: the model that the client received, with every tensor.
        rows: by tensor, the rows that the client trained, such as the labels in its
            data for the weight and bias of a classifier. The other rows are replaced by
            the received rows.

    Returns the complete update, and its statistics ``{"trained": masks}`` for
    ``fedrot.aggregation``.

    Raises:
        UpdateError: a tensor was not received or has another shape, or ``rows`` names a
            tensor or row that is not in the update.
    """
    rows = rows or {}
    for name in (*update, *rows):
        if name not in received:
            raise UpdateError(f"The tensor '{name}' is not part of the received model.")
    shapes = {name: tensor.shape for name, tensor in received.items()}
    full = {**received, **update}
    check_update(full, shapes)
    masks = {name: torch.tensor(False) for name in received if name not in update}
    for name, chosen in rows.items():
        mask = torch.zeros(len(received[name]), dtype=torch.bool)
        places = list(chosen)
        if places and name not in update:
            raise UpdateError(
                f"rows names the tensor '{name}', which is not in the update."
            )
        if any(not 0 <= place < len(mask) for place in places):
            raise UpdateError(
                f"The tensor '{name}' has {len(mask)} rows, but rows names {places}."
            )
        mask[places] = True
        masks[name] = mask
        trained = along_rows(mask, full[name])
        full[name] = torch.where(trained, full[name], received[name])
    return full, {TRAINED: masks} if masks else {}
