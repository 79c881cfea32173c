# Joint placement: the prompts of one window over the endpoints of one fleet.
#
#   prompts --equal block keys--> groups ----------------------.
#           `-alone, but with a beginning in common--> singles --+--> placed, the largest first
#           `-alone----------------------------------> nothing is said about them
#
# Why: when many requests with one prompt arrive at the same moment no endpoint holds anything of it yet. Decided one after
# the other they are spread by load, and the prompt is computed once per endpoint.
#
# Rules
# 1. A GROUP is two or more prompts with the same block keys; what is shorter than a block does not tell them apart. A prompt
#    of its own is placed only if it shares at least `min_colocate_blocks` leading blocks with another one (0: never).
# 2. An endpoint's LEVEL is what it owes by the books plus what was placed there in this window: requests, or prompt tokens to
#    be computed. Blocks that the window has already put on an endpoint cost no tokens there.
# 3. Groups before singles, the heaviest first, each on the endpoint with the lowest level. With `min_colocate_blocks` an
#    endpoint that was given at least so many of its leading blocks comes first, the most blocks before others, while its
#    level is below the WATERLINE: where all levels were if the window could be poured over the fleet.
# 4. At most `max_per_replica` of a group go to one endpoint, then the next one takes its turn. When every candidate of a prompt
#    has as many it goes to the one with the fewest: a cap that the fleet is too small for becomes an even spread.
# 5. A prompt goes to one of its own candidates or nowhere. Those with the fewest choose first; an endpoint that more of the
#    group may use comes before one with a lower level.
# 6. Ties go to the endpoint that was chosen the longest ago, then to the lower slot: the same input has the same answer.
"""The placement of a window's prompts: a pure function. Source of the idea and its parameters: llm-d-router's
burst-prefix-cache-producer; the levels, the waterline and candidates per prompt are ours."""

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec
import numpy as np

from fleet.fleet import Slots, Vector


