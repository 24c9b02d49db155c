"""Log records with fields, and how they become lines of JSON."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from flwr.common import log

from fedrot._io import json_line

#: The attribute of log records that holds their fields.
FIELDS = "fedrot"


class JsonLines(logging.Formatter):
    """Writes each log record as one JSON object, with the fields that fedrot's records carry.

    ``handler.setFormatter(JsonLines())`` on a handler of ``logging.getLogger("flwr")``. Every object has
    ``time`` (ISO 8601, UTC), ``level``, ``logger`` and ``message``, and ``exception`` where there is
    one. Records of fedrot add ``round`` and, each where it applies:

    ==================================  ========  ======================================================
    fields                              level     when
    ==================================  ========  ======================================================
    ``client, weight``                  DEBUG     a reply is good
    ``client, before, after, seconds``  DEBUG     it is aligned; squared distances to the anchor
    ``client, dropped``               WARNING   it has no part in the average, and why
    ``client, failed``                  INFO      the client sent an error, or nothing in time
    ``lost``                            WARNING   the round gives no model, and why
    ``metrics``                         INFO      the round's end; the names that start with fedrot-
    ``stage, client, dropped``        WARNING   an evaluation is dropped; ``stage`` is "evaluate"
    ``checkpoint, seconds``             INFO      a checkpoint is written to this folder
    ``checkpoint, damaged``             WARNING   a checkpoint cannot be used, and why; no ``round``
    ``checkpoint, resumed``             INFO      the run goes on after ``round``
    ==================================  ========  ======================================================
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON, without a line's end."""
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
