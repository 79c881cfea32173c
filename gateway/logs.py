"""Logs: one line per event of note, `time level logger event key=value ...`, or the same as JSON.

Whatever is logged on behalf of a request has its id, also from code that knows nothing of requests: the ext-proc transport
sets `REQUEST_ID` in the context of the request's tasks, and the formatters add it where a line does not name it itself.
"""

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Any

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
_NAMED = "request_id="

LEVELS = ("debug", "info", "warning", "error")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := REQUEST_ID.get()) and _NAMED not in line["message"]:
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _Text(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        request_id = REQUEST_ID.get()
        return f"{line} {_NAMED}{request_id}" if request_id and _NAMED not in line else line


def configure(level: str, *, as_json: bool) -> None:
    """Send all logs to stderr at `level`, as text or JSON lines. Times are UTC."""
    handler = logging.StreamHandler(sys.stderr)
    if as_json:
        handler.setFormatter(_Json())
    else:
        text = _Text("%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")
        text.converter = time.gmtime
        handler.setFormatter(text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


class RateLimit:
    """Lets one line per key through every `every_s` seconds, so that a broken wire does not fill the disk."""

    def __init__(self, every_s: float = 10.0) -> None:
        self._every_s = every_s
        self._last: dict[str, float] = {}

    def allows(self, key: str, now: float) -> bool:
        if now - self._last.get(key, -self._every_s) < self._every_s:
            return False
        self._last[key] = now
        return True
