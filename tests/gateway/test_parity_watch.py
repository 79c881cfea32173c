"""Sampled comparison of the engine's token ids with the router's own."""

import logging
from collections.abc import Sequence

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from event_ingest.events import BlockStored
from gateway.metrics import Metrics
from gateway.parity_watch import SETTLE_S, ParityWatch
from indexer.block_key import block_keys, root_key
from indexer.index import Index
from indexer.tier import GPU
from indexer.trust import Reason, Trust, exact

TOKENS = np.arange(100, 148, dtype=np.uint32)
KEYS = block_keys(root_key("m"), TOKENS, 16)


def decode(ids: Sequence[int]) -> str:
    return "".join(f"<{i}>" for i in ids)


def stored(tokens: np.ndarray, parent: int | None = None) -> BlockStored:
    return BlockStored(hashes=(1, 2, 3), parent=parent, tokens=tokens.astype("<u4").tobytes(), block_tokens=16)


class World:
    def __init__(self) -> None:
        self.index = Index()
        self.metrics = Metrics(CollectorRegistry())
        self.trust = exact(-1.0)
        self.watch = ParityWatch(self.index, self.metrics, lambda slot: self.trust)

    def send(self, request_id: str = "r", now: float = 0.0) -> None:
        self.watch.sent(request_id, 0, "e:1", TOKENS, KEYS, decode, now)

    def judged(self, result: str) -> float:
        labels = {"endpoint": "e:1", "result": result}
        return self.metrics.registry.get_sample_value("warmroute_token_parity_total", labels) or 0.0


def test_a_different_token_is_shown_with_its_text(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.send()
    theirs = TOKENS.copy()
    theirs[20] = 7
    world.watch.stored(0, stored(theirs), 0.5)
    world.watch.finished("r", 1.0)
    with caplog.at_level(logging.WARNING):
        world.watch.tick(1.0 + SETTLE_S)
    assert world.judged("differs") == 1
    assert "token 20: the engine has 7 '<7>', the router 120 '<120>'" in caplog.text
    assert world.watch.last_mismatch[0].position == 20


def test_a_prompt_that_parts_at_its_first_token_is_found_too() -> None:
    world = World()
    world.send()
    world.watch.stored(0, stored(np.concatenate([[1], TOKENS])), 0.5)  # a second BOS, say
    world.watch.finished("r", 1.0)
    world.watch.tick(1.0 + SETTLE_S)
    assert world.judged("differs") == 1


def test_blocks_under_the_same_keys_are_equal() -> None:
    world = World()
    world.send()
    world.index.add(0, GPU, KEYS)
    world.watch.finished("r", 1.0)
    world.watch.tick(1.0 + SETTLE_S)
    assert world.judged("equal") == 1


def test_silence_is_unseen_and_no_accusation() -> None:
    world = World()
    world.send()
    world.watch.stored(0, stored(TOKENS + 1000, parent=5), 0.5)  # continues something else
    world.watch.finished("r", 1.0)
    world.watch.tick(1.0 + SETTLE_S)
    assert world.judged("unseen") == 1


def test_other_prompts_of_the_engine_are_no_difference() -> None:
    world = World()
    world.send()
    for offset in (1000, 2000):
        world.watch.stored(0, stored(TOKENS + offset), 0.5)
    world.watch.finished("r", 1.0)
    world.watch.tick(1.0 + SETTLE_S)
    assert world.judged("unseen") == 1


def test_what_was_announced_as_we_have_it_and_evicted_since_does_not_differ() -> None:
    world = World()
    world.send()
    other = TOKENS.copy()
    other[20] = 7  # another prompt of the same system prompt
    world.watch.stored(0, stored(TOKENS), 0.5)
    world.watch.stored(0, stored(other), 0.6)
    world.watch.finished("r", 1.0)
    world.watch.tick(1.0 + SETTLE_S)
    assert (world.judged("differs"), world.judged("unseen")) == (0, 1)


@pytest.mark.parametrize("trust", [Trust("degraded", Reason.LOST_BATCHES, -1.0), exact(0.7)])
def test_a_stream_that_has_missed_something_accuses_nobody(trust: Trust) -> None:
    world = World()
    world.send()
    world.trust = trust
    world.watch.stored(0, stored(TOKENS + 1000), 0.5)  # the only one that was heard
    world.watch.finished("r", 1.0)
    world.watch.tick(1.0 + SETTLE_S)
    assert (world.judged("differs"), world.judged("unseen")) == (0, 1)


def test_an_endpoint_that_is_gone_is_judged_no_more_and_leaves_nothing_to_the_next_one_of_its_slot() -> None:
    world = World()
    world.send()
    theirs = TOKENS.copy()
    theirs[20] = 7
    world.watch.stored(0, stored(theirs), 0.5)
    world.watch.finished("r", 1.0)
    world.watch.released(0)
    world.watch.tick(1.0 + SETTLE_S)
    world.send("s", 0.5)  # the next one, at once
    world.watch.finished("s", 1.6)
    world.watch.tick(1.6 + SETTLE_S)
    assert (world.judged("differs"), world.judged("unseen")) == (0, 1)


def test_announcements_are_kept_only_while_a_sample_of_their_engine_waits() -> None:
    world = World()
    theirs = TOKENS.copy()
    theirs[20] = 7
    world.watch.stored(0, stored(theirs), 0.1)
    world.send("r", 0.0)
    world.send("s", 2.0)
    world.watch.stored(1, stored(theirs), 2.1)
    world.watch.stored(0, stored(theirs), 2.1)
    assert {slot: len(kept) for slot, kept in world.watch._beginnings.items()} == {0: 1}
    world.watch.dropped("r")
    world.watch.finished("s", 3.0)
    world.watch.tick(3.0 + SETTLE_S)
    assert world.judged("differs") == 1
    assert not world.watch._beginnings


def test_nothing_is_judged_early_or_after_an_abort() -> None:
    world = World()
    world.send("r", 0.0)
    world.send("s", 10.0)
    world.watch.finished("r", 1.0)
    world.watch.tick(1.0)
    world.watch.dropped("r")
    world.watch.dropped("s")
    world.watch.tick(100.0)
    assert sum(world.judged(result) for result in ("equal", "differs", "unseen")) == 0


def test_a_slot_is_sampled_at_most_once_a_second() -> None:
    world = World()
    for number in range(5):
        world.send(f"r{number}", number * 0.3)
        world.watch.finished(f"r{number}", number * 0.3)
    world.watch.tick(100.0)
    assert world.judged("unseen") == 2
