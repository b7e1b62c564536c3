"""Log lines of the command: text for people, JSON for machines."""

import json
import logging
import os
from typing import Any


class JsonLines(logging.Formatter):
    """One object a line: time, level, process, logger, message, and what the call gave as `extra` as fields of their own.

    Args:
        process: name of the process, for example "worker".
    """

    _plain = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = {"process": process, "pid": os.getpid()}

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, Any] = {"at": self.formatTime(record), "level": record.levelname.lower(), **self._process,
                                "logger": record.name, "message": record.getMessage()}  # fmt: skip
        line.update((key, value) for key, value in vars(record).items() if key not in self._plain and key not in line)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logging(log_format: str, process: str) -> None:
    """Sends everything from level info on to standard error.

    Args:
        log_format: "text" or "json".
        process: name of the process.
    """
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines(process) if log_format == "json" else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
