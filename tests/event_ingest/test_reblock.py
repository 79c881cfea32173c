"""From an engine's blocks to router keys, at any ratio of their sizes."""

import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from event_ingest.copies import SUSPECT
from event_ingest.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, Extra, Item, Reason
from event_ingest.operations import Add, Clear, Dense, Remove
from event_ingest.reblock import Reblocker
from indexer import tier
from indexer.block_key import block_keys, media_extras, pack_tokens, root_key
from indexer.hybrid import group_key, group_of, match_groups
from indexer.index import Index

SLOT = 5


class Engine:
    """Announces blocks the way an engine does, and asks the index what it makes of them."""

    def __init__(self, size: int, router: int | None = None, **bounds: int) -> None:
        self.size = size
        self.index = Index()
        self.ledger = Reblocker(model="m", block_tokens=router, **bounds)
        self.dense = True

    def apply(self, event: Event) -> None:
        for operation in self.ledger.apply(event):
            self.operate(operation)
        self.check_density()

    def operate(self, operation: object) -> None:
        match operation:
            case Add(where, keys):
                assert self.index.add(SLOT, where, keys) == len(keys), "nothing is added twice"
            case Remove(where, keys):
                assert self.index.remove(SLOT, where, keys) == len(keys), "only what is held is removed"
            case Clear(keys):
                self.index.clear(SLOT, keys)
                assert self.index.stats().entries == 0
            case Dense(dense):
                self.dense = dense

    def check_density(self) -> None:
        keys = self.ledger._keys().values()
        holes = sum(1 for key in keys if key.claims and key.parent is not None and not key.parent.claims)
        assert holes == self.ledger.holes
        assert self.dense == (holes == 0)

    def hashes(self, tokens: Sequence[int], lora: str | None = None, salt: str | None = None) -> list[int]:
        ends = range(self.size, len(tokens) + 1, self.size)
        return [hash((tuple(tokens[:end]), lora, salt)) & (1 << 64) - 1 for end in ends]

    def event(
        self,
        tokens: Sequence[int],
        start: int = 0,
        *,
        lora: str | None = None,
        salt: str | None = None,
        **fields: object,
    ) -> BlockStored:
        """The event for the full blocks of `tokens` from `start` on."""
        assert start % self.size == 0
        hashes = self.hashes(tokens, lora, salt)
        first = start // self.size
        count = len(hashes) - first
        extras = (Extra(salt=salt), *[None] * (count - 1)) if salt is not None and not start else ()
        defaults: dict[str, object] = {
            "hashes": tuple(hashes[first:]),
            "parent": hashes[first - 1] if first else None,
            "tokens": pack_tokens(tokens[start : len(hashes) * self.size]),
            "block_tokens": self.size,
            "lora": lora,
            "extras": extras,
        }
        return BlockStored(**{**defaults, **fields})  # type: ignore[arg-type]

    def store(self, tokens: Sequence[int], start: int = 0, **fields: object) -> None:
        self.apply(self.event(tokens, start, **fields))  # type: ignore[arg-type]

    def remove(self, hashes: Iterable[int], **fields: object) -> None:
        self.apply(BlockRemoved(hashes=tuple(hashes), **fields))  # type: ignore[arg-type]

    def found(self, tokens: Sequence[int], *, lora: str | None = None, salt: str | None = None) -> int:
        size = self.ledger.block_tokens or self.size
        keys = block_keys(root_key("m", lora=lora, salt=salt), tokens, size)
        return self.index.match(keys).by_slot().get(SLOT, 0) * size

    def tiers(self, tokens: Sequence[int]) -> tuple[int, ...]:
        size = self.ledger.block_tokens or self.size
        return self.index.match(block_keys(root_key("m"), tokens, size)).by_tier(SLOT)

    def reasons(self) -> list[Reason]:
        return [skipped.reason for skipped in self.ledger.skipped]


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(50_000), k=count)


# What is published about other routers


@pytest.mark.parametrize(
    ("prompt", "router", "expected"), [(64, 16, 128), (80, 16, 144), (64, 64, 128), (80, 64, 128), (80, None, 144)]
)
def test_a_reply_stored_one_decode_block_at_a_time_is_found(prompt: int, router: int | None, expected: int) -> None:
    engine = Engine(16, router)
    sequence = tokens(prompt + 64)
    engine.store(sequence[:prompt])
    for end in range(prompt + 16, prompt + 65, 16):
        engine.store(sequence[:end], end - 16)
    assert engine.found(sequence) == expected
    assert engine.ledger.skipped == []


