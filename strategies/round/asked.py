"""``Asked``: the requests of a round, and which of them have been answered."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import (
    ConfigRecord,
    Message,
    Metadata,
)
from flwr.serverapp import Grid

from fedrot.errors import UpdateError
from fedrot.strategies.round.update import Question, question_of
from fedrot.strategies.wire.arrays import (
    records_of_type,
)
from fedrot.strategies.wire.lazy_grid import LazyGrid

#: Optional ConfigRecord of a reply with the client's own id, independent of its node
#: id.
CLIENT_RECORD, CLIENT_KEY = "client", "partition-id"


#: Optional ConfigRecord of a reply with settings of the client's adapter, see
#: ``adapter_record``.
ADAPTER_RECORD = "fedrot-adapter"


class Asked:
    """The requests of one round, and which of them have been answered.

    Args:
        messages: metadata of the messages after they were sent, with their ids. None if
            unknown: every reply is then accepted as an answer.
        clients: the clients' own ids by node, as far as clients have sent them in this
            run.
    """

    def __init__(
        self,
        messages: Iterable[Metadata] | None = (),
        clients: dict[int, int] | None = None,
    ) -> None:
        self._known = messages is not None
        self.questions = [
            Question(one.message_id, one.dst_node_id) for one in messages or ()
        ]
        self._asked = set(self.questions)
        self._silent = set(self._asked)
        self._clients = {} if clients is None else clients

    def check(self, message: Message) -> None:
        """Mark a request as answered; raises ``UpdateError`` if it is not open."""
        question = self.question(message)
        if question not in self._asked and not self._known:
            self._asked.add(question)
            self._silent.add(question)
        if question not in self._asked:
            raise UpdateError(
                "It matches no request of this round (late, or of another run)."
            )
        if question not in self._silent:
            raise UpdateError(
                "Its sender has already answered in this round; the first answer is "
                "used."
            )
        self._silent.remove(question)
        self._clients[question.node] = client_id(message)

    def question(self, message: Message) -> Question:
        """Return the request that a message answers.

        If a node has left, the SuperLink answers with an error under its own node id.
        """
        to = message.metadata.reply_to_message_id
        of = (
            [q for q in self._asked if q.message_id == to]
            if message.has_error()
            else []
        )
        return of[0] if len(of) == 1 else question_of(message)

    def failed(self, message: Message) -> int | None:
        """Mark an error reply's request as answered; return its client, None if already
        answered.
        """
        question = self.question(message)
        if question not in self._silent:
            return None
        self._silent.remove(question)
        node = question.node
        return self._clients.get(node, node)

    @property
    def silent(self) -> list[int]:
        """The clients that have not answered, by their own ids if known, else by node
        id.
        """
        return sorted(self._clients.get(one.node, one.node) for one in self._silent)


def sent_by(grid: Grid | None, given: list[Metadata] | None) -> list[Metadata] | None:
    """Return the messages that a grid has sent; a subclass may have changed the given
    ones.
    """
    return (grid.sent if isinstance(grid, LazyGrid) else []) or given


def client_id(message: Message) -> int:
    """Return the client's own partition id if it sent one, else its node id."""
    record = (
        records_of_type(message.content, ConfigRecord).get(CLIENT_RECORD)
        if message.has_content()
        else None
    )
    own = record.get(CLIENT_KEY) if record is not None else None
    return own if isinstance(own, int) else message.metadata.src_node_id