class Prompt(msgspec.Struct, frozen=True):
    """One request of the window."""

    keys: Sequence[int]
    """Chained keys of its full blocks, as far as they are looked at; without any it is alone."""
    tokens: int
    candidates: Slots
    """Where it may go, ascending."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """How to place; see the rules above."""

    block_tokens: int = 64
    max_per_replica: int | None = None
    min_colocate_blocks: int = 0
    by_tokens: bool = False


class Loads(msgspec.Struct, frozen=True):
    """What the books say, by slot."""

    level: Vector
    """Requests in flight, or uncached prompt tokens that await a first token."""
    chosen_at: Vector
    """Smaller: chosen longer ago."""


class Why(StrEnum):
    """What became of a prompt; values of a metric label."""

    COLOCATED = "colocated"
    """Another prompt with the same beginning was placed on the same endpoint."""
    SEPARATED = "separated"
    """It was placed, and the others with its beginning elsewhere."""
    ALONE = "alone"
    """No other prompt of the window is like it."""
    NO_ENDPOINT = "no_endpoint"
    """None of its candidates is left."""


class Placed(msgspec.Struct, frozen=True):
    """The answer for one prompt."""

    slot: int | None
    """None: nothing is said about it."""
    why: Why
    group: int = 1
    """Prompts of the window with the same beginning."""
    together: int = 0
    """Those of them on the same endpoint, itself included."""


def place(prompts: Sequence[Prompt], loads: Loads, rules: Rules) -> list[Placed]:
    """One answer per prompt, in their order."""
    able = [index for index, prompt in enumerate(prompts) if len(prompt.candidates)]
    by_keys: dict[tuple[int, int], list[int]] = {}
    for index in able:
        if keys := prompts[index].keys:
            by_keys.setdefault((len(keys), keys[-1]), []).append(index)
    kin = Counter(family for index in able if (family := _family(prompts[index], rules)) is not None)

    def kindred(index: int) -> bool:
        family = _family(prompts[index], rules)
        return rules.min_colocate_blocks > 0 and family is not None and kin[family] >= 2

    groups = [members for members in by_keys.values() if len(members) >= 2]
    singles = [members for members in by_keys.values() if len(members) == 1 and kindred(members[0])]
    placing = _Placing(prompts, loads, rules)
    placing.pour(members for members in (*groups, *singles))
    for units in (groups, singles):
        for members in sorted(units, key=placing.heaviest_first):
            placing.put(members)

    slots = placing.slots
    beside = Counter((slot, _family(prompts[index], rules)) for index, slot in slots.items())
    answer = []
    for index, prompt in enumerate(prompts):
        slot, family = slots.get(index), _family(prompt, rules)
        if slot is None:
            answer.append(Placed(None, Why.ALONE if len(prompt.candidates) else Why.NO_ENDPOINT))
        else:
            together = beside[slot, family]
            why = Why.COLOCATED if together > 1 else Why.SEPARATED
            answer.append(Placed(slot, why, kin[family or _NOBODY], together))
    return answer


_NOBODY = (-1, -1)


def _family(prompt: Prompt, rules: Rules) -> tuple[int, int] | None:
    """What prompts that belong together have in common; None for one without a full block. Keys are chained: an equal key
    at a place means an equal beginning."""
    least, keys = rules.min_colocate_blocks, prompt.keys
    if least and len(keys) >= least:
        return least, keys[least - 1]
    return (len(keys), keys[-1]) if keys else None


class _Placing:
    """One window being placed."""

    def __init__(self, prompts: Sequence[Prompt], loads: Loads, rules: Rules) -> None:
        self.slots: dict[int, int] = {}
        """Prompt -> its slot."""
        self._prompts, self._rules = prompts, rules
        self._level, self._chosen_at = loads.level.astype(np.float64), loads.chosen_at
        self._waterline = 0.0
        self._follows = rules.by_tokens or rules.min_colocate_blocks > 0
        self._held: dict[int, set[int]] = {}  # slot -> keys that this window has put there
        self._holders: dict[int, set[int]] = {}  # first key -> slots that hold it

    # Weights

    def heaviest_first(self, members: Sequence[int]) -> tuple[float, int]:
        return -self._weight(members), -len(self._prompts[members[0]].keys)

    def _weight(self, members: Sequence[int]) -> float:
        """What the members cost on one endpoint that holds nothing of them."""
        if not self._rules.by_tokens:
            return len(members)
        return self._cost(members, 0)

    def _cost(self, members: Sequence[int], held: int) -> float:
        """Tokens that an endpoint with `held` of their blocks computes for members of one group; at least one each."""
        blocks = len(self._prompts[members[0]].keys)
        tokens = 0
        for member in members:
            tokens += max(1, self._prompts[member].tokens - held * self._rules.block_tokens)
            held = blocks  # the first one leaves them all there
        return float(tokens)

    def pour(self, units: Iterable[Sequence[int]]) -> None:
        """Find the waterline."""
        if not self._rules.min_colocate_blocks:
            return
        total, everywhere = 0.0, np.zeros(len(self._level), np.bool_)
        for members in units:
            total += self._weight(members)
            for member in members:
                everywhere[self._prompts[member].candidates] = True
        if total:
            self._waterline = waterline(self._level[everywhere], total)

    # Placing one group

    def put(self, members: Sequence[int]) -> None:
        keys = self._prompts[members[0]].keys
        held = {slot: self._leading(slot, keys) for slot in self._holders.get(keys[0], ())} if self._follows else {}
        here: Counter[int] = Counter()
        left = sorted(members, key=lambda member: len(self._prompts[member].candidates))
        while left:
            reach, options = self._reach(left)
            slot, room = self._choose(options, reach, here, {} if here else held)
            going = [member for member in left if slot in self._prompts[member].candidates][:room]
            for member in going:
                self.slots[member] = slot
            if self._rules.by_tokens:
                self._level[slot] += self._cost(going, len(keys) if here[slot] else held.get(slot, 0))
            else:
                self._level[slot] += len(going)
            here[slot] += len(going)
            gone = set(going)
            left = [member for member in left if member not in gone]
        if self._follows:
            for slot in here:
                self._held.setdefault(slot, set()).update(keys)
                self._holders.setdefault(keys[0], set()).add(slot)

    def _reach(self, members: Sequence[int]) -> tuple[Vector, Slots]:
        """(members that may use a slot, by slot; the slots that any may use)."""
        reach = np.zeros(len(self._level))
        alike: dict[int, tuple[Slots, int]] = {}
        for member in members:
            candidates = self._prompts[member].candidates
            _, count = alike.get(id(candidates), (candidates, 0))
            alike[id(candidates)] = candidates, count + 1
        for candidates, count in alike.values():
            reach[candidates] += count
        return reach, np.flatnonzero(reach)

    def _choose(self, options: Slots, reach: Vector, here: Counter[int], held: dict[int, int]) -> tuple[int, int]:
        """(the slot for the next members of a group, how many of them at most)."""
        most = self._rules.max_per_replica
        so_far = np.array([here[slot] for slot in options.tolist()]) if here else np.zeros(len(options), np.intp)
        if most is not None and not (so_far < most).any():
            options = options[so_far == so_far.min()]
            return self._lowest(options), 1
        if most is not None:
            options, so_far = options[so_far < most], so_far[so_far < most]
        usable = reach[options] if most is None else np.minimum(reach[options], most - so_far)
        options = options[usable == usable.max()]
        least = self._rules.min_colocate_blocks
        if least and held:
            blocks = np.array([held.get(slot, 0) for slot in options.tolist()])
            blocks[self._level[options] >= self._waterline] = 0
            if blocks.max() >= least:
                options = options[blocks == blocks.max()]
        slot = self._lowest(options)
        return slot, len(self._prompts) if most is None else most - here[slot]

    def _lowest(self, options: Slots) -> int:
        levels = self._level[options]
        options = options[levels == levels.min()]
        return int(options[self._chosen_at[options].argmin()])

    def _leading(self, slot: int, keys: Sequence[int]) -> int:
        """Leading blocks that this window has put on a slot; whole beginnings only, so it can be bisected."""
        held, low, high = self._held[slot], 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in held:
                low = middle
            else:
                high = middle - 1
        return low


def waterline(levels: Vector, amount: float) -> float:
    """The level that all have in the end when `amount` is poured over `levels`, those above it excepted. At least one level."""
    floor = np.sort(levels)
    lines = (np.cumsum(floor) + amount) / np.arange(1, len(floor) + 1)
    under = lines[:-1] <= floor[1:]  # the line ends below the next level: nothing flows there
    return float(lines[int(under.argmax())] if under.any() else lines[-1])