def test_an_append_after_an_unaligned_prompt_completes_its_tail_and_makes_no_wrong_key() -> None:
    engine = Engine(16, 64)
    sequence = tokens(144)
    engine.store(sequence[:80])
    engine.store(sequence, 80)
    assert engine.found(sequence) == 128
    assert engine.found(sequence[:64] + sequence[80:144]) == 64
    assert engine.index.stats().keys == 2


def test_a_subtree_whose_parent_comes_late_is_found_in_full() -> None:
    engine = Engine(16)
    sequence = tokens(160)
    engine.store(sequence[:80])
    engine.store(sequence, 96)
    assert engine.found(sequence) == 80
    assert engine.ledger.waiting == 5  # four blocks, and one expected
    engine.store(sequence[:96], 80)
    assert engine.found(sequence) == 160
    assert (engine.ledger.waiting, engine.ledger.resolved) == (0, 4)
    assert engine.ledger.skipped == []


def test_losing_the_last_engine_block_of_a_router_block_loses_that_router_block_only() -> None:
    engine = Engine(16, 64)
    sequence = tokens(128)
    engine.store(sequence)
    engine.remove([engine.hashes(sequence)[-1]])
    assert engine.found(sequence) == 64


def test_removal_of_one_copy_keeps_the_block_while_another_remains() -> None:
    engine = Engine(16)
    sequence = tokens(64)
    engine.store(sequence)
    engine.store(sequence, 48)
    last = engine.hashes(sequence)[-1]
    engine.remove([last])
    assert engine.found(sequence) == 64
    engine.remove([last])
    assert engine.found(sequence) == 48
    engine.remove([last])
    assert engine.ledger.counters.unknown_removals == 1


# Failure


def test_tokens_that_do_not_fit_the_hashes_are_skipped_with_a_reason() -> None:
    engine = Engine(16)
    engine.apply(BlockStored(hashes=(1, 2), tokens=pack_tokens(tokens(24)), block_tokens=16))
    assert engine.reasons() == [Reason.TOKENS_DO_NOT_FIT]
    assert engine.index.stats().entries == 0


def test_too_many_orphans_drop_the_longest_waiting_subtree_and_say_so() -> None:
    engine = Engine(16, max_waiting=6)
    late = [tokens(64, seed) for seed in range(3)]
    for sequence in late:
        engine.store(sequence, 16)
    assert engine.reasons().count(Reason.ORPHANS_FULL) >= 3
    assert engine.ledger.waiting <= 6
    for sequence in late:
        engine.store(sequence[:16])
    assert [engine.found(sequence) for sequence in late] == [16, 16, 64]


def test_a_hash_that_names_two_contents_is_reported() -> None:
    engine = Engine(16)
    sequence, other = tokens(32), tokens(32, 1)
    engine.store(sequence)
    engine.store(other, hashes=tuple(engine.hashes(sequence)))
    assert engine.reasons() == [Reason.CONTENT_CONFLICT]
    assert (engine.found(sequence), engine.found(other)) == (32, 0)


def test_a_hash_with_another_block_size_is_reported() -> None:
    engine = Engine(16)
    sequence = tokens(32)
    engine.store(sequence)
    engine.apply(BlockStored(hashes=(engine.hashes(sequence)[-1],), tokens=pack_tokens(sequence), block_tokens=32))
    assert engine.reasons() == [Reason.BLOCK_SIZE_CONFLICT]


def test_cache_kinds_without_a_rule_are_skipped_with_a_reason() -> None:
    engine = Engine(16)
    engine.store(tokens(32), kind="cross_attention")
    assert engine.reasons() == [Reason.UNSUPPORTED_CACHE_KIND]
    assert engine.index.stats().entries == 0


def test_removed_blocks_are_forgotten_in_the_end() -> None:
    engine = Engine(16, max_absent=10)
    for seed in range(50):
        sequence = tokens(64, seed)
        engine.store(sequence)
        engine.remove(reversed(engine.hashes(sequence)))
    assert engine.ledger.blocks <= 10 + 4
    assert len(engine.ledger._keys()) <= 14
    assert engine.index.stats().entries == 0


def test_a_child_of_a_block_removed_a_moment_ago_is_placed() -> None:
    engine = Engine(16)
    sequence = tokens(48)
    engine.store(sequence[:32])
    engine.remove(reversed(engine.hashes(sequence)[:2]))
    engine.store(sequence, 32)
    assert engine.found(sequence) == 0
    assert not engine.dense
    engine.store(sequence[:32])
    assert engine.found(sequence) == 48
    assert engine.dense


# Sizes


