"""Arms through the same rounds: local training, averages, fitted heads, refused
rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reproductions.heads.arms import Arm
from reproductions.heads.cell import Cell
from reproductions.heads.federation import Federation, Model, epoch


def clients_of(
    cell: Cell, number: int, rng: np.random.Generator | None = None
) -> list[int]:
    """Return the half of the clients that trains in a round."""
    rng = rng or np.random.default_rng([cell.seed, 3, number])
    return sorted(rng.choice(cell.clients, cell.clients // 2, replace=False).tolist())


def average(
    federation: Federation, arm: Arm, flat: Tensor, variates: list[Tensor], number: int
) -> Tensor:
    """Return the average of half of the clients; SCAFFOLD's variates, the server's
    last, are updated.
    """
    cell, ends, server = federation.cell, [], variates[-1]
    rng, batches = np.random.default_rng([cell.seed, 3, number]), cell.batches(number)
    clients = clients_of(cell, number, rng)
    if arm.everyone:
        rows = rng.permutation(np.concatenate(batches))
        return epoch(federation.loss, flat, rows, arm)[0]
    for client in clients:
        shift = -(np.maximum(cell.counts[client], 1e-8) ** -0.25) * arm.shifted
        offset = torch.from_numpy(shift).float()
        loss = partial(federation.loss, offset=offset)
        correction = server - variates[client] if arm.scaffold else 0.0
        end, gradient = epoch(loss, flat, batches[client], arm, correction)
        ends.append(end)
        variates[-1] = variates[-1] + (gradient - variates[client]) / cell.clients
        variates[client] = gradient
    return federation.mean(ends, clients)


def averaged(
    federation: Federation, arm: Arm, flat: Tensor, variates: list[Tensor], number: int
) -> Tensor:
    """Return `average`; arms in succession that differ only in a head fitted at the end
    share their rounds.
    """
    if arm.scaffold or arm.fit == "every":
        return average(federation, arm, flat, variates, number)
    like = replace(arm, fit="never", head="lda")
    if federation.shared[0] != like:
        federation.shared = like, {}
    rounds = federation.shared[1]
    if number not in rounds:
        rounds[number] = average(federation, arm, flat, variates, number)
    return rounds[number]


def candidates(
    federation: Federation, arm: Arm, old: Model, new: Tensor, last: bool
) -> dict[str, Model]:
    """Return the models from which a round takes the one with the lowest held-out loss,
    by name.
    """
    if arm.fit != "every" and not (last and arm.fit == "last"):
        return {"1": federation.evaluate(new)}
    bodies = {f"{step:g}": old.flat.lerp(new, step) for step in arm.steps}
    found = {name: federation.evaluate(body, arm.head) for name, body in bodies.items()}
    return {"old": old, **found} if arm.old else found


def play(federation: Federation, arm: Arm, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each round, the last with measures of test rows; of untrained
    arms for round 0.
    """
    for number, taken, model in models(federation, arm, rounds):
        row = {"round": number, "held_loss": model.losses.mean()}
        if number:
            row["taken"] = taken
        last = number == rounds or not arm.rate
        yield row | federation.measure(model) if last else row


def models(
    federation: Federation, arm: Arm, rounds: int
) -> Iterator[tuple[int, str, Model]]:
    """Yield the number, the candidate that is taken, and the model of each round; of
    untrained arms the first model.
    """
    model = federation.evaluate(federation.start, arm.start)
    if not arm.rate:
        yield 0, "", model
    variates = [torch.zeros_like(model.flat)] * (federation.cell.clients + 1)
    for number in range(1, rounds + 1) if arm.rate else ():
        new = averaged(federation, arm, model.flat, variates, number)
        found = candidates(federation, arm, model, new, number == rounds)
        taken = min(found, key=lambda name: found[name].losses.mean())
        model = found[taken]
        yield number, taken, model


def play_all(federation: Federation, arm: Arm, rounds: int) -> Model:
    """Return the model after the last round."""
    *_, (_, _, model) = models(federation, arm, rounds)
    return model
