"""``JsonLines``: a log formatter that writes JSON; ``log_fields`` adds fields to log records."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from flwr.common import log

from fedrot._io import json_line

#: Name of the attribute of log records with their fields.
FIELDS = "fedrot"


class JsonLines(logging.Formatter):
    """Formats each log record as one JSON object.

    Use ``handler.setFormatter(JsonLines())`` on a handler of ``logging.getLogger("flwr")``. Every object
    has ``time`` (ISO 8601, UTC), ``level``, ``logger`` and ``message``, and ``exception`` if there is
    one. fedrot's records add ``round`` and:

    ==================================  =======  ======================================================
    fields                              level    event
    ==================================  =======  ======================================================
    ``client, weight``                  DEBUG    a reply is accepted
    ``client, before, after, seconds``  DEBUG    it is aligned; squared distances to the anchor
    ``client, dropped``                 WARNING  a reply is not averaged, with the reason
    ``client, failed``                  INFO     the client sent an error, or nothing in time
    ``lost``                            WARNING  the round gives no new model, with the reason
    ``metrics``                         INFO     the round ends; metrics whose names start with fedrot-
    ``verdict, moved``                  INFO     what alignment found, and the number of moved groups
    ``stage, client, dropped``          WARNING  an evaluation is dropped; ``stage`` is "evaluate"
    ``guard, kept, plain, aligned``     INFO     the better of two means is kept, see ``Guard``
    ``checkpoint, seconds``             INFO     a checkpoint is written to this folder
    ``checkpoint, damaged``             WARNING  a checkpoint is damaged, with the reason; no ``round``
    ``checkpoint, resumed``             INFO     the run is resumed after ``round``
    ==================================  =======  ======================================================
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON, without an end of line."""
        row: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return json_line(row).rstrip("\n")


def log_fields(level: int, fields: Mapping[str, Any], message: str, *args: object) -> None:
    """Log a message in Flower's log, with fields for ``JsonLines``."""
    log(level, message, *args, extra={FIELDS: dict(fields)}, stacklevel=2)
