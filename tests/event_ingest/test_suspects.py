"""Whom a report of the engine judges, of the blocks that are held on the word of events from before a loss."""

from event_ingest.chain import Block, Key, Span
from event_ingest.suspects import Suspects

SIZE = 16


class Held:
    """Blocks a to d with one key each (1 to 4), all of them suspects until they are settled."""

    def __init__(self) -> None:
        self.settled: set[int] = set()
        self.suspects = Suspects(lambda block: block.hash not in self.settled)
        self.blocks = [Block(number, present=True, keys=(Key(number, None),)) for number in range(1, 5)]
        for block in self.blocks:
            self.suspects.enter(block)

    def judge(self, keys: list[int], cached_tokens: int) -> list[tuple[int, int]]:
        verdicts = []
        for block, from_end in self.suspects.judge(keys, SIZE, cached_tokens):
            verdicts.append((block.hash, from_end))
            self.settled.add(block.hash)
            self.suspects.review(block)
        return verdicts


def test_keys_within_the_report_are_confirmed_from_its_end_and_keys_beyond_are_not_there() -> None:
    held = Held()
    assert held.judge([1, 2, 3], 2 * SIZE + 5) == [(1, 2), (2, 1), (3, 0)]
    assert list(held.suspects.owners) == [4], "no report has spoken of it"


def test_a_block_that_goes_on_behind_the_key_stays_a_suspect() -> None:
    held = Held()
    held.blocks[0].tail = b"four"
    assert held.judge([1], SIZE) == []
    assert 1 in held.suspects.owners


def test_of_a_key_over_several_blocks_a_miss_says_only_that_the_last_one_is_not_there() -> None:
    held = Held()
    first, second = held.blocks[:2]
    over = Span(Key(12, None), (first, second), mask=1)
    first.spans = second.spans = [over]
    for block in (first, second):
        block.keys = ()
    held.suspects.clear()
    held.suspects.enter(first)
    assert not held.suspects.owners, "it is completed by the second block"
    held.suspects.enter(second)
    held.settled.add(second.hash)  # the first one alone is suspect
    assert held.judge([12], SIZE - 1) == [(second.hash, 0)]
    assert not held.suspects.owners, "the engine has spoken of it, and will not be waited for"


def test_a_key_is_forgotten_with_the_last_suspect_that_claims_it() -> None:
    held = Held()
    copy = Block(9, present=True, keys=held.blocks[0].keys)
    held.suspects.enter(copy)
    held.settled.add(1)
    held.suspects.review(held.blocks[0])
    assert 1 in held.suspects.owners
    held.settled.add(9)
    held.suspects.review(copy)
    assert 1 not in held.suspects.owners
