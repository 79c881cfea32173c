"""What the router remembers of prompts it sent, where engines tell nothing."""

import gc
import weakref

from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from gateway.approximate import ApproximateCache


def cache(capacity: int, max_tokens: int | None = None) -> tuple[Fleet, ApproximateCache]:
    fleet = Fleet()
    fleet.add(Endpoint(name="a", address="10.0.0.1:8000"))
    fleet.add(Endpoint(name="b", address="10.0.0.2:8000"))
    return fleet, ApproximateCache(fleet, 16, capacity, max_tokens)


def test_only_where_a_prompt_was_sent_is_it_expected() -> None:
    _, remembered = cache(100)
    remembered.sent(1, [1, 2, 3])
    assert remembered.match([1, 2, 3, 4]).tokens[:2].tolist() == [0, 48]


def test_a_full_memory_forgets_the_tail_of_the_oldest_prompt_first() -> None:
    _, remembered = cache(4)
    remembered.sent(0, [1, 2, 3])
    remembered.sent(0, [10, 11])
    assert remembered.match([1, 2, 3]).tokens[0] == 32
    assert remembered.match([10, 11]).tokens[0] == 32


def test_a_prompt_is_looked_at_only_as_far_as_configured() -> None:
    _, remembered = cache(100, max_tokens=32)
    remembered.sent(0, [1, 2, 3])
    found = remembered.match([1, 2, 3])
    assert (found.tokens[0], found.total_tokens) == (32, 32)


def test_a_slot_that_changes_hands_is_forgotten() -> None:
    fleet, remembered = cache(100)
    remembered.sent(0, [1])
    fleet.remove(0)
    fleet.release(0)
    assert remembered.match([1]).tokens[0] == 0


def test_engines_that_report_their_cache_are_followed() -> None:
    fleet, _ = cache(100)
    remembered = ApproximateCache(fleet, 16, 100, 320, follows_engines=True)
    assert (remembered.block_tokens, remembered.match(range(30)).total_tokens) == (16, 320)
    fleet.block_tokens[0] = 64
    assert (remembered.block_tokens, remembered.match(range(30)).total_tokens) == (64, 320)
    fleet.kv_capacity_tokens[0] = 2 * 64 + 5
    for slot in (0, 1):
        remembered.sent(slot, [1, 2, 3])
    assert remembered.match([1, 2, 3]).tokens[:2].tolist() == [128, 192]


def test_it_is_not_kept_alive_by_the_fleet() -> None:
    fleet, remembered = cache(100)
    gone = weakref.ref(remembered)
    del remembered
    gc.collect()
    assert gone() is None
    fleet.remove(0)
    fleet.release(0)
