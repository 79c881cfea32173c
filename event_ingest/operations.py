"""What re-blocking wants of the index, as values. Someone who knows the slot applies them."""

from collections.abc import Iterable, Sequence

import msgspec

from indexer import tier as tiers


class Add(msgspec.Struct, frozen=True):
    """These keys are now held in this tier; parents come before children."""

    tier: int
    keys: tuple[int, ...]


class Remove(msgspec.Struct, frozen=True):
    """These keys are no longer held in this tier."""

    tier: int
    keys: tuple[int, ...]


class Clear(msgspec.Struct, frozen=True):
    """Nothing is held any more; `keys` are all that were."""

    keys: tuple[int, ...]


class Dense(msgspec.Struct, frozen=True):
    """Whether every held key's parent is held too, from here on. False comes before the operation that breaks it."""

    dense: bool


Operation = Add | Remove | Clear | Dense


class Changes:
    """Collects key changes in order and folds neighbours of one kind together."""

    def __init__(self) -> None:
        self._runs: list[tuple[bool, int, list[int]]] = []

    def note(self, key: int, tier: int, *, held: bool) -> None:
        if self._runs and self._runs[-1][0] == held and self._runs[-1][1] == tier:
            self._runs[-1][2].append(key)
        else:
            self._runs.append((held, tier, [key]))

    def take(self) -> list[Operation]:
        runs, self._runs = self._runs, []
        return [Add(tier, tuple(keys)) if held else Remove(tier, tuple(keys)) for held, tier, keys in runs]


TIERS = range(len(tiers.NAMES))


def bits(mask: int) -> Iterable[int]:
    """The tiers in a bit mask, fastest first."""
    return (tier for tier in TIERS if mask >> tier & 1)


def meet(masks: Sequence[int]) -> int:
    """Where all are: the common tiers, else the slowest of each one's fastest; 0 where one is nowhere."""
    common = masks[0]
    for mask in masks:
        common &= mask
    if common or not all(masks):
        return common
    return 1 << max((mask & -mask).bit_length() - 1 for mask in masks)
