"""What engines report about requests, against what their events said: probing, doubting, healing."""

from typing import Any

import msgspec

from event_ingest.effects import AskReplay
from event_ingest.limits import Limits
from event_ingest.pipeline import EventPath
from event_ingest.stream import END_MARKER
from indexer.block_key import block_keys, root_key
from indexer.index import Index
from indexer.predicted import Predicted

TOKENS = list(range(1, 81))
KEYS = block_keys(root_key("m"), TOKENS, 16)


def frames(seq: int, *events: dict[str, Any], ts: float | None = None) -> list[bytes]:
    payload = msgspec.msgpack.encode([1000.0 + seq if ts is None else ts, list(events), 0])
    return [b"", seq.to_bytes(8, "big"), payload]


def stored(first: int, end: int) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [100 + n for n in range(first, end)],
        "parent_block_hash": 100 + first - 1 if first else None,
        "token_ids": TOKENS[16 * first : 16 * end],
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


class World:
    """A live stream whose engine has stored two blocks; every second passes one at a time."""

    def __init__(self, *, can_replay: bool = True) -> None:
        self.index = Index()
        self.predicted = Predicted()
        self.path = EventPath(
            self.index,
            0,
            name="e",
            model="m",
            can_replay=can_replay,
            limits=Limits(probe_idle_s=0),
            predicted=self.predicted,
        )
        self.now = 0.0
        self.path.connected(self.now)
        self.path.feed(frames(0, stored(0, 2)), self.now)
        self.path.feed_replay([b"", b"", END_MARKER, b""], self.now)
        assert self.path.trust.state == "exact"

    def observe(self, prompt: int, predicted: int, cached: int) -> list[AskReplay]:
        self.now += 1.0
        outcomes = self.path.observe(KEYS[: prompt // 16], prompt, predicted, cached, self.now)
        return [outcome for outcome in outcomes if isinstance(outcome, AskReplay)]

    @property
    def held(self) -> int:
        return self.index.match(KEYS).by_slot().get(0, 0)


def test_a_response_that_fits_asks_nothing() -> None:
    world = World()
    assert world.observe(33, 32, 32) == []
    assert world.observe(40, 32, 32) == []


def test_a_prompt_that_was_computed_and_not_announced_is_asked_for_at_once() -> None:
    world = World()
    assert world.observe(80, 32, 32) == [AskReplay(0)]
    for message in (frames(0, stored(0, 2)), frames(1, stored(2, 5))):
        world.path.feed_replay([b"", *message], world.now)
    world.path.feed_replay([b"", b"", END_MARKER, b""], world.now)
    assert world.held == 5
    assert world.path.trust.state == "exact"


def test_less_cached_than_predicted_asks_whether_it_is_still_the_same_engine() -> None:
    world = World()
    assert world.observe(33, 32, 0) == [AskReplay(0)]
    world.path.feed_replay([b"", *frames(0, stored(0, 1), ts=5000.0)], world.now)
    assert world.path.stream.counters.restarts == 1
    assert world.held == 0, "another incarnation"


def test_from_the_first_response_with_less_than_predicted_until_the_engine_has_answered_nothing_counts_in_full() -> (
    None
):
    world = World()
    world.observe(33, 32, 0)
    assert str(world.path.trust) == "degraded(catching_up)"
    assert "does not fit" in world.path.trust.detail
    world.path.feed_replay([b"", *frames(0, stored(0, 2))], world.now)
    assert world.path.trust.state == "degraded", "the answer is not complete"
    world.path.feed_replay([b"", b"", END_MARKER, b""], world.now)
    assert world.path.trust.state == "exact", "the engine has nothing to add; reports go on being counted"


def test_a_second_contradiction_while_the_next_probe_has_to_wait_is_in_doubt_until_that_one_is_answered() -> None:
    world = World()
    for _ in range(2):
        world.observe(33, 32, 0)
        world.now -= 0.9
        world.path.feed_replay([b"", *frames(0, stored(0, 2))], world.now)
        world.path.feed_replay([b"", b"", END_MARKER, b""], world.now)
    assert str(world.path.trust) == "degraded(catching_up)"
    world.now += 2.0
    assert AskReplay(0) in world.path.tick(world.now)
    world.path.feed_replay([b"", *frames(0, stored(0, 2))], world.now)
    world.path.feed_replay([b"", b"", END_MARKER, b""], world.now)
    assert world.path.trust.state == "exact"


def test_an_engine_that_announces_late_and_answers_at_once_is_never_in_doubt() -> None:
    world = World()
    assert world.observe(80, 32, 32) == [AskReplay(0)]
    world.path.tick(world.now + 0.4)
    assert world.path.trust.state == "exact"
    world.path.feed_replay([b"", *frames(0, stored(0, 2))], world.now + 0.45)
    world.path.tick(world.now + 0.9)
    assert world.path.trust.state == "exact"


def test_an_engine_that_neither_announces_nor_answers_is_in_doubt_after_half_a_second() -> None:
    world = World()
    assert world.observe(80, 32, 32) == [AskReplay(0)]
    world.path.tick(world.now + 0.5)
    assert str(world.path.trust) == "degraded(catching_up)"
    for _ in range(3):
        world.now += 3.0
        world.path.tick(world.now)
    assert str(world.path.trust) == "degraded(lost_batches)"


def test_probes_are_a_second_apart_and_one_at_a_time() -> None:
    world = World()
    assert len(world.observe(80, 32, 32)) == 1
    assert world.observe(80, 32, 32) == [], "the first is not answered yet"
    world.path.feed_replay([b"", *frames(0, stored(0, 2))], world.now)
    world.path.feed_replay([b"", b"", END_MARKER, b""], world.now)
    assert len(world.observe(80, 32, 32)) == 1
    world.path.feed_replay([b"", *frames(0, stored(0, 2))], world.now)
    world.path.feed_replay([b"", b"", END_MARKER, b""], world.now)
    world.now -= 0.9
    assert world.observe(80, 32, 32) == [], "too soon"
    assert AskReplay(0) not in world.path.tick(world.now + 0.5)
    assert AskReplay(0) in world.path.tick(world.now + 1.0), "but not forgotten"


def test_without_a_replay_address_there_is_nobody_to_ask() -> None:
    world = World(can_replay=False)
    assert world.observe(80, 32, 32) == []


def test_too_many_overestimates_make_suspects_that_reports_then_settle() -> None:
    world = World(can_replay=False)
    for _ in range(8):
        world.observe(33, 32, 0)
    assert str(world.path.trust) == "degraded(overpredicted)"
    assert world.path.ledger.suspects == 2
    world.observe(33, 32, 0)
    assert world.held == 0, "dropped: the engine said twice that it has not got them"
    for _ in range(40):
        world.observe(33, 0, 0)
    assert world.path.trust.state == "exact"


def test_events_confirm_what_was_predicted() -> None:
    world = World()
    world.predicted.predict(0, KEYS[2:], 0.0)
    world.predicted.predict(1, KEYS[2:], 0.0)
    world.path.feed(frames(1, stored(2, 4)), world.now)
    assert [world.predicted.holders(key) for key in KEYS[2:]] == [0b10, 0b10, 0b11]


def test_an_emptied_cache_takes_its_predictions_along() -> None:
    world = World()
    world.predicted.predict(0, KEYS[2:], 0.0)
    world.path.feed(frames(1, {"type": "AllBlocksCleared"}), world.now)
    assert not world.predicted
