"""Real ZMQ on loopback: a publisher like an engine's, the subscriber thread and the recorder."""

import errno
import io
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import msgspec
import pytest
import zmq

from event_ingest.limits import Limits
from event_ingest.pipeline import EventPath
from event_ingest.recorder import record
from event_ingest.replaying import replay_recording
from event_ingest.sockets import AddressError, for_rank, port_of
from event_ingest.stream import END_MARKER
from event_ingest.subscriber import Subscriber
from fleet.endpoint import Endpoint
from indexer.block_key import block_keys, root_key
from indexer.index import Index
from indexer.trust import Trust

BLOCK = 4
LIMITS = Limits(answer_timeout_s=1.0, probe_idle_s=2.0)


class Engine:
    """PUB and ROUTER as vLLM has them: one thread, publishing blocked while a replay is sent."""

    def __init__(self, events: str, replay: str | None, *, connects: bool = False, buffer: int = 1000) -> None:
        self.context = zmq.Context()
        self.publisher = self.context.socket(zmq.PUB)
        self.publisher.setsockopt(zmq.LINGER, 0)
        if connects:
            self.publisher.connect(events)
        else:
            self.publisher.bind(events)
        self.router = None
        if replay is not None:
            self.router = self.context.socket(zmq.ROUTER)
            self.router.setsockopt(zmq.LINGER, 0)
            self.router.bind(replay)
        self.buffer = buffer
        self.batches: list[bytes] = []
        self.pending: list[tuple[bytes, bool]] = []
        self.lock = threading.Lock()
        self.running = True
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def publish(self, *events: dict[str, object], lose: bool = False) -> None:
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        with self.lock:
            self.pending.append((payload, lose))
        while self.pending:
            time.sleep(0.002)

    def store(self, tokens: list[int], *, lose: bool = False) -> None:
        """Announce a whole prompt as one chain; the hash of a block is made of all tokens up to its end."""
        hashes = [hash(tuple(tokens[:end])) & (1 << 64) - 1 for end in range(BLOCK, len(tokens) + 1, BLOCK)]
        self.publish(
            {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": None,
                "token_ids": tokens,
                "block_size": BLOCK,
            },
            lose=lose,
        )

    def stop(self) -> None:
        self.running = False
        self.thread.join()
        self.publisher.close()
        if self.router is not None:
            self.router.close()
        self.context.term()

    def _run(self) -> None:
        while self.running:
            with self.lock:
                while self.pending:
                    payload, lose = self.pending.pop(0)
                    sequence = len(self.batches).to_bytes(8, "big")
                    self.batches.append(payload)
                    if not lose:
                        self.publisher.send_multipart([b"kv@a@m", sequence, payload])
            if self.router is not None and self.router.poll(5):
                client, empty, start = self.router.recv_multipart()
                assert empty == b""
                for number in range(
                    max(int.from_bytes(start, "big"), len(self.batches) - self.buffer), len(self.batches)
                ):
                    frames = [client, b"", b"kv@a@m", number.to_bytes(8, "big"), self.batches[number]]
                    self.router.send_multipart(frames)
                self.router.send_multipart([client, b"", b"", END_MARKER, b""])
            elif self.router is None:
                time.sleep(0.005)


@pytest.fixture
def addresses(free_port: Callable[[], int]) -> tuple[str, str]:
    return f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def subscriber() -> Iterator[Subscriber]:
    subscriber = Subscriber()
    subscriber.start()
    yield subscriber
    subscriber.stop()


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    started: list[Engine] = []
    yield started
    for engine in started:
        engine.stop()


def listen(subscriber: Subscriber, events: str, replay: str | None, index: Index, slot: int = 0) -> EventPath:
    path = EventPath(index, slot, name=f"e{slot}", model="m", can_replay=replay is not None, limits=LIMITS)
    endpoint = Endpoint(name="e", address="127.0.0.1:1", events=events, replay=replay)
    subscriber.add(endpoint, path).result(5)
    return path


