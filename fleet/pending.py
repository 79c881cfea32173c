"""Prompts on their way: what endpoints are computing right now and will hold in a moment.

A prompt that was sent to an endpoint and has no first token yet is not in the index, but a second prompt with the same
beginning finds it cached by the time it runs. Counting those blocks is worth more than fresh events are.

The prompts form a compressed radix tree over their block keys. Block keys are chained, so two prompts agree in the first
k blocks exactly when their k-th keys are equal: agreement is found by bisection, and adding a prompt of 8,192 blocks costs
a few comparisons instead of 8,192 dictionary entries. A node counts the prompts through it per slot.
"""

from collections.abc import Sequence
from math import inf

import numpy as np

from fleet.request import Match, Vector


class _Node:
    __slots__ = ("children", "end", "holders", "keys", "start")

    def __init__(self, keys: Sequence[int], start: int, end: int) -> None:
        self.keys, self.start, self.end = keys, start, end
        """Blocks start..end of this key sequence."""
        self.children: dict[int, _Node] = {}
        """First key of the child -> child."""
        self.holders: dict[int, int] = {}
        """Slot -> prompts through the end of this node."""


class PendingPrompts:
    """A multiset of (slot, prompt). `leading` answers how many blocks of a prompt each slot has on the way, `held` how many
    tokens of it the slot has by then."""

    def __init__(self) -> None:
        self._root = _Node((), 0, 0)
        self._prompts = 0
        self._held: tuple[Match, float, Vector] | None = None  # until something changes: scorers and deciders ask alike

    def __len__(self) -> int:
        """Prompts held."""
        return self._prompts

    def add(self, slot: int, keys: Sequence[int]) -> None:
        """Count one prompt. `keys` is kept, not copied: it must not change until `remove`."""
        self._prompts += 1
        self._held = None
        node, position = self._root, 0
        while position < len(keys):
            child = node.children.get(keys[position])
            if child is None:
                child = node.children[keys[position]] = _Node(keys, position, len(keys))
            else:
                agreed = _agree(child, keys)
                if agreed < child.end:
                    self._split(node, child, agreed)
                    child = node.children[keys[position]]
            child.holders[slot] = child.holders.get(slot, 0) + 1
            node, position = child, child.end

    def remove(self, slot: int, keys: Sequence[int]) -> None:
        """Take back one earlier `add` of the same slot and equal keys."""
        self._prompts -= 1
        self._held = None
        node, position = self._root, 0
        while position < len(keys):
            first = keys[position]
            child = node.children[first]
            left = child.holders[slot] - 1
            if left:
                child.holders[slot] = left
            else:
                del child.holders[slot]
                if not child.holders:  # nobody is through here any more, so nobody is below either
                    del node.children[first]
            node, position = child, child.end

    def leading(self, keys: Sequence[int], capacity: int, block_tokens: float = 1.0) -> Vector:
        """Per slot (vector of `capacity`) how much of `keys` from its beginning prompts on their way to it contain: blocks, or
        tokens where a block has `block_tokens`."""
        tokens = np.zeros(capacity)
        node, position = self._root, 0
        while position < len(keys):
            child = node.children.get(keys[position])
            if child is None:
                break
            agreed = _agree(child, keys)
            # Deeper nodes have fewer holders and come later, so every slot ends with its own longest.
            tokens[np.fromiter(child.holders, np.intp, len(child.holders))] = agreed * block_tokens
            if agreed < child.end:
                break
            node, position = child, agreed
        return tokens

    def held(self, match: Match, capacity: int, most: float = inf) -> Vector:
        """Per slot (vector of `capacity`) the leading tokens of a prompt that are there by its match or on their way, whichever
        is more, up to `most`. Shared: do not write into it."""
        if (known := self._held) and known[0] is match and known[1] == most and len(known[2]) == capacity:
            return known[2]
        tokens = self.leading(match.keys, capacity, match.block_tokens)
        if (matched := len(match.tokens)) < capacity:  # slots were added since
            np.maximum(tokens[:matched], match.tokens, out=tokens[:matched])
        else:
            np.maximum(tokens, match.tokens[:capacity], out=tokens)
        np.minimum(tokens, most, out=tokens)
        self._held = match, most, tokens
        return tokens

    def _split(self, parent: _Node, child: _Node, at: int) -> None:
        upper = _Node(child.keys, child.start, at)
        upper.holders = dict(child.holders)
        upper.children[child.keys[at]] = child
        parent.children[child.keys[child.start]] = upper
        child.start = at


def _agree(node: _Node, keys: Sequence[int]) -> int:
    """How many leading blocks of the prompt `keys` agree with the path to the end of `node`; the first of it is known to."""
    low, high = node.start + 1, min(node.end, len(keys))
    if low >= high or node.keys[high - 1] == keys[high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if node.keys[middle] == keys[middle]:
            low = middle + 1
        else:
            high = middle
    return low
