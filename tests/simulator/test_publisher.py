from collections.abc import Callable, Iterator

import pytest
import zmq

from simulator.publisher import Addresses, Publisher
from simulator.replay_buffer import END_MARKER, ReplayBuffer


def numbers(messages: list[tuple[bytes, ...]] | list[list[bytes]]) -> list[int]:
    return [int.from_bytes(frames[-2], "big") for frames in messages if tuple(frames) != END_MARKER]


def ask(start: int) -> list[bytes]:
    return [b"", start.to_bytes(8, "big")]


def test_a_request_without_the_delimiter_is_never_answered() -> None:
    assert ReplayBuffer("t").answer([(0).to_bytes(8, "big")]) is None


def test_a_start_older_than_the_buffer_is_answered_from_the_oldest_batch_without_an_error() -> None:
    buffer = ReplayBuffer("t", steps=4)
    for n in range(7):
        buffer.number(b"%d" % n)
    answer = buffer.answer(ask(0))
    assert answer is not None
    assert numbers(answer) == [3, 4, 5, 6]
    assert answer[-1] == END_MARKER


def test_a_start_beyond_the_newest_batch_gets_the_marker_only() -> None:
    buffer = ReplayBuffer("t")
    buffer.number(b"x")
    assert buffer.answer(ask(1)) == [END_MARKER]


def test_a_batch_that_was_never_encoded_leaves_a_hole_that_replay_cannot_fill() -> None:
    buffer = ReplayBuffer("t")
    buffer.number(b"0")
    buffer.burn_number()
    buffer.number(b"2")
    assert numbers(buffer.answer(ask(0)) or []) == [0, 2]


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [("tcp://*:5557", True), ("tcp://[::]:5557", True), ("ipc:///tmp/x", True), ("tcp://127.0.0.1:5557", False)],
)
def test_the_publisher_binds_and_connects_by_the_rule_of_vllm(endpoint: str, binds: bool) -> None:
    assert Addresses(endpoint=endpoint).binds is binds


class Stream:
    """A publisher with a subscriber and a replay client on loopback."""

    def __init__(self) -> None:
        self.buffer = ReplayBuffer("kv@engine@model")
        addresses = Addresses(endpoint="tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*")
        self.publisher = Publisher(addresses, self.buffer)
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.subscribe(b"")
        self.sub.connect(self.publisher.endpoint)
        self.dealer = self.context.socket(zmq.DEALER)
        assert self.publisher.replay_endpoint is not None
        self.dealer.connect(self.publisher.replay_endpoint)
        # A PUB drops what nobody has subscribed to yet: publish until the first batch arrives, then start over.
        while not self.sub.poll(20):
            self.publisher.publish(b"warm-up")
        while self.sub.poll(200):
            self.sub.recv_multipart()
        self.publisher.restart()

    def live(self, count: int) -> list[list[bytes]]:
        received: list[list[bytes]] = []
        while len(received) < count and self.sub.poll(5000):
            received.append(self.sub.recv_multipart())
        return received

    def replay(self, start: int) -> list[list[bytes]]:
        self.dealer.send_multipart(ask(start))
        received: list[list[bytes]] = []
        while (not received or tuple(received[-1]) != END_MARKER) and self.dealer.poll(5000):
            received.append(self.dealer.recv_multipart())
        return received


@pytest.fixture
def stream() -> Iterator[Stream]:
    one = Stream()
    yield one
    one.publisher.close()
    one.context.destroy(linger=0)


def test_a_taken_port_is_reported_with_the_endpoint(free_port: Callable[[], int]) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    first = Publisher(Addresses(endpoint=endpoint, bind=True), ReplayBuffer("t"))
    with pytest.raises(zmq.ZMQError, match=endpoint):
        Publisher(Addresses(endpoint=endpoint, bind=True), ReplayBuffer("t"))
    first.close()


def test_live_frames_are_topic_sequence_and_payload(stream: Stream) -> None:
    stream.publisher.publish(b"payload")
    assert stream.live(1) == [[b"kv@engine@model", (0).to_bytes(8, "big"), b"payload"]]


def test_replayed_payloads_equal_the_live_ones(stream: Stream) -> None:
    for n in range(5):
        stream.publisher.publish(b"%d" % n)
    live = stream.live(5)
    replayed = stream.replay(2)
    assert replayed == [[b"", *frames] for frames in live[2:]] + [list(END_MARKER)]


def test_a_dropped_batch_is_missing_live_and_present_in_the_replay(stream: Stream) -> None:
    stream.publisher.faults.drop_next = 1
    for n in range(3):
        stream.publisher.publish(b"%d" % n)
    assert numbers(stream.live(2)) == [1, 2]
    assert numbers(stream.replay(0)) == [0, 1, 2]


def test_a_restart_begins_at_zero_again_with_an_empty_buffer(stream: Stream) -> None:
    stream.publisher.publish(b"old")
    stream.publisher.restart()
    stream.publisher.publish(b"new")
    assert numbers(stream.live(2)) == [0, 0]
    assert [frames[-1] for frames in stream.replay(0)[:-1]] == [b"new"]


def test_a_request_without_delimiter_does_not_stop_the_replay_socket(stream: Stream) -> None:
    stream.publisher.publish(b"0")
    stream.dealer.send_multipart([(0).to_bytes(8, "big")])
    assert not stream.dealer.poll(400)
    assert numbers(stream.replay(0)) == [0]
