"""How much of a prefix an engine with several kinds of attention can reuse: the hit rule over cache groups.

Such an engine keeps one block chain and several cache groups; each group holds its own subset of the chain's blocks.
A hit of L blocks is usable when every group can start from there:

    full            all blocks 0..L-1
    sliding_window  the last ceil((window - 1) / block_tokens) blocks before L, or all of them where L is shorter
    mamba           the state after block L-1, and nothing before it
    anything else   no claim: the rule is not known here, the usable hit is 0 and the stream is blind(unknown_kind)

Equal block sizes in all groups, no draft model (EAGLE and MTP need a block more in every window and drop the last
matched one). The full and the window rule agree with a recorded engine; the mamba rule is from the engine's source.

Blocks of all groups live in the same index. The full group uses the plain block keys, so a match of it is the match
of any other model; the other groups use `group_key(key, group)`.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum

import msgspec
import xxhash

from indexer.index import Index
from indexer.matched import slots_of
from indexer.predicted import Predicted

_xxh3_64: Callable[[bytes, int], int] = xxhash.xxh3_64_intdigest


class Rule(StrEnum):
    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    MAMBA = "mamba"
    UNKNOWN = "unknown"


# vLLM's kv_cache_spec_kind. Kinds that are missing here are not reusable as a prefix (encoder_only_attention,
# cross_attention), need what no event carries (chunked_local_attention: the chunk) or are new: no claim.
_RULES = {
    "full_attention": Rule.FULL,
    "mla_attention": Rule.FULL,
    "sink_full_attention": Rule.FULL,
    "sliding_window": Rule.SLIDING_WINDOW,
    "sliding_window_mla": Rule.SLIDING_WINDOW,
    "mamba": Rule.MAMBA,
}


class Group(msgspec.Struct, frozen=True):
    """One cache group of an engine. `window` is in tokens and belongs to sliding windows only."""

    number: int
    rule: Rule
    window: int | None = None

    def tail_blocks(self, block_tokens: int) -> int:
        """How many blocks before the end of a hit this group must hold."""
        if self.rule is Rule.MAMBA:
            return 1
        if self.rule is Rule.SLIDING_WINDOW and self.window is not None:
            return -(-(self.window - 1) // block_tokens)
        raise ValueError(f"group {self.number} ({self.rule}, window {self.window}) has no tail rule")


def group_of(number: int, kind: str | None, window: int | None = None) -> Group:
    """The group an event describes. A kind without a known rule, or a window without its size, has Rule.UNKNOWN.

    An event without a kind is full attention if it is of group 0: engines with one group do not say.
    """
    if kind is None:
        return Group(number, Rule.FULL if number == 0 else Rule.UNKNOWN)
    rule = _RULES.get(kind, Rule.UNKNOWN)
    if rule is Rule.SLIDING_WINDOW and (window is None or window < 1):
        rule = Rule.UNKNOWN
    return Group(number, rule, window if rule is Rule.SLIDING_WINDOW else None)


def group_key(key: int, group: int) -> int:
    """The key under which the block `key` is entered for a group other than the full one."""
    return _xxh3_64(key.to_bytes(8, "little"), group + 1)


def usable_blocks(prefix: int, groups: Sequence[tuple[Group, Callable[[int], bool]]], block_tokens: int) -> int:
    """The longest usable hit, in blocks.

    `prefix` is the leading run of the full groups, capped by what the engine may reuse at all (vLLM:
    (prompt tokens - 1) // block_tokens). `groups` are the others, each with its presence by block number.
    """
    if any(group.rule is Rule.UNKNOWN for group, _ in groups):
        return 0
    tails = [(group.tail_blocks(block_tokens), holds) for group, holds in groups if group.rule is not Rule.FULL]
    usable = prefix
    while usable:
        missing = _last_missing(usable, tails)
        if missing is None:
            return usable
        usable = missing  # every longer hit needs the missing block too
    return 0


def _last_missing(usable: int, tails: Sequence[tuple[int, Callable[[int], bool]]]) -> int | None:
    last = -1
    for need, holds in tails:
        for position in range(usable - 1, max(last, usable - need - 1), -1):
            if not holds(position):
                last = position
                break
    return last if last >= 0 else None


def match_groups(
    index: Index,
    keys: Sequence[int],
    groups: Sequence[Group],
    block_tokens: int,
    cap: int | None = None,
    predicted: Predicted | None = None,
) -> dict[int, int]:
    """Usable leading blocks of every slot that has some, for engines with these groups.

    `cap` is the most blocks an engine may reuse. All slots are asked about the groups of this one layout: call it per
    layout and take the slots concerned. Predicted blocks count for all groups, the engine will fill them together.
    """
    others = [group for group in groups if group.rule is not Rule.FULL]
    if any(group.rule is Rule.UNKNOWN for group in others) or not any(group.rule is Rule.FULL for group in groups):
        return {}
    capped = keys if cap is None else keys[:cap]
    holders: dict[tuple[int, int], int] = {}

    def holding(position: int, group: int) -> int:
        found = holders.get((position, group))
        if found is None:
            found = index.holders(group_key(capped[position], group))
            if predicted is not None:
                found |= predicted.holders(capped[position])
            holders[position, group] = found
        return found

    usable: dict[int, int] = {}
    by_length: dict[int, int] = {}
    for slot, blocks in index.match(capped, predicted).by_slot().items():
        by_length[blocks] = by_length.get(blocks, 0) | 1 << slot
    needs = [(group.number, group.tail_blocks(block_tokens)) for group in others]
    # Slots with the same candidate length are looked at together; a missing block sends some of them to a shorter one.
    while by_length:
        length = max(by_length)
        slots = by_length.pop(length)
        for position in range(length - 1, max(-1, length - 1 - max((need for _, need in needs), default=0)), -1):
            lacking = 0
            for number, need in needs:
                if position >= length - need:
                    lacking |= slots & ~holding(position, number)
            if lacking:
                slots ^= lacking
                if position:
                    by_length[position] = by_length.get(position, 0) | lacking
            if not slots:
                break
        usable.update((slot, length) for slot in slots_of(slots))
    return usable
