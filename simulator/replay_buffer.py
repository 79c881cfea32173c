"""Sequence numbers and the batches kept for replay, without sockets.

Frames as vLLM 0.32 sends them: live `topic, seq, payload`; replay answers to a DEALER `"", topic, seq, payload`, closed by
the marker `"", "", ff x 8, ""`. A replay request is `"", start` with an 8-byte big-endian start. Three things real engines
do and this one repeats: a request without the empty delimiter is never answered; a start older than the buffer is answered
from the oldest batch on, without an error; a start beyond the newest batch gets the marker only.
"""

from collections import deque

END_MARKER = (b"", b"", b"\xff" * 8, b"")


class ReplayBuffer:
    """The numbered batches of one engine process; `steps` of them are kept."""

    def __init__(self, topic: str, steps: int = 10_000) -> None:
        self.topic = topic
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=steps)
        self._next = 0

    @property
    def next_sequence(self) -> int:
        """The number that the next batch will carry."""
        return self._next

    def number(self, payload: bytes) -> tuple[bytes, bytes, bytes]:
        """Give a payload its number, keep it, and return its live frames."""
        sequence = self._next
        self._next += 1
        self._kept.append((sequence, payload))
        return self.topic.encode(), sequence.to_bytes(8, "big"), payload

    def burn_number(self) -> None:
        """Use up a number for a batch that never existed: what a failed encode or send costs a real engine."""
        self._next += 1

    def restart(self) -> None:
        """A new incarnation: numbers from 0, nothing kept. Real engines give no other sign of it."""
        self._next = 0
        self._kept.clear()

    def answer(self, request: list[bytes]) -> list[tuple[bytes, ...]] | None:
        """The messages that answer `request` (frames after the peer's identity); None if it is never answered."""
        if len(request) != 2 or request[0] != b"" or len(request[1]) != 8:
            return None
        start = int.from_bytes(request[1], "big")
        topic = self.topic.encode()
        batches = [(b"", topic, seq.to_bytes(8, "big"), payload) for seq, payload in self._kept if seq >= start]
        return [*batches, END_MARKER]
