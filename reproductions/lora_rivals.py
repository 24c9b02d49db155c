"""Rival ways to average LoRA adapters: HetLoRA, FedRot-LoRA, FedEx-LoRA, FLoRA,
FFA-LoRA and RoLoRA.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedrot.aggregation.mean import Mean
from fedrot.errors import FedrotError, UpdateError
from fedrot.lora.adapters import LoraSettings, Pair, wide_factors
from fedrot.lora.averaging import AdapterOptions
from fedrot.lora.gauges import GAUGES, Factors, Wanted, gauged, near_mean
from fedrot.lora.methods import METHODS, Method, mean
from fedrot.lora.module_sums import AveragedModule, Merge, ModuleSums, Plan
from fedrot.lora.products import Terms
from fedrot.matching.procrustes import polar

#: Which factors clients train.
SCHEDULES = ("both", "freeze-a", "alternate")
#: Factors that decide a rotation.
ROTATED_BY = ("both", "alternate")
#: What happens to the part that the factors cannot hold.
RESIDUALS = ("drop", "fold")
#: A factor that differs by this share from the one that was sent has been trained.
FROZEN = 0.01
SMALLEST = 2.0**-24
_RESIDUAL = ".residual"

#: Name of one of the two.
Factor = Literal["A", "B"]
T = TypeVar("T")


def residual_name(pair: Pair) -> str:
    """Return the name of what a module's base weights receive: a dense ``[out, in]``
    matrix.
    """
    return f"{pair.module}{_RESIDUAL}"


def without_residuals(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return an adapter without what is for the base weights."""
    return {
        name: tensor for name, tensor in tensors.items() if not name.endswith(_RESIDUAL)
    }


@dataclass(frozen=True)
class RivalOptions(AdapterOptions):
    """Options for averages of adapters by rivals.

    Attributes:
        method: ``mean`` and ``exact`` of ``AdapterOptions``, and three more. ``pad``
            averages the factors of clients of different ranks: smaller factors are
            padded with zeros (as HetLoRA, which also weights clients by the size of
            their updates and prunes). ``rotate`` rotates each client's factors to those
            that it received, or to the mean so far, and averages them. ``stack`` adds
            the mean product to the base weights, and begins anew with a random ``A``
            and ``B = 0`` (FLoRA); it needs ``residual="fold"``.
        gauge: of ``exact``, those of ``AdapterOptions``, and ``mean``.
        strength: of ``rotate``: 1 applies the best rotation, 0 applies none.
        by: of ``rotate``: ``both`` computes the rotation from ``A`` and ``B``;
            ``alternate`` from ``A`` in odd rounds and from ``B`` in even ones
            (FedRot-LoRA).
        limit: a sum of products with more than twice so many terms is cut to this rank.
            None: four times the largest rank, the result's if that is larger. ``fold``
            ignores it, and keeps all.
        residual: the difference between the mean product and the product of the new
            factors. ``drop`` discards it. ``fold`` adds it to the base weights (with
            ``mean``: FedEx-LoRA). Clients receive its sum over the rounds as a dense
            matrix for each module, see ``reproductions.lora_clients.load_folded``.
        schedule: of ``mean``, the factors that clients train: ``both``; ``B`` alone
            (``freeze-a``, FFA-LoRA); or ``B`` in odd and ``A`` in even rounds
            (``alternate``, RoLoRA). The mean is exact where one factor is the same at
            all clients.

    Raises:
        FedrotError: a value is unknown, or two of them do not go together.
    """

    strength: float = 1.0
    by: str = "both"
    limit: int | None = None
    residual: str = "drop"
    schedule: str = "both"

    def __post_init__(self) -> None:
        super().__post_init__()
        known = {"by": ROTATED_BY, "residual": RESIDUALS, "schedule": SCHEDULES}
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise FedrotError(
                    f"Unknown {name} '{getattr(self, name)}' of adapters; one of "
                    f"{', '.join(values)}."
                )
        if not isinstance(self.strength, int | float) or not 0 <= self.strength <= 1:
            raise FedrotError(
                f"strength is {self.strength!r}; it is a number from 0 to 1."
            )
        if self.limit is not None and (
            not isinstance(self.limit, int) or self.limit < 1
        ):
            raise FedrotError(f"limit is {self.limit!r}; it is a rank, 1 at least.")
        for name in ("strength", "by"):
            if self.method != "rotate" and getattr(self, name) != getattr(
                type(self), name
            ):
                raise FedrotError(
                    f"{name} is an option of method 'rotate', and does nothing with "
                    f"'{self.method}'."
                )
        if self.schedule != "both" and self.method != "mean":
            raise FedrotError(
                f"schedule is '{self.schedule}', but method '{self.method}' changes "
                "both factors. Take method='mean': it is exact where one factor is "
                "frozen."
            )
        if self.schedule == "freeze-a" and self.folds:
            raise FedrotError(
                "Where A is frozen the mean is exact: there is nothing to fold."
            )
        if self.method == "stack" and not self.folds:
            raise FedrotError(
                "Method 'stack' begins anew with a product of 0 in every round, and "
                "what clients have learned would be lost. Give residual='fold', which "
                "adds it to the base weights."
            )

    def __str__(self) -> str:
        others = {
            "residual": self.residual != "drop",
            "schedule": self.schedule != "both",
        }
        said = (
            f", {name} '{getattr(self, name)}'"
            for name, differs in others.items()
            if differs
        )
        return super().__str__() + "".join(said)

    @property
    def folds(self) -> bool:
        """Whether clients receive a residual for their base weights."""
        return self.residual == "fold"

    def frozen(self, server_round: int) -> Factor | None:
        """Return the factor that clients do not train in a round; rounds count from
        1.
        """
        if self.schedule == "both":
            return None
        return "A" if self.schedule == "freeze-a" or server_round % 2 else "B"

    def trained(self, server_round: int) -> str:
        """Return the factors that clients train in a round: A, B or both."""
        return {None: "both", "A": "B", "B": "A"}[self.frozen(server_round)]

    def rotates_by(self, server_round: int) -> Factor | None:
        """Return the factor that alone decides the rotations of a round, None for
        both.
        """
        if self.by == "both":
            return None
        return "A" if server_round % 2 else "B"

    @property
    def averaging(self) -> Method:
        """The entry of the method, with sums by these options."""
        return replace(METHODS[self.method], sums=partial(RivalSums, self))


