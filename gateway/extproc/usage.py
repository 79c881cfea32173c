# Reading a response while it passes.
#
# Rules
# 1. Bytes go in, cut anywhere (inside a line, inside a UTF-8 character); `usage` holds what was learned so far. Nothing
#    is ever raised for what an engine sends: what cannot be read is counted in `Usage.unreadable`, and numbers stay None.
# 2. Memory is bounded. An SSE event is kept until its blank line, up to EVENT_LIMIT; a longer one is skipped and
#    counted. Lines end with LF or CRLF (no engine sends the lone CR that the SSE grammar also allows). A JSON body is
#    kept whole up to BODY_LIMIT; beyond that only its last TAIL bytes are, and `usage` is looked up there (engines
#    write it after the choices). The finish reason is then unknown.
# 3. An event is parsed only if it can matter: until the first token was seen, and afterwards when it mentions usage, a
#    finish or a hand-off. A token of ordinary text costs a few substring searches.
# 4. Usage may be spread over events (Anthropic: prompt in message_start, output in message_delta): later numbers
#    replace earlier ones field by field.
# 5. `cached_tokens` None means the engine does not say, which is not the same as 0.
"""What a response says about itself: finish reason, first token, token counts, hand-off parameters."""

from typing import Any

import msgspec

BODY_LIMIT = 1024 * 1024
EVENT_LIMIT = 1024 * 1024
TAIL = 64 * 1024

# An event without any of these changes nothing once the first token was seen.
_MARKS = (
    b'"usage":{',
    b'"usage": {',
    b'"finish_reason":"',
    b'"finish_reason": "',
    b'"stop_reason":"',
    b'"stop_reason": "',
    b'"status"',
    b'"kv_transfer_params":{',
    b'"kv_transfer_params": {',
)
_BROKEN = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Usage(msgspec.Struct, kw_only=True):
    """What is known so far; numbers in tokens, None where the engine has not said."""

    prompt_tokens: int | None = None  # including cached ones, in every API
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None  # the engine's own word: stop, length, tool_calls, end_turn, completed, ...
    kv_transfer_params: dict[str, Any] | None = None
    first_token_at: float | None = None  # the `now` of the chunk that brought it; only streams have one
    content_events: int = 0  # SSE events with generated content: about one per token or per engine step
    unreadable: int = 0  # events or bodies that were broken or too long


class ResponseReader:
    """Feed it the body of one response; the content type decides how it is read.

    `content_type` other than an event stream is read as JSON when the response ends (`end`). An encoded body
    (`content_encoding`) is not read at all.
    """

    def __init__(self, content_type: str, content_encoding: str = "") -> None:
        self.usage = Usage()
        self.streaming = content_type.strip().lower().startswith("text/event-stream")
        self._readable = content_encoding.strip().lower() in ("", "identity")
        self._buffer = bytearray()
        self._scanned = 0  # bytes of _buffer already searched for an event's end
        self._skipping = False  # inside an event that was too long
        self._clipped = False  # the JSON body was too long: _buffer is its tail
        self._parts = _Parts()

    def feed(self, data: bytes, now: float) -> None:
        """Take the next bytes. `now` is in seconds on any clock; it becomes `first_token_at`."""
        if not self._readable:
            return
        if not self.streaming:
            self._buffer += data
            if len(self._buffer) > (2 * TAIL if self._clipped else BODY_LIMIT):
                self._clipped = True
                del self._buffer[:-TAIL]
            return
        self._buffer += data
        self._take_events(now)

    def end(self, now: float) -> Usage:
        """The response is complete: read what was kept. Returns `usage`."""
        if self._readable and self._buffer:
            if self.streaming:
                if not self._skipping:  # an engine that leaves out the last blank line
                    self._event(bytes(self._buffer), now)
            elif self._clipped:
                self._tail(bytes(self._buffer))
            else:
                self._body(bytes(self._buffer))
            self._buffer.clear()
        return self.usage

    # --- server-sent events ---------------------------------------------------------------------------------------

    def _take_events(self, now: float) -> None:
        buffer = self._buffer
        start = 0
        while (found := _event_end(buffer, max(start, self._scanned))) is not None:
            end, after = found
            if self._skipping:
                self._skipping = False
            else:
                self._event(bytes(buffer[start:end]), now)
            start = self._scanned = after
        del buffer[:start]
        # An end that is cut in two must be found again: up to three bytes of "\r\n\r\n" may be here already.
        self._scanned = max(0, len(buffer) - 3)
        if len(buffer) > EVENT_LIMIT:
            if not self._skipping:
                self.usage.unreadable += 1
            self._skipping = True
            del buffer[:-3]
            self._scanned = 0

    def _event(self, event: bytes, now: float) -> None:
        lines = event.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        data = b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
        if not data or data == b"[DONE]":
            return
        usage = self.usage
        if usage.first_token_at is not None and not any(mark in data for mark in _MARKS):
            usage.content_events += 1
            return
        try:
            message = msgspec.json.decode(data)
        except _BROKEN:
            usage.unreadable += 1
            return
        if not isinstance(message, dict):
            return
        if _has_content(message):
            usage.content_events += 1
            if usage.first_token_at is None:
                usage.first_token_at = now
        self._learn(message)

    # --- JSON bodies ------------------------------------------------------------------------------------------------

    def _body(self, body: bytes) -> None:
        try:
            # Raw values: a body's choices with their logprobs are skipped over, not built.
            raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            wanted = ("usage", "choices", "kv_transfer_params", "stop_reason", "status", "type", "incomplete_details")
            message = {name: msgspec.json.decode(raw[name]) for name in wanted if name in raw and name != "choices"}
            if "choices" in raw:
                message["choices"] = msgspec.json.decode(raw["choices"], type=list[_Choice] | None)
        except _BROKEN:
            self.usage.unreadable += 1
            return
        self._learn(message)

    def _tail(self, tail: bytes) -> None:
        """Find the top-level objects in the end of a body. Inside a JSON string the quotes would be escaped."""
        message = {}
        for name in ("usage", "kv_transfer_params"):
            position = tail.rfind(b'"%s":' % name.encode())
            if position >= 0 and (found := _object_at(tail, position + len(name) + 3)) is not None:
                message[name] = found
        if "usage" not in message:
            self.usage.unreadable += 1
        self._learn(message)

    # --- what messages say ------------------------------------------------------------------------------------------

    def _learn(self, message: dict[str, Any]) -> None:
        usage = self.usage
        for holder in (message, message.get("response"), message.get("message")):
            if not isinstance(holder, dict):
                continue
            if isinstance(counts := holder.get("usage"), dict):
                self._parts.merge(counts)
                usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens = self._parts.totals()
            if isinstance(params := holder.get("kv_transfer_params"), dict):
                usage.kv_transfer_params = params
            if (reason := _finish_reason(holder)) is not None:
                usage.finish_reason = reason


