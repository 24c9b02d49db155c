"""Groups of arguments of ``FedRot`` and ``Aligned``; each checks itself when it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedrot.collect.token_counts import check_counts
from fedrot.errors import FedrotError
from fedrot.options import AlignmentOptions
from fedrot.strategies.wire.arrays import PRECISIONS


@dataclass(frozen=True)
class OtherBasis:
    """How to align replies from another basis than the broadcast model's.

    Such replies come from clients that trained from an initialisation of their own, or that join late
    with a model of their own. If most replies of a round do and the residual stream is aligned, the one
    with the largest weight is the round's anchor.

    Example: ``FedRot(config, other_basis=OtherBasis(lambda: MyModel(config)))``.

    Attributes:
        model: returns a model of the broadcast architecture. fedrot checks once that alignment preserves
            its function, and then matches replies by weights, and where the residual stream is permuted
            by activations on random tokens, too.
        options: what to align; the whole model if None. Without ``model`` nothing is checked: you assert
            that the model is a standard one of its family.
        at_clients: ask the senders to match their updates on their own data, which needs
            ``match_at_client`` on their ``ClientApp``. Each of them receives two more models per round:
            its update and the anchor, which is another client's update if most are in another basis.
        learning_passes: after matching, the round's clients learn a common basis in so many passes: each
            receives its own model and the mean of the others, takes a few gradient steps on rotations of
            its model (``Matching.learning``), and answers with these. Every pass sends two models to
            each client, which needs ``match_at_client`` on its ``ClientApp``.
        token_counts: how often each token occurs in texts like the clients', ``[vocabulary]``, see
            ``fedrot.align``. If None, the sum of what the round's clients report
            (``token_counts_record``).

    Raises:
        FedrotError: ``model`` is not a function, neither ``model`` nor ``options`` is given, the passes
            are negative, or the counts are none.
    """

    model: Callable[[], nn.Module] | None = None
    options: AlignmentOptions | None = None
    at_clients: bool = False
    learning_passes: int = 0
    token_counts: Tensor | None = None

    def __post_init__(self) -> None:
        kind = type(self.model).__name__
        if isinstance(self.model, nn.Module) or not (self.model is None or callable(self.model)):
            example = kind if isinstance(self.model, nn.Module) else "MyModel"
            raise FedrotError(
                f"OtherBasis was given a {kind} as model, which must be a function that builds one: "
                f"write model=lambda: {example}(config)."
            )
        if self.model is None and self.options is None:
            raise FedrotError("OtherBasis needs 'model', or 'options', or both.")
        if self.learning_passes < 0:
            raise FedrotError(f"learning_passes is {self.learning_passes}; it must not be negative.")
        if self.token_counts is not None:
            check_counts(self.token_counts)


@dataclass(frozen=True)
class Server:
    """How the server runs a round.

    Example: ``FedRot(config, server=Server(device="cuda", min_replies=5))``.

    Attributes:
        min_replies: with fewer accepted replies the round fails, and the model stays as it was.
        device: where updates are aligned and averaged. With the anchors ``global`` and ``running`` a
            GPU holds one model, the mean, and two layers; other anchors and aggregations, and replies in
            another basis, take whole updates there.
        wire: precision in which the model is sent to the clients, float16 or bfloat16; None sends it as
            it is. The server keeps its own precision. Clients read the model with ``from_arrays``, and
            may answer in any precision.
        spill: a folder for updates that wait for others; None keeps them in memory.
        deterministic: take replies in an order that depends on their contents, not on who answers first,
            so that two runs agree to the last bit. No client can choose its place. This keeps all of a
            round's updates until every reply has arrived.

    Raises:
        FedrotError: ``min_replies`` is below 1, ``wire`` is no precision, or ``spill`` no folder.
    """

    min_replies: int = 1
    device: str | torch.device = "cpu"
    wire: torch.dtype | None = None
    spill: str | Path | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.min_replies < 1:
            raise FedrotError(f"min_replies is {self.min_replies}; a round needs 1 reply at least.")
        if self.wire is not None and self.wire not in PRECISIONS:
            raise FedrotError(f"wire is {self.wire!r}; choose from {', '.join(map(str, PRECISIONS))}.")
        if isinstance(self.spill, bool):
            raise FedrotError(f"spill is {self.spill}; give the folder for updates that wait.")


@dataclass(frozen=True)
class Checkpointing:
    """Where the run writes checkpoints, see docs/how-to/checkpoints.md.

    A run whose folder has checkpoints goes on after the newest valid one.

    Example: ``FedRot(config, checkpoints=Checkpointing("runs/tuesday"))``.

    Attributes:
        folder: receives a checkpoint after every round. It may be empty or missing.
        keep: the number of newest checkpoints that stay.
    """

    folder: str | Path
    keep: int = 3


@dataclass(frozen=True)
class Reporting:
    """Where a run reports what happened.

    Example: ``FedRot(config, reporting=Reporting(rows="alignment.jsonl"))``.

    Attributes:
        rows: a JSON-lines file: one row per round, client and group, one per reply that was dropped or
            failed, and one per round and stage with its metrics.
        on_round: called as ``on_round(1, {"train/loss": 0.5, ...})`` after each stage of a round
            (``train``, ``evaluate``, ``server``) with its metrics, for trackers
            (docs/how-to/deploy.md).
        all_metrics: add every metric of docs/reference/metrics.md to a round's metrics, not only the
            default ones.

    Raises:
        FedrotError: ``rows`` is a folder, or ``on_round`` no function.
    """

    rows: str | Path | None = None
    on_round: Callable[[int, dict[str, float]], object] | None = None
    all_metrics: bool = False

    @property
    def rows_path(self) -> Path | None:
        """``rows`` as a path."""
        return Path(self.rows) if self.rows is not None else None

    def __post_init__(self) -> None:
        if self.rows_path is not None and self.rows_path.is_dir():
            raise FedrotError(f"rows is the folder '{self.rows}'; give a file in it, rows.jsonl, say.")
        given: object = self.on_round
        if not (given is None or callable(given)):
            kind = type(given).__name__
            raise FedrotError(f"on_round is a {kind}; give a function of a round's number and metrics.")