def rotation(
    factors: Factors, to: Factors, strength: float = 1.0, by: Factor | None = None
) -> Tensor:
    """Return the ``R`` ``[rank, rank]`` for which ``R A`` and ``B R^T`` are nearest to
    others.

    One factor alone, ``by``, may find a rotation that is not there. A ``strength``
    below 1 goes a part of the way: ``polar((1 - strength) I + strength R)``.
    """
    a, b = factors
    near_a, near_b = to[0] @ a.mT, to[1].mT @ b
    r = polar({"A": near_a, "B": near_b, None: near_a + near_b}[by].double())
    if strength < 1:
        identity = torch.eye(len(r), dtype=r.dtype, device=r.device)
        r = polar((1 - strength) * identity + strength * r)
    return r.to(a)


class RivalSums(ModuleSums):
    """The sums of one module by ``RivalOptions``; the plan's ``previous`` may have
    residuals.

    ``mean`` is that of the factors as the clients sent them, ``used`` that of the
    rotated ones.
    """

    def __init__(self, options: RivalOptions, pair: Pair, plan: Plan) -> None:
        super().__init__(pair, plan)
        self.options, self.frozen = options, options.frozen(plan.server_round)
        self.used = Mean() if options.method == "rotate" else self.mean

    def check(self, a: Tensor, b: Tensor, settings: LoraSettings) -> None:
        """Raise ``UpdateError`` as ``ModuleSums``; or if a frozen factor was
        trained.
        """
        super().check(a, b, settings)
        self._padding(a)
        received = self.received(a)
        if self.frozen is None or received is None or received[0].shape != a.shape:
            return
        of_a = self.frozen == "A"
        name, own, sent = (
            (self.pair.a, a, received[0]) if of_a else (self.pair.b, b, received[1])
        )
        # Rounding on the wire is no training, that to float16's smallest numbers
        # neither.
        allowed = (
            FROZEN * torch.linalg.vector_norm(sent) + SMALLEST * sent.numel() ** 0.5
        )
        if torch.linalg.vector_norm(own - sent) > allowed:
            raise UpdateError(
                f"The factor '{name}' is not the one that the client received, but "
                f"{self.frozen} is frozen in this round. Call "
                "reproductions.lora_clients.train_only(model, config) before the "
                "client trains."
            )

    def add(self, sent: Factors, weight: float) -> None:
        """Add the factors of one client, rotated to what it received or to the mean so
        far if asked.
        """
        used, padding = self._used(sent), self._padding(sent[0])
        (a, b), self.products.limit = used, self.limit(*sent)
        self.products.add(b, a, weight)
        self.ranks.add(len(a) + padding)
        self.weight += weight
        if len(self.ranks) == 1:
            if self.used is not self.mean:
                self.used.add({"a": a, "b": b}, weight)
                a, b = sent
            if padding:
                a, b = pad(a, (0, 0, 0, padding)), pad(b, (0, padding))
            self.mean.add({"a": a, "b": b}, weight)

    def limit(self, a: Tensor, b: Tensor) -> int:
        """Return the rank that a module's sum keeps: with a residual as much as a
        product can have.
        """
        if self.options.folds:
            return min(len(b), a.shape[1])
        if self.options.limit is None:
            return super().limit(a, b)
        return max(self.options.limit, self.plan.rank or 0)

    def wanted(self, terms: Terms, rank: int) -> Wanted:
        """Return the mean product, and the factors that were used; a frozen one stays
        as it was.
        """
        found, scale = (
            super().wanted(terms, rank),
            self.plan.settings.scale(self.pair.module, rank),
        )
        near = self._used_factors(scale)
        if near is None or len(near[0]) != rank:
            return replace(found, mean=None)
        if self.frozen and found.previous:
            (a, b), (old_a, old_b) = near, found.previous
            near = (old_a, b) if self.frozen == "A" else (a, old_b)
        return replace(found, mean=near)

    def averaged(self, merge: Merge, like: Mapping[str, Tensor]) -> AveragedModule:
        """Return the average of a module, with its residual."""
        found, name = super().averaged(merge, like), residual_name(self.pair)
        before = (self.plan.previous or {}).get(name)
        if not self.options.folds:
            kept = {} if before is None else {name: before}
            return replace(found, tensors={**found.tensors, **kept})
        a, b = wide_factors(found.tensors, self.pair)
        left, right = self.products.stacks
        rest = left.mT @ right / self.weight - found.scale * b @ a  # [out, in]
        residual = rest if before is None else rest + before.to(rest)
        return replace(found, tensors={**found.tensors, name: residual}, error=0.0)

    def _used_factors(self, scale: float) -> Factors | None:
        if len(self.ranks) > 1:
            return None
        return self.used.current["a"], self.used.current["b"] / scale

    def _used(self, sent: Factors) -> Factors:
        a, b = sent
        if self.options.method != "rotate":
            return sent
        scale = self.plan.settings.scale(self.pair.module, len(a))
        to = self.received(a) or (self._used_factors(scale) if self.weight else None)
        if to is None or to[0].shape != a.shape:
            return sent
        own, by = (a, b / scale), self.options.rotates_by(self.plan.server_round)
        r = rotation(own, to, self.options.strength, by)
        return r @ a, scale * (own[1] @ r.mT)

    def _padding(self, a: Tensor) -> int:
        """Return by how much the rank of a client's factors is smaller than the
        result's.
        """
        if self.options.method != "pad":
            return 0
        received = self.received(a)
        if received is None:
            raise UpdateError(
                "Method 'pad' pads factors to the rank of the adapter that the clients "
                "received. Give it as previous."
            )
        return max(len(received[0]) - len(a), 0)


