"""Which stream a slot has: what was asked of the listening thread, and what it answers later."""

import socket
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from gateway.config import load_text
from gateway.event_streams import EventStreams
from gateway.served_models import ServedModels
from indexer.index import Index

CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: precise-prefix-cache-producer
- type: prefix-cache-scorer
  parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}
warmroute:
  models: {m: {}}
"""
SPOILED = Endpoint(name="a", address="10.0.0.1:8000", events="tcp:/nonsense", model="m")
MENDED = Endpoint(name="a", address="10.0.0.1:8000", events="ipc:///nowhere/a", model="m")


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def streams(fleet: Fleet) -> Iterator[EventStreams]:
    config = load_text(CONFIG)
    made = EventStreams(fleet, Index(), ServedModels(config.settings.models, fleet), config)
    yield made
    made.stop()


def eventually_says(streams: EventStreams, slot: int, detail: str) -> None:
    deadline = time.monotonic() + 5
    while detail not in (said := streams.trust(slot).detail):
        assert time.monotonic() < deadline, said
        time.sleep(0.01)


def test_a_stream_with_an_unusable_address_says_what_is_wrong_with_it(fleet: Fleet, streams: EventStreams) -> None:
    streams.start()
    slot = fleet.add(SPOILED)
    streams.added(slot)
    eventually_says(streams, slot, "expected tcp://host:port")
    assert str(streams.trust(slot)) == "blind(no_events)"


def test_the_failure_of_an_address_that_was_changed_meanwhile_is_not_the_new_ones(
    fleet: Fleet, streams: EventStreams
) -> None:
    slot = fleet.add(SPOILED)
    streams.added(slot)
    fleet.replace(slot, MENDED)
    streams.changed(slot, SPOILED, MENDED)
    streams.start()  # only now does the listening thread come to the first address
    other = fleet.add(Endpoint(name="b", address="10.0.0.2:8000", events="tcp:/nonsense", model="m"))
    streams.added(other)
    eventually_says(streams, other, "expected tcp://host:port")
    assert streams.trust(slot).detail == "connecting"


def test_an_address_that_was_taken_is_tried_again(
    fleet: Fleet, streams: EventStreams, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.event_streams._AGAIN_S", 0.05)
    port = free_port()
    streams.start()
    with socket.create_server(("127.0.0.1", port)):
        slot = fleet.add(Endpoint(name="a", address="10.0.0.1:8000", events=f"bind:tcp://127.0.0.1:{port}", model="m"))
        streams.added(slot)
        eventually_says(streams, slot, "something else listens there")
    time.sleep(0.06)
    streams.follow_models()
    publisher = zmq.Context().socket(zmq.PUB)
    publisher.connect(f"tcp://127.0.0.1:{port}")
    try:
        eventually_says(streams, slot, "no replay address")
    finally:
        publisher.close(linger=0)
