"""Logs: one line per event of note, `time level logger event key=value ...`, or the same as JSON.

Whatever is logged on behalf of a request has its id, also from code that knows nothing of requests: the ext-proc transport
sets `REQUEST_ID` in the context of the request's tasks, and the formatters add it where a line does not name it itself.

An event that happens again and again (an engine that restarts in a loop) is written a few times, and then once in a while with
the number of lines that were left out: `Repeats`.
"""

import json
import logging
import sys
import time
from collections import OrderedDict
from contextvars import ContextVar
from typing import Any

import msgspec

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
        if left_out := getattr(record, "left_out", 0):
            line["left_out"] = left_out
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _Text(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        request_id = REQUEST_ID.get()
        line = f"{line} {_NAMED}{request_id}" if request_id and _NAMED not in line else line
        left_out = getattr(record, "left_out", 0)
        return f"{line} left_out={left_out}" if left_out else line


class _Seen(msgspec.Struct):
    since: float
    written: int = 0
    left_out: int = 0


class Repeats(logging.Filter):
    """Lets `most` lines a minute through per event and thing, and says in the next one how many it has left out.

    The event is the message before its fields are put in, the thing the first field (a stream, an endpoint, a plugin). Debug
    lines all pass: whoever asks for them wants them.
    """

    def __init__(self, most: int = 10, every_s: float = 60.0, remembered: int = 10_000) -> None:
        super().__init__()
        self._most, self._every_s, self._remembered = most, every_s, remembered
        self._seen: OrderedDict[tuple[str, str], _Seen] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.INFO:
            return True
        key = (str(record.msg), str(record.args[0]) if isinstance(record.args, tuple) and record.args else "")
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = _Seen(since=record.created)
            if len(self._seen) > self._remembered:
                self._seen.popitem(last=False)
        elif not 0 <= record.created - seen.since < self._every_s:  # below 0: the wall clock was set back
            record.left_out = seen.left_out
            seen.since, seen.written, seen.left_out = record.created, 0, 0
        seen.written += 1
        if seen.written <= self._most:
            return True
        seen.left_out += 1
        return False


def configure(level: str, *, as_json: bool) -> None:
    """Send all logs to stderr at `level`, as text or JSON lines. Times are UTC."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Repeats())
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

    REMEMBERED = 1_000
    """Keys from which on those are forgotten that may write again anyway: endpoints come and go."""

    def __init__(self, every_s: float = 10.0) -> None:
        self._every_s = every_s
        self._last: dict[str, float] = {}

    def allows(self, key: str, now: float) -> bool:
        if now - self._last.get(key, -self._every_s) < self._every_s:
            return False
        if len(self._last) >= self.REMEMBERED:
            self._last = {known: at for known, at in self._last.items() if now - at < self._every_s}
        self._last[key] = now
        return True