def eventually(condition: Callable[[], object], seconds: float = 8.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


class Wire:
    """A TCP connection that can be cut without a goodbye: both ends stay open, nothing comes through."""

    def __init__(self, port: int, target: int) -> None:
        self.target = target
        self.cut = False
        self.ends: list[socket.socket] = []
        self.listener = socket.create_server(("127.0.0.1", port))
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def stop(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        for end in (*self.ends, self.listener):
            end.close()

    def _run(self) -> None:
        pairs: dict[socket.socket, socket.socket] = {}
        with selectors.DefaultSelector() as ready:
            ready.register(self.listener, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    end = cast(socket.socket, key.fileobj)
                    try:
                        if end is self.listener:
                            near = self.listener.accept()[0]
                            far = socket.create_connection(("127.0.0.1", self.target))
                            pairs |= {near: far, far: near}
                            self.ends += [near, far]
                            ready.register(near, selectors.EVENT_READ)
                            ready.register(far, selectors.EVENT_READ)
                        elif not (data := end.recv(65536)):
                            ready.unregister(end)
                        elif not self.cut:
                            pairs[end].sendall(data)
                    except OSError:
                        if end is self.listener:
                            return
                        ready.unregister(end)


def matched(index: Index, tokens: list[int], slot: int = 0) -> int:
    return index.match(block_keys(root_key("m"), tokens, BLOCK)).by_slot().get(slot, 0) * BLOCK


PROMPTS = [[n * 100 + i for i in range(8)] for n in range(20)]


def test_a_late_joiner_on_an_idle_engine_gets_the_whole_buffer(
    addresses: tuple[str, str], subscriber: Subscriber, engines: list[Engine]
) -> None:
    engines.append(Engine(*addresses))
    for prompt in PROMPTS[:5]:
        engines[0].store(prompt)
    index = Index()
    path = listen(subscriber, *addresses, index)
    eventually(lambda: path.trust.state == "exact")
    assert [matched(index, prompt) for prompt in PROMPTS[:6]] == [8] * 5 + [0]


def test_a_gap_is_replayed(addresses: tuple[str, str], subscriber: Subscriber, engines: list[Engine]) -> None:
    engines.append(Engine(*addresses))
    index = Index()
    path = listen(subscriber, *addresses, index)
    eventually(lambda: path.trust.state == "exact")
    engines[0].store(PROMPTS[0])
    engines[0].store(PROMPTS[1], lose=True)
    engines[0].store(PROMPTS[2])
    eventually(lambda: matched(index, PROMPTS[2]))
    eventually(lambda: path.trust.state == "exact")
    assert matched(index, PROMPTS[1]) == 8
    assert path.stream.counters.gaps == 1


def test_a_wire_that_goes_dead_without_a_goodbye_is_noticed_and_what_it_swallowed_is_replayed(
    free_port: Callable[[], int], subscriber: Subscriber, engines: list[Engine]
) -> None:
    events, replay = free_port(), f"tcp://127.0.0.1:{free_port()}"
    engines.append(Engine(f"tcp://127.0.0.1:{events}", replay))
    wire = Wire(through := free_port(), events)
    try:
        index = Index()
        path = listen(subscriber, f"tcp://127.0.0.1:{through}", replay, index)
        engines[0].store(PROMPTS[0])
        eventually(lambda: matched(index, PROMPTS[0]) and path.trust.state == "exact")
        wire.cut = True
        eventually(lambda: str(path.trust) == "degraded(disconnected)", 30)
        engines[0].store(PROMPTS[1])
        wire.cut = False
        eventually(lambda: matched(index, PROMPTS[1]) and path.trust.state == "exact", 30)
    finally:
        wire.stop()


def test_a_restart_drops_what_the_old_process_held(
    addresses: tuple[str, str], subscriber: Subscriber, engines: list[Engine]
) -> None:
    engines.append(Engine(*addresses))
    for prompt in PROMPTS[:3]:
        engines[0].store(prompt)
    index = Index()
    path = listen(subscriber, *addresses, index)
    eventually(lambda: matched(index, PROMPTS[2]))
    engines.pop().stop()
    eventually(lambda: path.trust.state != "exact")
    engines.append(Engine(*addresses))
    for prompt in PROMPTS[5:10]:
        engines[0].store(prompt)
    eventually(lambda: matched(index, PROMPTS[9]) and path.trust.state == "exact", 15)
    assert [matched(index, prompt) for prompt in PROMPTS[:3]] == [0, 0, 0]
    assert matched(index, PROMPTS[5]) == 8


def test_a_restarted_engine_that_stays_idle_is_found_out(
    addresses: tuple[str, str], subscriber: Subscriber, engines: list[Engine]
) -> None:
    engines.append(Engine(*addresses))
    engines[0].store(PROMPTS[0])
    index = Index()
    path = listen(subscriber, *addresses, index)
    eventually(lambda: matched(index, PROMPTS[0]))
    engines.pop().stop()
    engines.append(Engine(*addresses))
    eventually(lambda: not matched(index, PROMPTS[0]) and path.trust.state == "exact", 15)


def test_a_gap_without_a_replay_address_degrades(
    addresses: tuple[str, str], subscriber: Subscriber, engines: list[Engine]
) -> None:
    engines.append(Engine(addresses[0], None))
    index = Index()
    path = listen(subscriber, addresses[0], None, index)
    eventually(lambda: path.trust.reason == "no_replay")
    engines[0].store(PROMPTS[0])
    eventually(lambda: path.trust.state == "exact")
    engines[0].store(PROMPTS[1], lose=True)
    engines[0].store(PROMPTS[2])
    eventually(lambda: path.trust.state == "degraded")
    assert path.trust.reason == "lost_batches"
    assert path.ledger.suspects == 2
    engines[0].publish({"type": "AllBlocksCleared"})
    eventually(lambda: path.trust.state == "exact")
    assert index.stats().entries == 0


def test_engines_whose_publisher_connects_are_heard(
    addresses: tuple[str, str], subscriber: Subscriber, engines: list[Engine]
) -> None:
    index = Index()
    path = listen(subscriber, "bind:" + addresses[0], addresses[1], index)
    assert path.trust.state == "blind"
    engines.append(Engine(*addresses, connects=True))
    eventually(lambda: path.trust.state == "exact")
    engines[0].store(PROMPTS[0])
    eventually(lambda: matched(index, PROMPTS[0]) == 8)


def test_who_tries_a_bound_port_and_goes_is_no_broken_link(
    free_port: Callable[[], int], subscriber: Subscriber, engines: list[Engine]
) -> None:
    index, port = Index(), free_port()
    path = listen(subscriber, f"bind:tcp://127.0.0.1:{port}", None, index)
    engines.append(Engine(f"tcp://127.0.0.1:{port}", None, connects=True))
    eventually(lambda: str(path.trust) == "degraded(no_replay)")
    time.sleep(0.2)  # connected at both ends
    engines[0].store(PROMPTS[0])
    eventually(lambda: matched(index, PROMPTS[0]) == 8 and path.trust.state == "exact")
    socket.create_connection(("127.0.0.1", port)).close()
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
    time.sleep(0.3)
    assert path.trust.state == "exact"


def test_where_one_of_two_publishers_of_a_bound_address_goes_the_other_is_asked_and_heard_on(
    addresses: tuple[str, str], subscriber: Subscriber, engines: list[Engine]
) -> None:
    index = Index()
    path = listen(subscriber, "bind:" + addresses[0], addresses[1], index)
    old = Engine(*addresses, connects=True)
    old.store(PROMPTS[0])
    eventually(lambda: matched(index, PROMPTS[0]) == 8 and path.trust.state == "exact")
    new = Engine(addresses[0], None, connects=True)  # its replay address is still the old one's
    eventually(lambda: path.stream.counters.questions > 1 and path.trust.state == "exact")
    questions = path.stream.counters.questions
    new.stop()
    engines.append(old)
    eventually(lambda: path.stream.counters.questions > questions and path.trust.state == "exact")
    old.store(PROMPTS[1])
    eventually(lambda: matched(index, PROMPTS[1]) == 8)


def test_a_bound_address_can_be_bound_again_at_once(free_port: Callable[[], int], subscriber: Subscriber) -> None:
    index, address = Index(), f"bind:tcp://127.0.0.1:{free_port()}"
    for _ in range(30):
        listen(subscriber, address, None, index)
    assert len(subscriber.paths()) == 1


def test_there_may_be_more_streams_than_zmq_allows_sockets_by_default(subscriber: Subscriber) -> None:
    index = Index()
    added = []
    for slot in range(400):  # three sockets each
        path = EventPath(index, slot, name=f"e{slot}", model="m", can_replay=False)
        endpoint = Endpoint(name="e", address="127.0.0.1:1", events=f"ipc:///nowhere/{slot}")
        added.append(subscriber.add(endpoint, path))
    for future in added:
        future.result(30)
    assert len(subscriber.paths()) == 400


def test_a_question_for_which_there_is_no_socket_left_costs_one_answer_and_no_thread(
    addresses: tuple[str, str], subscriber: Subscriber, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.append(Engine(*addresses))
    engines[0].store(PROMPTS[0])
    index, real = Index(), zmq.Context.socket

    def full(self: object, kind: int) -> object:
        if kind == zmq.DEALER:
            raise zmq.ZMQError(errno.EMFILE)
        return real(self, kind)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(zmq.Context, "socket", full)
        path = listen(subscriber, *addresses, index)
        eventually(lambda: path.stream.counters.questions)
        time.sleep(0.3)
    assert not subscriber.died
    eventually(lambda: matched(index, PROMPTS[0]) == 8 and path.trust.state == "exact")


def test_a_listener_that_fails_costs_no_stream(addresses: tuple[str, str], engines: list[Engine]) -> None:
    def fails(path: EventPath, trust: Trust) -> None:
        raise RuntimeError(path.name)

    subscriber = Subscriber(on_trust=fails)
    subscriber.start()
    try:
        engines.append(Engine(*addresses))
        engines[0].store(PROMPTS[0])
        index = Index()
        listen(subscriber, *addresses, index)
        eventually(lambda: matched(index, PROMPTS[0]) == 8)
        assert subscriber.errors > 0
        assert not subscriber.died
    finally:
        subscriber.stop()


def test_a_buffer_of_ten_thousand_batches_arrives_complete(
    addresses: tuple[str, str], subscriber: Subscriber, engines: list[Engine]
) -> None:
    engines.append(Engine(*addresses, buffer=10_000))
    with engines[0].lock:
        for number in range(3000):
            tokens = [number, 1, 2, 3]
            event = {
                "type": "BlockStored",
                "block_hashes": [number + 1],
                "parent_block_hash": None,
                "token_ids": tokens,
                "block_size": BLOCK,
            }
            engines[0].batches.append(msgspec.msgpack.encode([float(number), [event], 0]))
    index = Index()
    path = listen(subscriber, *addresses, index)
    eventually(lambda: path.trust.state == "exact", 30)
    assert index.stats().keys == 3000


def test_endpoints_come_and_go_while_it_runs(
    addresses: tuple[str, str], subscriber: Subscriber, engines: list[Engine], free_port: Callable[[], int]
) -> None:
    other = f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
    engines += [Engine(*addresses), Engine(*other)]
    index = Index()
    first, second = listen(subscriber, *addresses, index, 0), listen(subscriber, *other, index, 1)
    for engine in engines:
        engine.store(PROMPTS[0])
    eventually(lambda: matched(index, PROMPTS[0], 0) and matched(index, PROMPTS[0], 1))
    subscriber.remove(first.name).result(5)
    assert (matched(index, PROMPTS[0], 0), matched(index, PROMPTS[0], 1)) == (0, 8)
    assert subscriber.paths() == [second]


def test_an_unusable_address_is_reported_to_whoever_adds_it(subscriber: Subscriber) -> None:
    path = EventPath(Index(), 0, name="e", model="m", can_replay=False)
    endpoint = Endpoint(name="e", address="127.0.0.1:1", events="tcp:/nonsense")
    with pytest.raises(AddressError, match="expected tcp://host:port"):
        subscriber.add(endpoint, path).result(5)


def test_a_recording_begins_with_the_whole_buffer_and_plays(
    addresses: tuple[str, str], engines: list[Engine], tmp_path: Path
) -> None:
    engines.append(Engine(*addresses))
    for prompt in PROMPTS[:3]:
        engines[0].store(prompt)
    out = io.StringIO()
    stop = threading.Event()
    thread = threading.Thread(target=record, args=(*addresses, out), kwargs={"stop": stop})
    thread.start()
    eventually(lambda: out.getvalue().count("\n") >= 4)
    engines[0].store(PROMPTS[3], lose=True)
    engines[0].store(PROMPTS[4])
    eventually(lambda: out.getvalue().count("\n") >= 8)
    stop.set()
    thread.join(5)
    lines = [msgspec.json.decode(line) for line in out.getvalue().splitlines()]
    assert {line["port"] for line in lines} == {port_of(addresses[0])}
    assert [len(line["frames"]) for line in lines][:4] == [4, 4, 4, 4]
    (tmp_path / "r.jsonl").write_text(out.getvalue())
    report = replay_recording(tmp_path / "r.jsonl")
    assert report.index.keys == 10
    assert {trust.state for trust in report.trust.values()} == {"exact"}


def test_ranks_publish_on_the_next_ports() -> None:
    assert for_rank("tcp://10.0.0.1:5557", 2) == "tcp://10.0.0.1:5559"
    assert for_rank("bind:tcp://*:5557", 0) == "bind:tcp://*:5557"
    assert for_rank("tcp://*:0", 3) == "tcp://*:0"
    assert for_rank("ipc:///tmp/x", 1) == "ipc:///tmp/x"
