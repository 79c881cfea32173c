"""Which stream a slot has: what was asked of the listening thread, and what it answers later."""

import time
from collections.abc import Iterator

import pytest

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
