"""Matches of engines with several kinds of attention: the full group's prefix, cut to what every other group can start from.

An ordinary match says how many leading blocks the full-attention group holds. For a hybrid engine that is only an upper
bound: a hit of L blocks also needs the last blocks before L in every sliding-window group, and the state at L in a Mamba group
(`indexer.hybrid` has the rule and its evidence). Groups of a kind without a known rule make no claim at all: 0.

The rule knows the prompt's end, because an engine looks for a hit below the last token only: a window that would fit a longer
hit does not make a shorter one usable.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from fleet.fleet import Vector
from indexer.hybrid import Group, Rule, group_key, match_groups
from indexer.index import Index
from indexer.predicted import Predicted

Layout: TypeAlias = tuple[Group, ...]
"""The cache groups of one engine; empty for engines that have full attention only."""


def cut_to_usable(
    index: Index,
    chain: Sequence[int],
    block_tokens: int,
    prompt_tokens: int,
    layouts: Mapping[int, Layout],
    weights: Sequence[float],
    tokens: Vector,
    weighted: Vector,
    predicted: Predicted | None = None,
) -> None:
    """Replace the entries of the slots in `layouts` (all of one block size) by what their groups make usable, in place.

    `tokens` and `weighted` are as long as the fleet's capacity.
    """
    most = max(0, prompt_tokens - 1) // block_tokens
    by_layout: dict[Layout, list[int]] = {}
    for slot, layout in layouts.items():
        by_layout.setdefault(layout, []).append(slot)
    for layout, slots in by_layout.items():
        usable = match_groups(index, chain, layout, block_tokens, most, predicted)
        by_length: dict[int, list[int]] = {}
        for slot in slots:
            by_length.setdefault(usable.get(slot, 0), []).append(slot)
        for blocks, alike in by_length.items():
            tokens[alike] = blocks * block_tokens
            # The tiers of those blocks: a match of the shorter chain says them.
            short = index.match(chain[:blocks], predicted) if blocks else None
            weighted[alike] = short.weighted_tokens(len(weighted), block_tokens, weights)[alike] if short else 0.0


def tail_keys(chain: Sequence[int], layout: Layout) -> list[int]:
    """The keys under which the groups that are not full attention hold a prompt's blocks: to be touched with the plain ones."""
    return [group_key(key, group.number) for group in layout if group.rule is not Rule.FULL for key in chain]
