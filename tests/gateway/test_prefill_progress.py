"""Books of replies that are not streamed, and of prompts whose progress is known by events."""

from typing import Literal

from fleet.books import Books
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from gateway.prefill_progress import PrefillProgress
from scorers.expected_work_scorer import ExpectedWorkScorer

KEYS = list(range(100, 110))


class World:
    def __init__(self, progress: Literal["clock", "events"] = "clock", scorer: bool = True) -> None:
        self.fleet = Fleet()
        self.slot = self.fleet.add(Endpoint(name="a", address="10.0.0.1:8000"))
        self.books = Books(self.fleet)
        self.held: set[tuple[int, int]] = set()
        self.progress = PrefillProgress(
            self.fleet, self.books, lambda slot, key: (slot, key) in self.held, lambda slot: 16
        )
        if scorer:
            self.progress.scorer = ExpectedWorkScorer("w", ExpectedWorkScorer.Parameters(progress=progress))

    def send(self, name: str, now: float = 0.0, *, unseen: bool = True, prefill_only: bool = False) -> None:
        self.books.reserve(
            name, self.slot, 165, 400, now, keys=KEYS, unseen=unseen, prefill_only=prefill_only, model="m"
        )

    def store(self, blocks: int) -> None:
        self.held |= {(self.slot, key) for key in KEYS[:blocks]}


def test_a_reply_that_is_streamed_is_waited_for() -> None:
    world = World()
    world.send("r", unseen=False)
    world.store(10)
    world.progress.tick(100.0)
    assert world.fleet.awaiting[world.slot] == 1


def test_the_last_announced_block_ends_an_unseen_prefill() -> None:
    world = World(scorer=False)
    world.send("r")
    world.store(9)
    world.progress.tick(0.001)
    assert world.fleet.awaiting[world.slot] == 1
    world.store(10)
    world.progress.tick(0.002)
    assert (world.fleet.awaiting[world.slot], world.fleet.decoding[world.slot]) == (0, 1)
    assert world.fleet.in_flight_tokens[world.slot] == 0


def test_without_events_it_ends_when_it_is_half_as_long_again_overdue() -> None:
    world = World()
    world.send("r")
    expected = 165 * 18.8e-6 + 8.74e-10 * 165**2 / 2
    world.progress.tick(1.4 * expected)
    assert world.fleet.awaiting[world.slot] == 1
    world.progress.tick(1.6 * expected)
    assert world.fleet.awaiting[world.slot] == 0


def test_one_prefill_after_another_is_taken_to_run() -> None:
    world = World()
    world.send("first")
    world.send("second")
    world.progress.tick(0.006)
    assert world.fleet.awaiting[world.slot] == 1
    world.progress.tick(0.007)
    assert world.fleet.awaiting[world.slot] == 1
    world.progress.tick(0.012)
    assert world.fleet.awaiting[world.slot] == 0


def test_the_end_of_an_unseen_prefill_leg_ends_that_leg() -> None:
    world = World(scorer=False)
    world.send("r", prefill_only=True)
    world.store(10)
    world.progress.tick(0.001)
    assert world.fleet.in_flight[world.slot] == 0


def test_freed_endpoints_are_told_to_the_queue() -> None:
    world = World()
    told: list[None] = []
    world.books.when_freed.append(lambda: told.append(None))
    world.send("r")
    assert not told
    world.progress.tick(1.0)
    assert told


def test_progress_by_events_reaches_the_books() -> None:
    world = World(progress="events")
    world.send("r", unseen=False)
    world.store(5)
    world.progress.tick(0.0)
    assert world.fleet.oldest_left_tokens[world.slot] == 165 - 80
    world.store(10)
    world.progress.tick(0.0)
    assert world.fleet.oldest_left_tokens[world.slot] == 5


def test_progress_by_the_clock_asks_no_index() -> None:
    world = World()
    world.send("r", unseen=False)
    world.store(5)
    world.progress.tick(0.0)
    assert world.fleet.oldest_left_tokens[world.slot] == 165


def test_a_decode_leg_that_fetches_its_prompt_computes_nothing_and_is_not_overdue() -> None:
    world = World()
    world.books.reserve("r", world.slot, 0, 400, 0.0, cached_tokens=1000, fetched_tokens=900, unseen=True, keys=KEYS)
    prefill = world.fleet.add(Endpoint(name="b", address="10.0.0.2:8000"))
    world.books.reserve("r", prefill, 900, 1, 0.0, cached_tokens=100, unseen=True, prefill_only=True)
    world.progress.tick(0.005)
    assert (world.fleet.awaiting[world.slot], world.fleet.decoding[world.slot]) == (1, 0)
    assert world.books.taken_back("r", world.slot, 0.01)
    assert world.fleet.in_flight_tokens[[world.slot, prefill]].tolist() == [900, 0]


def test_an_unseen_decode_leg_decodes_when_its_prefill_leg_is_over() -> None:
    world = World()
    prefill = world.fleet.add(Endpoint(name="b", address="10.0.0.2:8000"))
    world.books.reserve("r", world.slot, 0, 400, 0.0, cached_tokens=1000, fetched_tokens=900, unseen=True)
    world.books.reserve("r", prefill, 900, 1, 0.0, cached_tokens=100, unseen=True, prefill_only=True)
    world.progress.tick(10.0)
    assert (world.fleet.in_flight[prefill], world.fleet.awaiting[world.slot]) == (0, 0)
    assert (world.fleet.decoding[world.slot], world.fleet.decode_tokens[world.slot]) == (1, 1000)
    assert world.books.taken_back("r", world.slot, 10.1)  # it had failed after all
    assert (world.fleet.decoding[world.slot], world.fleet.decode_tokens[world.slot]) == (0, 0)
    assert world.fleet.in_flight_tokens[world.slot] == 900
