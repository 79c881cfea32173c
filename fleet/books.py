"""The books: what this router has sent where and has not yet seen finish.

Scraped load is late by the time it is read; what the router itself just decided is not in it at all. The books are updated
at decision time, so two requests that are decided at once see each other.

The life of a reservation
    reserve ---> awaiting its first token ---> decoding ---> finished
                          \\_______________________\\_______> expired, reconciled (engine idle) or forgotten (slot released)

Rules
1. Time is passed in (monotonic seconds). No clock, no lock, no socket: the event loop's thread calls.
2. What a request costs is frozen at dispatch, as numbers of tokens: n uncached, h cached, n * (h + n/2) for attention. Seconds
   are the scorer's business, which knows the constants of model and hardware; the columns serve any constants.
3. Releasing is idempotent. An id that is not (or no longer) in the books changes nothing and is counted.
4. A request may be in the books more than once: a prefill leg and a decode leg on different slots.
5. What other routers have sent comes in through `feed`, as sums per slot, and is added to the same columns.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from fleet.fleet import Fleet
from fleet.reservation import Leg, square

EXPECTED_OUTPUT = 400
"""Output tokens assumed for a request whose length nobody knows."""


class Sums(msgspec.Struct, frozen=True, kw_only=True):
    """What one router has in flight on one slot; the fields are the fleet's columns of the same names."""

    in_flight: float = 0.0
    awaiting: float = 0.0
    in_flight_tokens: float = 0.0
    in_flight_square: float = 0.0
    decoding: float = 0.0
    decode_tokens: float = 0.0
    reserved_tokens: float = 0.0


class Counts(msgspec.Struct):
    """What happened to reservations, for metrics. All only grow."""

    reserved: int = 0
    finished: int = 0
    expired: int = 0
    """Nothing was heard for the idle timeout: a lost response stream, or a timeout that is too short."""
    reconciled: int = 0
    """The engine said that it has no request at all while the books still held some."""
    forgotten: int = 0
    """Still in flight when their endpoint's slot was given up."""
    unknown: int = 0
    """First tokens and ends of ids that are not in the books (already finished, expired or never reserved)."""


