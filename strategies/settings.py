"""Groups of arguments of ``FedRot`` and ``Aligned``; their constructors check them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedrot._io import append_rows
from fedrot.errors import FedrotError
from fedrot.options import AlignmentOptions
from fedrot.strategies.arguments import check_functions
from fedrot.strategies.resume.checkpoints import Checkpointing as Checkpointing
from fedrot.strategies.wire.arrays import Precision, check_precision


@dataclass(frozen=True)
class OtherBasis:
    """How to align replies from another basis than the broadcast model's.

    Such replies come from clients that trained from a different initialisation, or that
    join late with their own model. If most replies of a round come from another basis
    and the residual stream is aligned, the reply with the largest weight is the round's
    anchor.

    Example: ``FedRot(config, other_basis=OtherBasis(lambda: MyModel(config)))``.

    Attributes:
        model: returns a model of the broadcast architecture. fedrot checks once that
            alignment preserves its function, and then matches replies by weights; if
            the residual stream is permuted, also by activations on random tokens.
        options: what to align; the whole model if None. Without ``model`` nothing is
            checked: you assert that the model is a standard model of its family.
        at_clients: ask the senders to match their updates on their own data, which
            needs ``match_at_client`` on their ``ClientApp``. Each sender receives two
            more models per round: its update and the anchor, which is another client's
            update if most are in another basis.
        learning_passes: number of passes in which the round's clients learn a common
            basis after matching. In a pass, each client receives its model and the mean
            of the others, takes a few gradient steps on rotations of its model
            (``Matching.learning``), and answers with the rotations. This needs
            ``match_at_client`` on the ``ClientApp``.

    Raises:
        FedrotError: ``model`` is not a function, neither ``model`` nor ``options`` is
            given, or the passes are negative.
    """

    model: Callable[[], nn.Module] | None = None
    options: AlignmentOptions | None = None
    at_clients: bool = False
    learning_passes: int = 0

    def __post_init__(self) -> None:
        check_functions(self, "model")
        if self.model is None and self.options is None:
            raise FedrotError("OtherBasis needs 'model' or 'options', or both.")
        if self.learning_passes < 0:
            raise FedrotError(
                f"learning_passes is {self.learning_passes}; it must not be negative."
            )


@dataclass(frozen=True)
class Server:
    """How the server runs a round.

    Example: ``FedRot(config, server=Server(device="cuda", min_replies=5))``.

    Attributes:
        min_replies: with fewer accepted replies the round fails, and the model does not
            change.
        device: where updates are aligned and averaged. With the anchors ``global`` and
            ``running`` a GPU holds one model, the mean, and two layers; other anchors
            and aggregations, and replies in another basis, need whole updates there.
        wire: precision of the model that is sent to the clients, float16 or bfloat16;
            None sends it unchanged. The server's model keeps its precision. Clients
            read the model with ``from_arrays``, and may answer in any precision.
        deterministic: sort replies by their contents, not by arrival, so that two runs
            are identical in every bit. No client can choose its place. All updates of a
            round are then held until every reply has arrived.

    Raises:
        FedrotError: ``min_replies`` is below 1, or ``wire`` is not a precision.
    """

    min_replies: int = 1
    device: str | torch.device = "cpu"
    wire: Precision = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.min_replies < 1:
            raise FedrotError(
                f"min_replies is {self.min_replies}; it must be at least 1."
            )
        check_precision("wire", self.wire)


@dataclass(frozen=True)
class Reporting:
    """Where a run reports its rounds.

    Example: ``FedRot(config, reporting=Reporting(rows="alignment.jsonl"))``.

    Attributes:
        rows: a JSON-lines file: one row per round, client and group, one row per
            dropped or failed reply, one row per round and stage with its metrics
            (docs/reference/metrics.md).
        hashes: add the ``model_hash`` of every averaged update, as it was received, and
            of the model before and after each round, for ``fedrot report ROWS --verify
            CHECKPOINTS``. A round with four BERT-base updates needs 1.3 times the CPU
            time, without alignment 2.6 times.
        on_round: called as ``on_round(1, {"train/loss": 0.5, ...})`` after each stage
            of a round (``train``, ``evaluate``, ``server``) with its metrics, for
            trackers (docs/how-to/checkpoints.md).

    Raises:
        FedrotError: ``rows`` is a folder, or missing with ``hashes``; ``on_round`` is
            not a function.
    """

    rows: str | Path | None = None
    on_round: Callable[[int, dict[str, float]], object] | None = None
    hashes: bool = False

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append to the file of rows, if there is one."""
        if self.rows_path:
            append_rows(self.rows_path, rows)

    @property
    def rows_path(self) -> Path | None:
        """``rows`` as a path, of a link the file itself."""
        return Path(self.rows).resolve() if self.rows is not None else None

    def __post_init__(self) -> None:
        if self.rows_path and self.rows_path.is_dir():
            raise FedrotError(
                f"rows is the folder '{self.rows}'; give a file in this folder."
            )
        if self.hashes and self.rows is None:
            raise FedrotError(
                "hashes=True needs a file for the hashes: Reporting(rows=...)."
            )
        check_functions(self, "on_round")
