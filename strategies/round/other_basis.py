"""Replies from other bases than the broadcast model: whose coordinates a round is in, who matches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import INFO, WARNING
from typing import NamedTuple

import torch
from flwr.app import ConfigRecord, Message
from flwr.common import log
from flwr.serverapp import Grid
from torch import Tensor, nn

from fedrot.anchors import SAME_BASIS, AlignedUpdate, Evidence, base_cosine
from fedrot.check import check_function
from fedrot.collect.activations import probing
from fedrot.collect.random_inputs import reads_text
from fedrot.errors import SymmetryError, UpdateError
from fedrot.options import AlignmentOptions
from fedrot.strategies.client_matching import OTHER_BASIS_OPTIONS, read_answer, request
from fedrot.strategies.round.inbox import Reply
from fedrot.strategies.round.round_report import Round
from fedrot.symmetry import Symmetry
from fedrot.symmetry.resolve import settings_of
from fedrot.tensors import Tensors, check_finite


class Exchange(NamedTuple):
    """How clients are asked once more in a round."""

    grid: Grid
    config: ConfigRecord
    timeout: float | None

    def of(self, requests: Sequence[Message]) -> Iterable[Message]:
        """Send requests, and return the answers that come in time."""
        return self.grid.send_and_receive(requests, timeout=self.timeout) if requests else ()


class OtherBasis:
    """How a strategy treats replies in another basis; see ``Aligned`` for the arguments.

    Attributes:
        options: what to align in them; None treats them like all others.
        evidence: activations on random tokens, once the model has proved to be what its names say.
    """

    def __init__(
        self,
        options: AlignmentOptions | None,
        model: Callable[[], nn.Module] | None,
        match_at_clients: bool,
    ) -> None:
        self.options = options
        self.model = model
        self.match_at_clients = match_at_clients
        self.evidence: Evidence | None = None
        self._prepared = False

    @property
    def needs_all(self) -> bool:
        """Whether who is the anchor, or who is asked to match, depends on all replies of a round."""
        return self.options is not None and (self.match_at_clients or "residual" in self.options.parts)

    def prepare(self, symmetry: Symmetry) -> None:
        """Make sure, once, that the model is what its names say before its residual stream is moved.

        Raises:
            SymmetryError: it is not.
        """
        if self._prepared or self.model is None:
            return
        # Building a model draws random numbers, which a resumed run would draw in another round.
        with torch.random.fork_rng(devices=[]):
            model = self.model()
        config = settings_of(model.config)
        parts = OTHER_BASIS_OPTIONS.parts if self.options is None else self.options.parts
        try:
            check_function(model, config, symmetry, parts)
        except SymmetryError as error:
            raise SymmetryError(
                "Replies from other bases cannot be matched with this 'model'. Leave the argument out "
                f"to align them like all others, or give 'other_basis' with fewer parts. {error}"
            ) from error
        self.options = self.options or OTHER_BASIS_OPTIONS
        if reads_text(config):
            self.evidence = probing(self.model, config, symmetry)
        self._prepared = True

    def base(
        self, replies: Sequence[Reply], other_basis: Sequence[int], broadcast: Tensors
    ) -> Mapping[str, Tensor]:
        """Return whose coordinates the round is in: the broadcast model's, unless few share them.

        Args:
            replies: all of the round's.
            other_basis: the places of those in another basis.
        """
        matched = self.options is not None and "residual" in self.options.parts
        if not matched or 2 * len(other_basis) <= len(replies):
            return broadcast
        heaviest = max((replies[index] for index in other_basis), key=lambda reply: reply.weight)
        log(
            INFO,
            "%d of %d replies come from other bases; the anchor is client %d's model.",
            len(other_basis),
            len(replies),
            heaviest.client,
        )
        return heaviest.tensors

    def matched_at_clients(
        self,
        replies: Sequence[Reply],
        base: Tensors,
        symmetry: Symmetry,
        exchange: Exchange,
        this_round: Round,
    ) -> dict[int, AlignedUpdate]:
        """Return the updates that their senders matched to the base, by place among the replies."""
        asked, requests = {}, []
        for index, reply in enumerate(replies):
            if in_other_basis(reply, base, symmetry):
                node = reply.message.metadata.src_node_id
                asked[node] = index
                requests.append(request(base, reply.tensors, exchange.config, node))
        found: dict[int, AlignedUpdate] = {}
        for answer in this_round.waited(exchange.of(requests)):
            index = asked.get(answer.metadata.src_node_id, -1)
            if index < 0 or index in found:
                continue
            reply = replies[index]
            try:
                alignment = read_answer(answer, reply.tensors, base, symmetry)
                moved = alignment.apply(reply.tensors)
                check_finite(moved)
            except UpdateError as error:
                log(WARNING, "Client %d is matched at the server: %s", reply.client, error)
                continue
            found[index] = AlignedUpdate(moved, reply.weight, alignment)
        return found

    def warn(self, other_basis: int, replies: int) -> None:
        """Say how many replies in another basis were aligned like all others, as nothing else was
        asked for."""
        if other_basis and self.options is None and self.model is None:
            log(
                WARNING,
                "%d of %d replies seem not to have started from the broadcast model. Does the ClientApp "
                "load it? If these clients have starts of their own, give the strategy 'model' to match "
                "them as a whole.",
                other_basis,
                replies,
            )


def in_other_basis(reply: Reply, base: Tensors, symmetry: Symmetry) -> bool:
    """Return whether a reply comes from another basis."""
    return base_cosine(reply.tensors, base, symmetry) < SAME_BASIS