class Books:
    """The ledger. Writes the fleet's columns in_flight .. reserved_tokens and `fleet.pending`."""

    def __init__(self, fleet: Fleet, *, idle_timeout_s: float = 600.0, reconcile_grace_s: float = 30.0) -> None:
        """`idle_timeout_s`: a request of which nothing was heard for so long is dropped from the books.
        `reconcile_grace_s`: how long before a scrape a request must have been heard of last to be dropped when the
        engine reports that it is idle (a decode leg may wait that long for its prefill leg)."""
        self.counts = Counts()
        self._fleet = fleet
        self._idle_timeout_s = idle_timeout_s
        self._grace_s = reconcile_grace_s
        self._requests: dict[str, list[Leg]] = {}  # in order of the last sign of life
        self._computing: dict[int, dict[int, Leg]] = {}  # slot -> id(leg) -> leg that it computes, in order of dispatch
        self._last_first_token: dict[int, float] = {}
        self._peers: dict[str, dict[int, Sums]] = {}
        self._choices = 0
        self.when_freed: list[Callable[[], None]] = []
        """Called when an endpoint has less to do: a prefill is over, or a request has left."""
        fleet.when_released.append(self._forget)

    def __len__(self) -> int:
        """Requests in the books."""
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def reserve(
        self,
        request_id: str,
        slot: int,
        uncached_tokens: float,
        expected_output: float,
        now: float,
        *,
        cached_tokens: float = 0.0,
        fetched_tokens: float = 0.0,
        keys: Sequence[int] = (),
        prefill_only: bool = False,
        model: str = "",
        unseen: bool = False,
    ) -> None:
        """Enter a request at the moment it is decided.

        `uncached_tokens` is what the slot has to prefill (0 for a decode leg whose prefill runs elsewhere), `cached_tokens`
        the rest of the prompt, of which `fetched_tokens` come from another endpoint: nothing to compute, but room is needed.
        `keys` are the block keys of the whole prompt; they count as cached on the slot until the first token. `prefill_only`:
        the leg ends with `prefilled` or the first token. `unseen`: the reply is not streamed, so no first token is seen before
        its end; whoever knows better calls `computed`. The same id on the same slot again (a retry) replaces the old entry.
        """
        fleet = self._fleet
        legs = self._requests.setdefault(request_id, [])
        for old in [leg for leg in legs if leg.slot == slot]:
            self._drop(old)
            legs.remove(old)
        # Whole tokens, though caches count in part (tiers, trust): what is added and taken away again then leaves nothing.
        uncached, cached, fetched = (float(round(it)) for it in (uncached_tokens, cached_tokens, fetched_tokens))
        leg = Leg(request_id, slot, uncached, cached, float(round(expected_output)), now)
        leg.prefill_only, leg.model, leg.unseen = prefill_only, model, unseen
        leg.fetched = fetched
        leg.keys = keys
        legs.append(leg)
        fleet.in_flight[slot] += 1
        fleet.awaiting[slot] += 1
        fleet.in_flight_tokens[slot] += leg.uncached
        fleet.in_flight_square[slot] += leg.square
        fleet.reserved_tokens[slot] += leg.room
        fleet.pending.add(slot, keys)
        self._choices += 1
        fleet.chosen_at[slot] = self._choices
        if leg.computes:
            computing = self._computing.setdefault(slot, {})
            computing[id(leg)] = leg
            if len(computing) == 1:
                self._show_oldest(slot)
        self._heard(request_id, legs, now)
        self.counts.reserved += 1

    def stored(self, request_id: str, slot: int, cached_tokens: float) -> None:
        """Progress by events: so many leading tokens of the prompt are on the slot now, while it has no first token yet."""
        for leg in self._requests.get(request_id, ()):
            if leg.slot == slot and leg.waiting and cached_tokens > leg.stored:
                leg.stored = float(min(cached_tokens, leg.cached + leg.uncached))
                self._show_oldest(slot)

    def prefilled(self, request_id: str, now: float) -> bool:
        """The prefill leg answered: it ends. False where the request has none."""
        legs = self._requests.get(request_id)
        done = [leg for leg in legs or () if leg.prefill_only]
        for leg in done:
            self._freed_at(leg, now)
            self._drop(leg)
        if legs is not None and done:
            legs[:] = [leg for leg in legs if not leg.prefill_only]
            for leg in legs:
                if leg.waiting and leg.fetched and leg.unseen:  # nobody will say when its first token comes
                    self._decodes(leg, now)
            self._heard(request_id, legs, now)
        return bool(done)

    def taken_back(self, request_id: str, slot: int, now: float) -> bool:
        """The prefill leg came to nothing: it ends, and `slot` computes itself what it was to fetch of the prompt. False
        where the request neither waits there nor was believed (of a reply that is not streamed) to have its prompt."""
        legs = self._requests.get(request_id, [])
        for leg in [leg for leg in legs if leg.prefill_only]:
            self._drop(leg)
            legs.remove(leg)
        for leg in legs:
            if leg.slot == slot and (leg.waiting or leg.fetched):
                self.reserve(
                    request_id,
                    slot,
                    leg.uncached + leg.fetched,
                    leg.expected,
                    now,
                    cached_tokens=leg.cached - leg.fetched,
                    keys=leg.keys,
                    model=leg.model,
                    unseen=leg.unseen,
                )
                return True
        return False

    def first_token(self, request_id: str, now: float) -> bool:
        """The first part of the answer arrived: prefill is over. False (and counted) where the id is unknown; False too
        where it had its first token already."""
        legs = self._requests.get(request_id)
        if legs is None:
            self.counts.unknown += 1
            return False
        self.prefilled(request_id, now)
        changed = False
        for leg in legs:
            if leg.waiting:
                changed = True
                self._decodes(leg, now)
        self._heard(request_id, legs, now)
        return changed

    def computed(self, request_id: str, slot: int, now: float) -> None:
        """The prompt is computed on this slot, whatever was seen of the reply."""
        for leg in self._requests.get(request_id, ()):
            if leg.slot == slot and leg.waiting:
                if leg.prefill_only:
                    self.prefilled(request_id, now)
                else:
                    self._decodes(leg, now)
                return

    def computing(self) -> list[int]:
        """Slots that have the prompt of a request without a first token to compute."""
        return [slot for slot, legs in self._computing.items() if legs]

    def oldest(self, slot: int) -> Leg | None:
        """The longest waiting request without a first token that the slot computes; the engine works on it. Not to be
        changed."""
        return next(iter(self._computing.get(slot, {}).values()), None)

    def alive(self, request_id: str, now: float) -> None:
        """Something was heard of the request (a chunk of a long answer): the idle timeout starts again."""
        legs = self._requests.get(request_id)
        if legs is not None:
            self._heard(request_id, legs, now)

    def moved(self, request_id: str, old: int, new: int, now: float) -> bool:
        """Another endpoint of the fallback list served it. There the whole prompt counts as uncached. False where the
        request is not on `old`."""
        for leg in self._requests.get(request_id, ()):
            if leg.slot == old and leg.waiting:
                tokens, keys = leg.cached + leg.uncached, leg.keys
                self._drop(leg)
                self._requests[request_id].remove(leg)
                self.reserve(
                    request_id,
                    new,
                    tokens,
                    leg.expected,
                    now,
                    keys=keys,
                    prefill_only=leg.prefill_only,
                    model=leg.model,
                    unseen=leg.unseen,
                )
                return True
        return False

    def finish(self, request_id: str, now: float) -> bool:
        """Finished, aborted or failed: everything the request holds is given back. False (and counted) for unknown ids."""
        legs = self._requests.pop(request_id, None)
        if legs is None:
            self.counts.unknown += 1
            return False
        for leg in legs:
            if leg.waiting and leg is self.oldest(leg.slot):
                # The engine worked on it and is free for the next one from here on, just as after a first token.
                self._last_first_token[leg.slot] = now
            self._drop(leg)
        self.counts.finished += 1
        return True

    def expire(self, now: float) -> list[str]:
        """Drop requests of which nothing was heard for the idle timeout; their ids."""
        gone = []
        for request_id, legs in self._requests.items():
            if legs and max(leg.seen_at for leg in legs) + self._idle_timeout_s > now:
                break  # in order of the last sign of life: the rest is younger
            gone.append(request_id)
        self._drop_requests(gone)
        self.counts.expired += len(gone)
        return gone

    def reconcile(self, slot: int, engine_requests: float, scraped_at: float) -> list[str]:
        """Correct the books by a scrape: an engine with nothing running or waiting has none of ours either. Their ids.

        Only the certain case is used: with several routers an engine's count says nothing about whose requests it has.
        """
        if engine_requests > 0 or self._fleet.in_flight[slot] <= 0:
            return []
        latest = scraped_at - self._grace_s
        gone = [
            request_id
            for request_id, legs in self._requests.items()
            if legs and all(leg.slot == slot and leg.seen_at < latest for leg in legs)
        ]
        self._drop_requests(gone)
        self.counts.reconciled += len(gone)
        return gone

    # Other routers

    def own(self, slot: int) -> Sums:
        """What this router alone has in flight there; what it would tell others."""
        values = {name: float(getattr(self._fleet, name)[slot]) for name in Sums.__struct_fields__}
        for sums in self._peers.values():
            if slot in sums:
                for name in values:
                    values[name] -= getattr(sums[slot], name)
        return Sums(**values)

    def feed(self, peer: str, sums: Mapping[int, Sums]) -> None:
        """Replace what another router has in flight, per slot of this fleet. An empty mapping forgets the peer."""
        self._add_peer(self._peers.pop(peer, {}), -1.0)
        if sums:
            self._peers[peer] = dict(sums)
            self._add_peer(self._peers[peer], 1.0)

    def _add_peer(self, sums: Mapping[int, Sums], sign: float) -> None:
        for slot, values in sums.items():
            for name in Sums.__struct_fields__:
                getattr(self._fleet, name)[slot] += sign * getattr(values, name)

    # The inside

    def _heard(self, request_id: str, legs: list[Leg], now: float) -> None:
        for leg in legs:
            leg.seen_at = now
        del self._requests[request_id]
        self._requests[request_id] = legs  # to the end of the order

    def _drop_requests(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            for leg in self._requests.pop(request_id):
                self._drop(leg)

    def _freed_at(self, leg: Leg, now: float) -> None:
        if leg.computes:
            self._last_first_token[leg.slot] = now

    def _decodes(self, leg: Leg, now: float) -> None:
        self._freed_at(leg, now)
        self._stop_waiting(leg)
        self._fleet.decoding[leg.slot] += 1
        self._fleet.decode_tokens[leg.slot] += leg.cached + leg.uncached
        self._freed()

    def _freed(self) -> None:
        for told in self.when_freed:
            told()

    def _stop_waiting(self, leg: Leg) -> None:
        fleet, slot = self._fleet, leg.slot
        leg.waiting = False
        fleet.awaiting[slot] -= 1
        fleet.in_flight_tokens[slot] -= leg.uncached
        fleet.in_flight_square[slot] -= leg.square
        fleet.pending.remove(slot, leg.keys)
        leg.keys = ()
        if leg.computes:
            del self._computing[slot][id(leg)]
            self._show_oldest(slot)

    def _drop(self, leg: Leg) -> None:
        fleet, slot = self._fleet, leg.slot
        if leg.waiting:
            self._stop_waiting(leg)
        else:
            fleet.decoding[slot] -= 1
            fleet.decode_tokens[slot] -= leg.cached + leg.uncached
        fleet.in_flight[slot] -= 1
        fleet.reserved_tokens[slot] -= leg.room
        self._freed()

    def _show_oldest(self, slot: int) -> None:
        """Put the longest waiting request into the columns; the engine works on it first."""
        fleet = self._fleet
        oldest = self.oldest(slot)
        if oldest is None:
            fleet.oldest_tokens[slot] = fleet.oldest_left_tokens[slot] = 0.0
            fleet.oldest_square[slot] = fleet.oldest_left_square[slot] = 0.0
        else:
            left = oldest.cached + oldest.uncached - oldest.stored
            fleet.oldest_tokens[slot], fleet.oldest_left_tokens[slot] = oldest.uncached, left
            fleet.oldest_square[slot], fleet.oldest_left_square[slot] = oldest.square, square(left, oldest.stored)
            fleet.oldest_since[slot] = max(oldest.reserved_at, self._last_first_token.get(slot, oldest.reserved_at))

    def _forget(self, slot: int) -> None:
        """The slot's number is about to mean another endpoint: nothing of the old one may be left in the books."""
        for request_id in [key for key, legs in self._requests.items() if any(leg.slot == slot for leg in legs)]:
            legs = self._requests[request_id]
            for leg in [leg for leg in legs if leg.slot == slot]:
                self._drop(leg)
                legs.remove(leg)
            if not legs:
                del self._requests[request_id]
                self.counts.forgotten += 1
        for sums in self._peers.values():
            sums.pop(slot, None)
        self._computing.pop(slot, None)
        self._last_first_token.pop(slot, None)