@pytest.mark.parametrize("router", [4, 6, 8, 16, 24, 40, 48, 64, 128])
@pytest.mark.parametrize("size", [4, 16, 24, 64])
def test_what_is_found_is_what_is_held_at_every_ratio(size: int, router: int) -> None:
    engine = Engine(size, router)
    sequence = tokens(400)
    cut = 100 // size * size
    engine.store(sequence[:cut])
    for end in range(cut + size, 401, size):
        engine.store(sequence[:end], end - size)
    assert engine.found(sequence) == 400 // size * size // router * router
    hashes = engine.hashes(sequence)
    for kept in reversed(range(len(hashes))):
        engine.remove([hashes[kept]])
        assert engine.found(sequence) == kept * size // router * router
    assert engine.index.stats().entries == 0


def test_a_second_engine_block_with_the_same_beginning_keeps_shared_keys() -> None:
    engine = Engine(64, 16)
    first = tokens(64)
    second = first[:32] + tokens(32, 1)
    engine.store(first)
    engine.store(second)
    assert engine.index.stats().keys == 6
    engine.remove(engine.hashes(first))
    assert (engine.found(first), engine.found(second)) == (32, 64)


def test_the_router_size_is_learned_from_the_first_stored_block_and_again_after_another_engine() -> None:
    engine = Engine(32)
    engine.store(tokens(64))
    assert engine.ledger.block_tokens == 32
    engine.ledger.clear(forget_groups=True)
    assert engine.ledger.block_tokens is None


# Identity


def test_an_event_that_contradicts_itself_does_not_teach_a_size() -> None:
    engine = Engine(16)
    sequence = tokens(64)
    engine.store(sequence, block_tokens=24)
    assert (engine.ledger.block_tokens, engine.reasons()) == (None, [Reason.TOKENS_DO_NOT_FIT])
    engine.store(sequence)
    assert (engine.ledger.block_tokens, engine.found(sequence)) == (16, 64)


def test_adapter_salt_and_base_model_share_nothing() -> None:
    engine = Engine(16, 32)
    sequence = tokens(64)
    engine.store(sequence, lora="ad1")
    assert [engine.found(sequence), engine.found(sequence, salt="s")] == [0, 0]
    engine.store(sequence, salt="s")
    engine.store(sequence[:32], lora="ad1", salt="s")
    assert engine.found(sequence) == 0
    assert engine.found(sequence, lora="ad1") == 64
    assert engine.found(sequence, salt="s") == 64
    assert engine.found(sequence, lora="ad1", salt="s") == 32


def test_a_decode_block_of_a_salted_chain_follows_its_parent() -> None:
    engine = Engine(16)
    sequence = tokens(64)
    engine.store(sequence[:48], salt="s")
    engine.store(sequence, 48, salt="s")
    assert engine.found(sequence, salt="s") == 64


