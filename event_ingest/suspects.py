"""The router keys that are held only on the word of events from before a loss, and what a report of the engine says of them.

A response tells how many tokens of its prompt were cached. Of the prompt's keys those within were there; the first one beyond
was not, nor was any after it that the engine could have used. So a report judges the suspects under its prompt's keys:

    key within     the blocks whose content it decides to the last token are there; a block that goes on behind the key may
                   be another one that begins alike, and stays a suspect
    key beyond     the block that completes it is not there (where it lies over several, those before may well be)

This file knows which keys have suspects, and passes the judgement; what it means for their copies, `copies` knows.
"""

from collections.abc import Callable, Iterator, Sequence

from event_ingest.chain import Block, Span


class Suspects:
    """Suspect keys and what claims them. `is_suspect` tells whether a block is held, and only on the word of lost events."""

    def __init__(self, is_suspect: Callable[[Block], bool]) -> None:
        self._is_suspect = is_suspect
        self.owners: dict[int, list[Block | Span]] = {}
        """What claims a suspect key, by key."""

    def clear(self) -> None:
        self.owners.clear()

    def enter(self, block: Block) -> None:
        """A block has become a suspect: so has every key in it, and every key over it that it completes."""
        for key in block.keys:
            self.owners.setdefault(key.key, []).append(block)
        for span in block.spans or ():
            if span.mask and span.parts[-1] is block:
                self.owners.setdefault(span.key.key, []).append(span)

    def review(self, block: Block) -> None:
        """A block has changed: forget the keys in and over it that nothing suspect claims any more."""
        for key in block.keys:
            self._prune(key.key)
        for span in block.spans or ():
            self._prune(span.key.key)

    def judge(self, keys: Sequence[int], key_tokens: int, cached_tokens: int) -> Iterator[tuple[Block, int]]:
        """What a report says: blocks, and where their key is, counted from the end of the hit (1 is its last, 0 is beyond).

        `keys` are those of the prompt, in order, that the engine could have used; each is of `key_tokens`. Judge every
        block before asking for the next: what becomes of it decides what is still suspect.
        """
        cached = cached_tokens // key_tokens
        for number, key in enumerate(keys):
            from_end = cached - number
            for owner in self.owners.get(key, ()):
                for block in _proven(owner, key) if from_end > 0 else (_completing(owner),):
                    yield block, from_end
            if from_end > 0:
                self._prune(key)
            else:
                self.owners.pop(key, None)

    def _prune(self, key: int) -> None:
        owners = self.owners.get(key)
        if owners is not None and not any(self._claims(owner) for owner in owners):
            del self.owners[key]

    def _claims(self, owner: Block | Span) -> bool:
        """Whether a key is held because of this owner, and on a suspect's word."""
        if isinstance(owner, Block):
            return self._is_suspect(owner)
        return all(part.present for part in owner.parts) and any(self._is_suspect(part) for part in owner.parts)


def _completing(owner: Block | Span) -> Block:
    """The block in which a key ends."""
    return owner if isinstance(owner, Block) else owner.parts[-1]


def _proven(owner: Block | Span, key: int) -> list[Block]:
    """The blocks that a hit on a key proves: those whose content the key decides to the last token."""
    if isinstance(owner, Block):
        whole = not owner.tail and bool(owner.keys) and owner.keys[-1].key == key
        return [owner] if whole else []
    return [part for part in owner.parts if part is not owner.parts[-1] or not part.tail]
