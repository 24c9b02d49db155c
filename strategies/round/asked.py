"""``Asked``: the requests of a round, and which of them have been answered."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flwr.app import ConfigRecord, Message, Metadata
from flwr.serverapp import Grid

from fedrot.errors import UpdateError
from fedrot.strategies.wire.arrays import records_of_type
from fedrot.strategies.wire.lazy_grid import LazyGrid

#: Optional ConfigRecord of a reply with the client's own id, not its node's.
CLIENT_RECORD = "client"
CLIENT_KEY = "partition-id"

#: Optional ConfigRecord of a reply with its adapter's settings, see ``adapter_record``.
ADAPTER_RECORD = "fedrot-adapter"


#: Metadata of sent messages; None if they are not known.
Sent = list[Metadata] | None


class Question(NamedTuple):
    """A message to a node; at most one reply of a round answers it."""

    message_id: str
    node: int


def question_of(reply: Message) -> Question:
    """Return the question that a reply claims to answer."""
    return Question(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)


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
        #: In the order of the messages; whether each is without an answer.
        self.questions = {
            Question(metadata.message_id, metadata.dst_node_id): True
            for metadata in messages or ()
        }
        self._clients = {} if clients is None else clients

    def accept(self, message: Message) -> None:
        """Mark a request as answered; raises ``UpdateError`` if it is not open."""
        question = self.question(message)
        if self._known and question not in self.questions:
            raise UpdateError(
                "It matches no request of this round (late, or of another run)."
            )
        if not self.questions.get(question, True):
            raise UpdateError(
                "Its sender has already answered in this round; the first answer is "
                "used."
            )
        self.questions[question] = False
        self._clients[question.node] = client_id(message)

    def question(self, message: Message) -> Question:
        """Return the request that a message answers.

        If a node has left, the SuperLink answers with an error under its own node id.
        """
        claimed = question_of(message)
        if not message.has_error():
            return claimed
        same = [q for q in self.questions if q.message_id == claimed.message_id]
        # Messages that no grid has sent have no ids.
        return same[0] if len(same) == 1 else claimed

    def failed(self, message: Message) -> int | None:
        """Mark an error reply's request as answered; return its client.

        None if the request is not open.
        """
        question = self.question(message)
        if not self.questions.get(question):
            return None
        self.questions[question] = False
        return self._client(question)

    @property
    def silent(self) -> list[int]:
        """The clients that have not answered, by their own ids or else by node id."""
        return sorted(self._client(q) for q, waits in self.questions.items() if waits)

    def _client(self, question: Question) -> int:
        return self._clients.get(question.node, question.node)


def sent_by(grid: Grid | None, made: Sent) -> Sent:
    """Return the messages that a grid has sent; else those that were ``made``."""
    # A subclass may have sent other messages than those that were made.
    return (grid.sent if isinstance(grid, LazyGrid) else []) or made


def client_id(message: Message) -> int:
    """Return the client's own partition id if it sent one, else its node id."""
    if message.has_content():
        configs = records_of_type(message.content, ConfigRecord)
        client = configs.get(CLIENT_RECORD, ConfigRecord()).get(CLIENT_KEY)
        if isinstance(client, int):
            return client
    return message.metadata.src_node_id