@pytest.mark.parametrize("router", [16, 64, 24, 8])
def test_an_image_enters_the_key_of_the_block_it_begins_in_at_any_size(router: int) -> None:
    engine = Engine(16, router)
    sequence = tokens(128)
    begins, ends = 20, 75
    extras = tuple(
        Extra(items=(Item("img", begins - start),)) if start < ends and start + 16 > begins else None
        for start in range(0, 128, 16)
    )
    engine.store(sequence[:48], extras=extras[:3])
    engine.store(sequence, 48, extras=extras[3:])
    for image, expected in (("img", 128 // router * router), ("other", begins // router * router)):
        keys = block_keys(root_key("m"), sequence, router, media_extras([(image, begins)], router))
        assert engine.index.match(keys).by_slot().get(SLOT, 0) * router == expected
    assert engine.found(sequence) == begins // router * router


def test_prompt_embeddings_match_no_request() -> None:
    engine = Engine(16)
    sequence = tokens(32)
    engine.store(sequence, extras=(None, Extra(embeds=b"digest")))
    assert engine.found(sequence) == 16
    assert engine.ledger.skipped == []


# Tiers and groups


def test_a_block_in_two_media_stays_until_it_has_left_both() -> None:
    engine = Engine(16)
    sequence = tokens(32)
    engine.store(sequence)
    engine.apply(BlockStored(hashes=tuple(engine.hashes(sequence)), medium="CPU"))
    engine.remove(engine.hashes(sequence))
    assert engine.tiers(sequence)[tier.CPU] == 2
    engine.remove(engine.hashes(sequence), medium="CPU")
    assert engine.found(sequence) == 0


def test_a_location_that_comes_before_the_tokens_waits_for_them() -> None:
    engine = Engine(16)
    sequence = tokens(48)
    engine.store(sequence[:16])
    engine.apply(BlockStored(hashes=tuple(engine.hashes(sequence)[1:2]), medium="CPU"))
    assert engine.found(sequence) == 16
    engine.store(sequence, 16)
    engine.remove(engine.hashes(sequence)[1:2])
    assert engine.found(sequence) == 48
    assert engine.tiers(sequence)[tier.CPU] == 1


def test_a_router_block_with_parts_in_two_tiers_counts_in_the_slower() -> None:
    engine = Engine(16, 32)
    sequence = tokens(32)
    engine.store(sequence)
    engine.apply(BlockStored(hashes=tuple(engine.hashes(sequence)[1:]), medium="CPU"))
    engine.remove(engine.hashes(sequence)[1:])
    assert engine.tiers(sequence)[tier.CPU] == 1
    assert engine.tiers(sequence)[tier.GPU] == 0


def test_masked_window_blocks_are_placed_by_the_full_attention_group_and_never_alone_make_a_prefix() -> None:
    engine = Engine(16)
    sequence = tokens(96)
    masked = engine.event(
        sequence, hashes=tuple(engine.hashes(sequence)[4:]), group=0, kind="sliding_window", window=32
    )
    engine.apply(masked)
    assert (engine.found(sequence), engine.ledger.waiting) == (0, 2)
    engine.store(sequence, group=1, kind="full_attention")
    assert (engine.found(sequence), engine.ledger.waiting) == (96, 0)
    engine.remove(engine.hashes(sequence)[5:], group=0)
    assert engine.found(sequence) == 96
    engine.remove(engine.hashes(sequence)[5:], group=1)
    assert engine.found(sequence) == 80
    assert engine.ledger.skipped == []


def test_a_window_group_decides_where_a_hit_may_end() -> None:
    engine = Engine(16)
    sequence = tokens(96)
    groups = [group_of(0, "sliding_window", 32), group_of(1, "full_attention")]

    def usable() -> int:
        keys = block_keys(root_key("m"), sequence, 16)
        return match_groups(engine.index, keys, groups, 16).get(SLOT, 0) * 16

    engine.store(sequence, hashes=tuple(engine.hashes(sequence)[4:]), group=0, kind="sliding_window", window=32)
    engine.store(sequence, group=1, kind="full_attention")
    assert usable() == 96
    engine.remove(engine.hashes(sequence)[5:], group=1)
    assert usable() == 0
    engine.store(sequence[:64], hashes=tuple(engine.hashes(sequence)[3:4]), group=0, kind="sliding_window", window=32)
    assert usable() == 80
    engine.remove(engine.hashes(sequence)[3:], group=0)
    assert usable() == 0
    engine.apply(AllBlocksCleared())
    assert engine.index.stats().entries == 0


def test_with_two_full_attention_groups_both_must_hold_a_block() -> None:
    engine = Engine(16)
    sequence = tokens(32)
    engine.store(sequence, group=0, kind="full_attention")
    engine.store(sequence, group=1, kind="mla_attention")
    assert engine.found(sequence) == 32
    engine.remove(engine.hashes(sequence)[1:], group=1)
    assert engine.found(sequence) == 16


def test_a_clear_forgets_every_group_and_medium() -> None:
    engine = Engine(16)
    sequence = tokens(64)
    engine.store(sequence)
    engine.store(tokens(64, 1), 16)
    engine.apply(BlockStored(hashes=tuple(engine.hashes(sequence)), medium="CPU"))
    engine.apply(AllBlocksCleared())
    assert (engine.found(sequence), engine.ledger.blocks, engine.ledger.waiting) == (0, 0, 0)
    engine.store(sequence)
    assert engine.found(sequence) == 64


# After a loss


def test_after_a_loss_everything_held_counts_least_until_confirmed() -> None:
    engine = Engine(16)
    sequence, other = tokens(64), tokens(32, 1)
    engine.store(sequence)
    for operation in engine.ledger.distrust():
        engine.operate(operation)
    engine.store(other)
    assert engine.tiers(sequence)[SUSPECT] == 4
    assert engine.tiers(other)[tier.GPU] == 2
    assert engine.ledger.suspects == 4


def test_what_the_engine_reports_confirms_and_disproves_suspects() -> None:
    engine = Engine(16)
    sequence = tokens(64)
    engine.store(sequence)
    for operation in engine.ledger.distrust():
        engine.operate(operation)
    keys = block_keys(root_key("m"), sequence, 16)
    for operation in engine.ledger.confirm(keys, 32):
        engine.operate(operation)
    engine.check_density()
    assert engine.tiers(sequence)[:3] == (2, 0, 0)
    assert engine.ledger.suspects == 0
    engine.remove(engine.hashes(sequence)[1:2])
    assert engine.found(sequence) == 16


def test_a_store_after_a_loss_makes_a_suspect_certain_with_one_copy() -> None:
    engine = Engine(16)
    sequence = tokens(16)
    engine.store(sequence)
    engine.store(sequence)
    for operation in engine.ledger.distrust():
        engine.operate(operation)
    engine.store(sequence)
    assert engine.tiers(sequence)[tier.GPU] == 1
    engine.remove(engine.hashes(sequence))
    assert engine.found(sequence) == 0
    assert engine.ledger.suspects == 0


def test_confirming_a_router_block_over_several_engine_blocks_confirms_its_parts() -> None:
    engine = Engine(16, 32)
    sequence = tokens(64)
    engine.store(sequence)
    for operation in engine.ledger.distrust():
        engine.operate(operation)
    for operation in engine.ledger.confirm(block_keys(root_key("m"), sequence, 32), 64):
        engine.operate(operation)
    assert engine.tiers(sequence)[tier.GPU] == 2
    assert engine.ledger.suspects == 0


def test_a_hit_proves_the_window_blocks_at_its_end_and_none_before() -> None:
    engine = Engine(16)
    sequence = tokens(96)
    groups = [group_of(0, "sliding_window", 32), group_of(1, "full_attention")]
    keys = block_keys(root_key("m"), sequence, 16)

    def in_window(block: int) -> int | None:
        return engine.index.tier_of(SLOT, group_key(keys[block], 0))

    engine.store(sequence, group=0, kind="sliding_window", window=32)
    engine.store(sequence, group=1, kind="full_attention")
    for operation in engine.ledger.distrust():
        engine.operate(operation)
    assert [in_window(block) for block in range(6)] == [tier.DISK] * 6
    for operation in engine.ledger.confirm(keys, 80):
        engine.operate(operation)
    assert engine.tiers(sequence)[tier.GPU] == 5
    assert [in_window(block) for block in range(6)] == [None, None, None, tier.GPU, tier.GPU, None]
    assert match_groups(engine.index, keys, groups, 16, cap=3) == {}
    assert match_groups(engine.index, keys, groups, 16) == {SLOT: 5}


# Against the definition


steps = st.lists(
    st.tuples(st.sampled_from(["store", "remove", "late", "cpu"]), st.integers(0, 5), st.integers(1, 6)), max_size=30
)


@settings(max_examples=200, deadline=None)
@given(steps, st.sampled_from([2, 3, 4, 6, 8, 12]))
def test_a_key_is_held_exactly_while_all_engine_blocks_under_it_are(
    steps: list[tuple[str, int, int]], router: int
) -> None:
    size = 4
    engine = Engine(size, router)
    copies: dict[tuple[int, ...], int] = {}
    sequences = [[s // 2 * 10 + i // 8 + (s % 2) * (i >= 8) for i in range(24)] for s in range(6)]
    known: set[tuple[int, ...]] = set()  # announced with tokens, and not forgotten since

    def placed(border: tuple[int, ...]) -> bool:
        return all(border[:end] in known for end in range(size, len(border) + 1, size))

    def forget(border: tuple[int, ...]) -> None:
        """A block without a place and without copies is kept for its children only."""
        while border and not copies.get(border) and not placed(border):
            if any(child[:-size] == border for child in known):
                return
            known.discard(border)
            border = border[:-size]

    for kind, which, blocks in steps:
        sequence = sequences[which][: blocks * size]
        borders = [tuple(sequence[:end]) for end in range(size, len(sequence) + 1, size)]
        if kind == "store":
            engine.store(sequence)
            for border in borders:
                copies[border] = copies.get(border, 0) + 1
                known.add(border)
        elif kind == "late" and blocks > 1:
            engine.store(sequence, len(sequence) - size)
            copies[borders[-1]] = copies.get(borders[-1], 0) + 1
            known.add(borders[-1])
        elif kind == "remove" and copies.get(borders[-1]):
            engine.remove([engine.hashes(sequence)[-1]])
            copies[borders[-1]] -= 1
            forget(borders[-1])
    held = {border for border, count in copies.items() if count}
    expected = set()
    for border in held:
        # Only where all ancestors were announced once does anybody know what stands before a block.
        if not placed(border):
            continue
        for end in range(router, len(border) + 1, router):
            parts = range((end - router) // size * size + size, end + size, size)
            if all(border[:part] in held for part in parts if part <= len(border)) and parts[-1] <= len(border):
                expected.add(block_keys(root_key("m"), border[:end], router)[-1])
    actual = {key.key for key in engine.ledger._keys().values() if key.claims}
    assert actual == expected
    assert engine.index.stats().keys == engine.ledger.held_keys == len(expected)
