"""``OrderedGrid``: the nodes of a run, ordered by partition id."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Sequence
from logging import INFO

from flwr.app import Message, MessageType, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from fedrot.strategies.lazy_grid import LazyGrid
from fedrot.strategies.round.inbox import client_id

#: Seconds between two requests for replies; Flower's default of seconds is too long for short rounds.
PAUSE = 0.02


class OrderedGrid(LazyGrid):
    """A grid of ``nodes`` nodes, ordered by partition id.

    Node ids are random. Without this order, two runs with one seed would sample different clients.

    Raises:
        RuntimeError: the nodes do not have the partition ids 0 to ``nodes - 1``.
    """

    def __init__(self, grid: Grid, nodes: int) -> None:
        super().__init__(grid)
        self._nodes = list(grid.get_node_ids())
        while len(self._nodes) < nodes:
            log(INFO, "Waiting for nodes: %d of %d are connected.", len(self._nodes), nodes)
            time.sleep(1.0)
            self._nodes = list(grid.get_node_ids())
        query = MessageType.QUERY
        questions = [Message(RecordDict(), dst_node_id=n, message_type=query) for n in self._nodes]
        answers = self.send_and_receive(questions)
        own = {m.metadata.src_node_id: client_id(m) for m in answers if m.has_content()}
        if sorted(own.values()) != list(range(nodes)):
            raise RuntimeError(
                f"The {len(self._nodes)} nodes have the partition ids {sorted(own.values())}, but the "
                f"configuration has {nodes} clients. Start one node per partition id 0 to {nodes - 1}."
            )
        self._nodes.sort(key=own.__getitem__)

    def pause(self, seconds: float) -> None:
        time.sleep(min(seconds, PAUSE))

    def get_node_ids(self) -> Iterable[int]:
        return list(self._nodes)

    def of(self, clients: Sequence[int]) -> OrderedGrid:
        """Return the grid of the nodes with these partition ids."""
        grid = copy.copy(self)
        grid._nodes = [self._nodes[client] for client in clients]
        return grid