def anew(sums: ModuleSums, terms: Terms, rank: int) -> Factors:
    """Return a start of LoRA as PEFT draws it: ``A`` uniform, for embeddings normal,
    and ``B = 0``.
    """
    of_embedding = sums.pair.of_embedding
    seed = zlib.crc32(f"{sums.pair.module} {sums.plan.server_round}".encode())

    def start(of: Wanted) -> Factors:
        draw = torch.randn if of_embedding else torch.rand
        drawn = draw(
            of.vt.shape,
            generator=torch.Generator().manual_seed(seed),
            dtype=torch.float64,
        )
        a = drawn if of_embedding else (2 * drawn - 1) * of.vt.shape[1] ** -0.5
        return a.to(of.vt), torch.zeros_like(of.u)

    return gauged(start, sums.wanted(terms, rank), of_embedding)


def _by_name(method: str, pair: Pair, plan: Plan) -> RivalSums:
    return RivalSums(RivalOptions(method), pair, plan)


METHODS |= {
    "pad": Method(mean, any_rank=True, sums=partial(_by_name, "pad")),
    "rotate": Method(mean, sums=partial(_by_name, "rotate")),
    "stack": Method(anew, any_rank=True, sums=partial(_by_name, "stack")),
}
GAUGES["mean"] = near_mean
