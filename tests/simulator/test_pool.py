import pytest

from simulator.hash_chain import HashChain, HashRecipe
from simulator.kv_events import Cleared, Removed, Stored
from simulator.pool import BlockPool

RECIPE = HashRecipe.of("sha256_cbor", "0", 4)


def fill(pool: BlockPool, first: int, blocks: int) -> HashChain:
    """Cache `blocks` full blocks of a sequence of its own, and free them."""
    chain = HashChain(RECIPE, range(first, first + 4 * blocks))
    taken = pool.allocate(blocks)
    pool.store(chain, taken, 0, blocks)
    pool.release(taken)
    return chain


def test_a_pool_without_a_usable_block_is_refused() -> None:
    with pytest.raises(ValueError, match="needs at least 2, because block 0 is never used"):
        BlockPool(1)


def test_an_allocation_beyond_the_free_blocks_is_refused() -> None:
    pool = BlockPool(4)
    with pytest.raises(RuntimeError, match="allocating 4 blocks with 3 free"):
        pool.allocate(4)


def test_reset_is_refused_and_silent_while_a_block_is_held() -> None:
    pool = BlockPool(8)
    fill(pool, 0, 2)
    held = pool.allocate(1)
    pool.take_events()
    assert not pool.reset()
    assert pool.take_events() == []
    pool.release(held)
    assert pool.reset()
    assert pool.take_events() == [Cleared()]
    assert pool.copies == 0


def test_the_tail_of_a_sequence_is_evicted_before_its_head() -> None:
    pool = BlockPool(4)
    chain = fill(pool, 0, 3)
    pool.take_events()
    pool.allocate(2)
    assert pool.take_events() == [Removed(chain.digests[2]), Removed(chain.digests[1])]
    assert len(pool.match(chain.digests, 3)) == 1


def test_every_copy_of_a_duplicated_block_is_removed_on_its_own() -> None:
    pool = BlockPool(3)
    first = fill(pool, 0, 1)
    second = fill(pool, 0, 1)
    assert first.digests == second.digests
    assert (pool.copies, len(pool.cached_digests)) == (2, 1)
    pool.take_events()
    pool.allocate(1)
    assert pool.take_events() == [Removed(first.digests[0])]
    assert pool.match(first.digests, 1)
    pool.allocate(1)
    assert pool.take_events() == [Removed(first.digests[0])]
    assert not pool.match(first.digests, 1)


def test_blocks_without_content_are_reused_before_cached_ones() -> None:
    pool = BlockPool(3)
    chain = fill(pool, 0, 1)
    partial = pool.allocate(1)
    pool.release(partial)
    pool.take_events()
    assert pool.allocate(1) == partial
    assert pool.take_events() == []
    assert pool.match(chain.digests, 1)


def test_a_hit_block_is_pinned_until_every_holder_released_it() -> None:
    pool = BlockPool(3)
    chain = fill(pool, 0, 1)
    hit = pool.match(chain.digests, 1)
    assert pool.needs(0, hit) == 1
    pool.hold(hit)
    pool.hold(hit)
    assert (pool.used, pool.needs(0, hit)) == (1, 0)
    pool.release(hit)
    assert pool.used == 1
    pool.release(hit)
    assert pool.used == 0


def test_a_hit_ends_at_the_first_missing_block() -> None:
    pool = BlockPool(9)
    chain = fill(pool, 0, 4)
    other = HashChain(RECIPE, [*range(8), 99, 99, 99, 99, *range(12, 16)])
    assert len(pool.match(other.digests, 4)) == 2
    assert len(pool.match(chain.digests, 3)) == 3


def test_the_salt_enters_block_zero_and_changes_the_whole_chain() -> None:
    plain, salted = HashChain(RECIPE, range(8)), HashChain(RECIPE, range(8), salt="tenant-a")
    assert not set(plain.digests) & set(salted.digests)
    assert (salted.extra_keys(0) is None, salted.extra_keys(1) is None) == (False, True)


def test_a_store_names_the_block_before_it_as_parent() -> None:
    pool = BlockPool(9)
    chain = HashChain(RECIPE, range(12))
    taken = pool.allocate(3)
    pool.store(chain, taken, 0, 2)
    pool.store(chain, taken, 2, 3)
    first, second = pool.take_events()
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert (first.parent, second.parent) == (None, chain.digests[1])
    assert second.token_ids == (8, 9, 10, 11)
