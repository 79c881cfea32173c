"""Dynamo's subjects, envelopes and events, and the index they make."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from event_ingest.dynamo_stream import DynamoEvents, Worker, request_keys, sequence_key
from event_ingest.dynamo_wire import Subject, decode, parse_subject
from event_ingest.events import AllBlocksCleared, BlockRemoved, BlockStored, Reason
from event_ingest.pipeline import EventPath
from fleet.endpoint import Role
from indexer import tier
from indexer.index import Index

CORE = "namespace.prod.component.backend.kv-events"
LISTED = "namespace.prod.component.decode.endpoint.generate.kv-events"
WORKER = 11400714819323198485
LOCAL = [16863443419780771464, 2287610619914608821, 12129935312930971799]  # tokens 1..16, 17..32, 33..48


def event(
    event_id: int, data: Any, *, worker: int = WORKER, rank: int = 0, medium: str | None = "device"
) -> dict[str, Any]:
    entry = {
        "worker_id": worker,
        "event": {"event_id": event_id, "dp_rank": rank, "data": data},
        "residency_domain": "worker",
    }
    return entry if medium is None else {**entry, "storage_tier": medium}


def stored(hashes: list[int], local: list[int], parent: int | None = None) -> dict[str, Any]:
    blocks = [{"block_hash": h, "tokens_hash": t, "mm_extra_info": None} for h, t in zip(hashes, local, strict=True)]
    return {"stored": {"parent_hash": parent, "start_position": None, "blocks": blocks}}


def removed(*hashes: int) -> dict[str, Any]:
    return {"removed": {"block_hashes": list(hashes)}}


def envelope(payload: Any, sequence: int = 0, published_at: int = 1_795_968_000_000) -> bytes:
    inner = msgspec.msgpack.encode(payload)
    fields = {
        "publisher_id": 5,
        "sequence": sequence,
        "published_at": published_at,
        "topic": "kv-events",
        "payload": inner,
    }
    return msgspec.msgpack.encode(fields)


# Broken input


@pytest.mark.parametrize("body", [b"", b"\xc1", b"{", b"[1,", envelope({})[:-3], b"\x91" * 3000])
def test_a_broken_body_is_one_skip(body: bytes) -> None:
    decoded = decode(body, 16)
    assert decoded.events == ()
    assert [s.reason for s in decoded.skipped] == [Reason.BAD_BATCH]


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (5, Reason.BAD_EVENT),
        ({"worker_id": 1}, Reason.BAD_EVENT),
        ({"event": {"event_id": 1, "data": "cleared"}}, Reason.MISSING_FIELD),
        ({"worker_id": -1, "event": {"event_id": 1, "data": "cleared"}}, Reason.BAD_FIELD),
        (event(1, {"moved": {}}), Reason.UNKNOWN_KIND),
        (event(1, "paused"), Reason.BAD_EVENT),
        (event(1, {"stored": {}}), Reason.MISSING_FIELD),
        (event(1, {"stored": {"blocks": [3]}}), Reason.BAD_FIELD),
        (event(1, {"stored": {"blocks": [{"block_hash": "x"}]}}), Reason.BAD_HASH),
        (event(1, {"removed": {"block_hashes": [1.5]}}), Reason.BAD_HASH),
    ],
)
def test_one_bad_event_of_a_list_costs_one_event(entry: Any, reason: Reason) -> None:
    decoded = decode(envelope([event(1, "cleared"), entry, event(2, removed(3))]), 16)
    assert [s.reason for s in decoded.skipped] == [reason]
    assert [e.event_id for e in decoded.events] == [1, 2]


@given(st.binary(max_size=100))
def test_no_bytes_make_the_decoder_raise(body: bytes) -> None:
    decode(body, 16)


@pytest.mark.parametrize(
    "subject",
    ["", "namespace.a", "namespace.a.component.b", "a.b.c.d.kv-events", "namespace.a.component.b.c.kv-events"],
)
def test_other_subjects_are_none(subject: str) -> None:
    assert parse_subject(subject) is None


# Forms


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        (CORE, Subject("prod", "backend", None, "kv-events")),
        (LISTED, Subject("prod", "decode", "generate", "kv-events")),
        (
            "namespace.prod-0a1b2c3d4e.component.prefill.kv-events",
            Subject("prod", "prefill", None, "kv-events", "0a1b2c3d4e"),
        ),
        ("namespace-my-team-component-backend-kv-events.kv-events", Subject("my-team", "backend", None, "kv-events")),
        (
            "namespace.prod.component.decode.endpoint.generate.kv_metrics",
            Subject("prod", "decode", "generate", "kv_metrics"),
        ),
    ],
)
def test_subjects_of_all_releases_are_understood(subject: str, expected: Subject) -> None:
    assert parse_subject(subject) == expected


@pytest.mark.parametrize(
    ("component", "role"),
    [
        ("backend", Role.BOTH),
        ("prefill", Role.PREFILL),
        ("VllmDecode-decode", Role.DECODE),
        ("prefill_2", Role.PREFILL),
        ("router", None),
    ],
)
def test_the_component_tells_the_role(component: str, role: Role | None) -> None:
    assert Subject("n", component, None, "kv-events").role is role


@pytest.mark.parametrize(
    "body",
    [
        envelope(event(4, stored([111, -222], LOCAL[:2]))),
        envelope([event(4, stored([111, -222], LOCAL[:2]))]),
        msgspec.msgpack.encode([event(4, stored([111, -222], LOCAL[:2]))]),
        json.dumps(event(4, stored([111, -222], LOCAL[:2]))).encode(),
        json.dumps([event(4, stored([111, -222], LOCAL[:2]))]).encode(),
        json.dumps({"publisher_id": 5, "sequence": 1, "payload": [event(4, stored([111, -222], LOCAL[:2]))]}).encode(),
    ],
)
def test_lists_and_single_events_in_msgpack_and_json_are_the_same(body: bytes) -> None:
    decoded = decode(body, 16)
    assert decoded.skipped == ()
    (only,) = decoded.events
    assert (only.worker_id, only.rank, only.event_id) == (WORKER, 0, 4)
    assert only.event == BlockStored(
        hashes=(111, 18446744073709551394), contents=tuple(LOCAL[:2]), block_tokens=16, medium="DEVICE"
    )


@pytest.mark.parametrize("data", ["cleared", {"cleared": {}}, {"cleared": None}])
def test_both_forms_of_cleared_are_understood(data: Any) -> None:
    assert decode(envelope(event(1, data)), 16).events[0].event == AllBlocksCleared()


def test_tiers_become_media() -> None:
    decoded = decode(envelope([event(1, removed(3), medium="host_pinned"), event(2, removed(3), medium=None)]), 16)
    assert [e.event for e in decoded.events] == [
        BlockRemoved(hashes=(3,), medium="HOST_PINNED"),
        BlockRemoved(hashes=(3,), medium="DEVICE"),
    ]


# The index


class Fleet:
    def __init__(self) -> None:
        self.index = Index()
        self.paths: dict[Worker, EventPath] = {}
        self.events = DynamoEvents(self.path_for, 16)
        self.ids = {WORKER, 2}

    def path_for(self, worker: Worker, subject: Subject) -> EventPath | None:
        if worker.worker_id not in self.ids:
            return None
        self.paths[worker] = EventPath(
            self.index,
            len(self.paths),
            name=str(worker.worker_id),
            model="m",
            can_replay=False,
            block_tokens=16,
            counted=False,
            sequence_key=sequence_key("m"),
        )
        return self.paths[worker]

    def found(self, tokens: range, *, lora: str | None = None, model: str = "m", slot: int = 0) -> int:
        return self.index.match(request_keys(model, tokens, 16, lora=lora)).by_slot().get(slot, 0) * 16

    @property
    def first(self) -> EventPath:
        return next(iter(self.paths.values()))


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_a_worker_of_somebody_else_is_counted(fleet: Fleet) -> None:
    fleet.events.feed(CORE, envelope(event(1, "cleared", worker=77)), 0.0)
    assert (fleet.events.foreign, fleet.paths) == (1, {})


def test_an_unknown_subject_is_counted(fleet: Fleet) -> None:
    fleet.events.feed("something.else", envelope(event(1, "cleared")), 0.0)
    assert fleet.events.skipped == {"bad_frames": 1}


@pytest.mark.parametrize("subject", [CORE, LISTED])
def test_recorded_hashes_are_found_by_a_request_with_the_same_tokens(fleet: Fleet, subject: str) -> None:
    fleet.events.feed(subject, envelope([event(1, stored([111, -222], LOCAL[:2]))]), 0.0)
    fleet.events.feed(
        subject, envelope([event(2, stored([333], LOCAL[2:], parent=18446744073709551394))], 1, 1_795_968_000_001), 0.0
    )
    assert fleet.found(range(1, 60)) == 48
    assert fleet.found(range(2, 60)) == 0
    assert fleet.found(range(1, 60), model="other") == 0
    assert str(fleet.first.trust) == "exact"
    fleet.events.feed(subject, envelope([event(3, removed(333))], 2, 1_795_968_000_002), 0.0)
    assert fleet.found(range(1, 60)) == 32


def test_an_adapter_is_part_of_the_content_hash(fleet: Fleet) -> None:
    fleet.events.feed(CORE, envelope(event(1, stored([1], [18298774202889145221]))), 0.0)
    assert (fleet.found(range(33, 49), lora="ad1"), fleet.found(range(33, 49))) == (16, 0)


def test_one_removal_ends_a_block_that_was_stored_twice(fleet: Fleet) -> None:
    for number in (1, 2):
        fleet.events.feed(
            CORE, envelope(event(number, stored([1], LOCAL[:1])), number, 1_795_968_000_000 + number), 0.0
        )
    fleet.events.feed(CORE, envelope(event(3, removed(1)), 3, 1_795_968_000_003), 0.0)
    assert fleet.found(range(1, 17)) == 0


def test_a_lost_event_distrusts_what_is_held(fleet: Fleet) -> None:
    fleet.events.feed(CORE, envelope(event(1, stored([1], LOCAL[:1]))), 0.0)
    fleet.events.feed(CORE, envelope(event(3, stored([2], LOCAL[1:2], parent=1)), 2, 1_795_968_000_002), 0.0)
    assert str(fleet.first.trust) == "degraded(lost_batches)"
    assert fleet.index.match(request_keys("m", range(1, 33), 16)).by_tier(0)[: tier.DISK + 1] == (1, 0, 1)


def test_a_message_that_comes_twice_is_used_once(fleet: Fleet) -> None:
    body = json.dumps(event(0, stored([1], LOCAL[:1]))).encode()
    for _ in range(2):
        fleet.events.feed(CORE, body, 0.0, stamp=17.0)
    assert fleet.first.stream.counters.duplicates == 1
    assert fleet.found(range(1, 17)) == 16


def test_ids_that_begin_again_later_in_time_are_another_incarnation(fleet: Fleet) -> None:
    for number in (1, 2):
        fleet.events.feed(
            CORE, envelope(event(number, stored([number], LOCAL[:1])), number, 1_795_968_000_000 + number), 0.0
        )
    fleet.events.feed(CORE, envelope(event(1, stored([7], LOCAL[1:2])), 0, 1_795_968_900_000), 0.0)
    assert (fleet.found(range(1, 17)), fleet.found(range(17, 33))) == (0, 16)
    assert str(fleet.first.trust) == "exact"


def test_ids_that_begin_again_where_nothing_has_a_time_are_another_incarnation(fleet: Fleet) -> None:
    for number in range(3):
        fleet.events.feed(CORE, json.dumps(event(number + 1, stored([number], [LOCAL[number]]))).encode(), 0.0)
    assert fleet.index.stats().keys == 3
    fleet.events.feed(CORE, json.dumps(event(1, stored([7], [7]))).encode(), 1.0)
    assert fleet.first.stream.counters.restarts == 1
    assert fleet.index.stats().keys == 1


def test_ranks_of_a_worker_are_caches_of_their_own(fleet: Fleet) -> None:
    fleet.events.feed(
        CORE, envelope([event(1, stored([1], LOCAL[:1])), event(1, stored([1], LOCAL[1:2]), rank=1)]), 0.0
    )
    assert [fleet.found(range(1, 17), slot=slot) for slot in (0, 1)] == [16, 0]
    assert [fleet.found(range(17, 33), slot=slot) for slot in (0, 1)] == [0, 16]


def test_a_worker_that_goes_takes_its_entries_along(fleet: Fleet) -> None:
    fleet.events.feed(CORE, envelope(event(1, stored([1], LOCAL[:1]))), 0.0)
    fleet.events.forget(Worker("prod", "backend", WORKER, 0))
    assert fleet.index.stats().entries == 0
