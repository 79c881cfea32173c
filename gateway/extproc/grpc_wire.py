"""gRPC's own bytes: length-prefixed messages, statuses, timeouts. Nothing here knows HTTP/2 or sockets.

Source: PROTOCOL-HTTP2.md of the gRPC project. A message is one byte (compressed or not), four bytes of big-endian length, and the
payload; how the bytes are cut into DATA frames means nothing, and the prefix itself may be cut.
"""

import enum
import re
from collections.abc import Mapping
from urllib.parse import quote_from_bytes

CONTENT_TYPE = b"application/grpc"
_PREFIX_BYTES = 5
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_S: Mapping[bytes, float] = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
# Printable ASCII without "%"; everything else is percent-encoded in grpc-message.
_PLAIN = bytes(byte for byte in range(0x20, 0x7F) if byte != 0x25).decode()


class Status(enum.IntEnum):
    """The codes that we use."""

    OK = 0
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13


class Refused(Exception):
    """The call ends with this status, because of what the peer sent."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


def framed(message: bytes) -> bytes:
    """A message as it goes into DATA frames, uncompressed."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def trailers(status: Status, message: str = "") -> list[tuple[bytes, bytes]]:
    """What ends a call."""
    fields = [(b"grpc-status", b"%d" % status)]
    if message:
        fields.append((b"grpc-message", quote_from_bytes(message.encode(), safe=_PLAIN).encode()))
    return fields


def timeout_s(value: bytes) -> float:
    """Seconds in a `grpc-timeout` header. Raises Refused for what is none."""
    found = _TIMEOUT.fullmatch(value)
    if found is None:
        raise Refused(
            Status.INTERNAL, f"grpc-timeout {value.decode('ascii', 'replace')!r}: expected 1-8 digits and HMSmun"
        )
    return int(found[1]) * _UNIT_S[found[2]]


class MessageReader:
    """Cuts a stream of bytes back into messages.

    `limit`: a longer message is refused as soon as its prefix says so, with nothing of it kept. `encoding` is the peer's
    `grpc-encoding`.
    """

    def __init__(self, limit: int, encoding: str = "identity") -> None:
        self._limit, self._encoding = limit, encoding
        self._parts: list[bytes] = []
        self._have = 0
        self._need = _PREFIX_BYTES

    @property
    def inside(self) -> bool:
        """Whether the bytes so far end within a message."""
        return self._have > 0

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are complete now. Raises Refused."""
        self._parts.append(data)
        self._have += len(data)
        if self._have < self._need:
            return []
        buffer = data if len(self._parts) == 1 else b"".join(self._parts)
        messages: list[bytes] = []
        position = 0
        self._need = _PREFIX_BYTES
        while len(buffer) - position >= _PREFIX_BYTES:
            length = self._length(buffer, position)
            end = position + _PREFIX_BYTES + length
            if end > len(buffer):
                self._need = _PREFIX_BYTES + length
                break
            messages.append(buffer[position + _PREFIX_BYTES : end])
            position = end
        rest = buffer[position:]
        self._parts, self._have = ([rest] if rest else []), len(rest)
        return messages

    def _length(self, buffer: bytes, position: int) -> int:
        length = int.from_bytes(buffer[position + 1 : position + _PREFIX_BYTES], "big")
        if buffer[position]:
            if self._encoding == "identity":
                raise Refused(
                    Status.INTERNAL, "a message is marked as compressed, but grpc-encoding names no compression"
                )
            raise Refused(Status.UNIMPLEMENTED, f"grpc-encoding {self._encoding!r} is not supported, only identity")
        if length > self._limit:
            raise Refused(Status.RESOURCE_EXHAUSTED, f"a message of {length} bytes is over the limit of {self._limit}")
        return length