class _Choice(msgspec.Struct):
    finish_reason: Any = None


class _Parts:
    """Token counts under the names of three APIs, merged field by field."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def merge(self, counts: dict[str, Any]) -> None:
        for details in ("prompt_tokens_details", "input_tokens_details"):
            inner = counts.get(details)
            if isinstance(inner, dict) and isinstance(inner.get("cached_tokens"), int):
                self._counts["cached_tokens"] = inner["cached_tokens"]
        self._counts.update({name: n for name, n in counts.items() if isinstance(n, int) and not isinstance(n, bool)})

    def totals(self) -> tuple[int | None, int | None, int | None]:
        """Prompt, completion and cached tokens."""
        have = self._counts
        completion = have.get("completion_tokens", have.get("output_tokens"))
        if "prompt_tokens" in have or "cached_tokens" in have:
            return have.get("prompt_tokens", have.get("input_tokens")), completion, have.get("cached_tokens")
        if "input_tokens" not in have:
            return None, completion, None
        # Anthropic counts cached tokens beside input_tokens, not among them.
        read = have.get("cache_read_input_tokens")
        return have["input_tokens"] + (read or 0) + have.get("cache_creation_input_tokens", 0), completion, read


def _finish_reason(holder: dict[str, Any]) -> str | None:
    choices = holder.get("choices")
    if isinstance(choices, list):
        for choice in choices:
            reason = choice.finish_reason if isinstance(choice, _Choice) else None
            if isinstance(choice, dict):
                reason = choice.get("finish_reason")
            if isinstance(reason, str):
                return reason
        return None
    delta = holder.get("delta")
    for place in (holder, delta if isinstance(delta, dict) else {}):  # Anthropic: the body, or message_delta
        if isinstance(reason := place.get("stop_reason"), str):
            return reason
    status = holder.get("status")  # Responses: "in_progress" until it is one of these
    if status in ("completed", "incomplete", "failed", "cancelled"):
        details = holder.get("incomplete_details")
        reason = details.get("reason") if isinstance(details, dict) else None
        return reason if isinstance(reason, str) else str(status)
    return None


def _has_content(message: dict[str, Any]) -> bool:
    """True when an event carries generated tokens: text, reasoning, tool calls, token ids."""
    choices = message.get("choices")
    if isinstance(choices, list):
        for choice in choices:
            if not isinstance(choice, dict):
                continue
            delta = choice.get("delta")
            if isinstance(delta, dict) and any(v for k, v in delta.items() if k != "role"):
                return True
            if choice.get("text") or choice.get("token_ids") or choice.get("finish_reason"):
                return True
        return False
    kind = message.get("type")
    return isinstance(kind, str) and (kind == "content_block_delta" or (kind.endswith(".delta") and "delta" in message))


def _event_end(buffer: bytearray, start: int) -> tuple[int, int] | None:
    """The end of the event and the start of the next: at the first blank line from `start`. LF and CRLF lines."""
    lf, crlf = buffer.find(b"\n\n", start), buffer.find(b"\n\r\n", start)
    if lf < 0 and crlf < 0:
        return None
    if crlf < 0 or 0 <= lf < crlf:
        return lf, lf + 2
    return crlf, crlf + 3


def _object_at(data: bytes, start: int) -> Any:
    """The JSON object that begins at `start` (after blanks), None where there is none or it is cut off."""
    while start < len(data) and data[start] in b" \t\r\n":
        start += 1
    if data[start : start + 1] != b"{":
        return None
    depth, inside, position = 0, False, start
    while position < len(data):
        byte = data[position]
        if inside:
            if byte == 0x5C:
                position += 1
            elif byte == 0x22:
                inside = False
        elif byte == 0x22:
            inside = True
        elif byte == 0x7B:
            depth += 1
        elif byte == 0x7D:
            depth -= 1
            if depth == 0:
                try:
                    return msgspec.json.decode(data[start : position + 1])
                except _BROKEN:
                    return None
        position += 1
    return None
