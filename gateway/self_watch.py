"""Is the picture believable? Rules that find broken wires from what the gateway sees anyway. No clock, no sockets.

A wrong port, topic, tokenizer or block size turns cache-aware routing into routing by load, and every request still answers
200. So the gateway compares what should go together:

    no_events          prompts with new blocks were computed on an endpoint, and its stream announced nothing
    no_match           no endpoint of a role held anything of any prompt, though engines do not say that nothing was cached
    cached_disagrees   what an engine reports as cached is not what was predicted for it
    role_keys_missing  endpoints of one role hold blocks, those of another, which works too, hold none
    thread_died        a background thread or task has ended

An alarm is on while its condition holds over the last `window_s` seconds. Traffic that shares no prefix is no alarm: there
the engines themselves report zero.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, get_args

import msgspec

Alarm = Literal["no_events", "no_match", "cached_disagrees", "role_keys_missing", "thread_died"]
ALARMS: tuple[Alarm, ...] = get_args(Alarm)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """When a coincidence becomes an alarm."""

    window_s: float = 120.0
    requests: int = 10
    """With new blocks to one endpoint, before its silence counts."""
    settle_s: float = 10.0
    """From a request to its events: prompts wait, and long ones are computed for seconds."""
    matches: int = 30
    """Requests to one role, before finding nothing for any of them counts."""
    reports: int = 10
    """Of one endpoint, before their disagreement counts."""
    disagreeing: float = 0.5
    """Share of the reports that must disagree."""
    tolerance: float = 0.1
    """Of the prompt; a prediction that is off by less, or by less than a block, agrees."""


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint at the moment of a look."""

    where: str
    role: str
    events: int
    """Events applied since it began."""
    keys: int
    """Block keys held for it now."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """An alarm that went on or off."""

    alarm: Alarm
    where: str
    on: bool
    detail: str = ""


class Window:
    """A sum over the last seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._parts: deque[list[float]] = deque()
        self.total = 0.0

    def add(self, amount: float, now: float) -> None:
        if self._parts and now - self._parts[-1][0] < 1.0:
            self._parts[-1][1] += amount
        else:
            self._parts.append([now, amount])
        self.total += amount
        self.forget(now)

    def forget(self, now: float) -> None:
        """Drop what is older than the window."""
        while self._parts and now - self._parts[0][0] > self._seconds:
            self.total -= self._parts.popleft()[1]

    def before(self, moment: float) -> float:
        """The part of the sum that was added before a moment."""
        return sum(amount for at, amount in self._parts if at < moment)


class _Endpoint:
    """What is counted of one endpoint."""

    def __init__(self, window_s: float) -> None:
        self.new_blocks = Window(window_s)  # requests that must have made events
        self.events = Window(window_s)
        self.reports = Window(window_s)
        self.disagreeing = Window(window_s)
        self.seen_events = 0
        self.worst = ""

    def windows(self) -> tuple[Window, ...]:
        return self.new_blocks, self.events, self.reports, self.disagreeing


class _Role:
    def __init__(self, window_s: float) -> None:
        self.requests = Window(window_s)
        self.matched = Window(window_s)
        self.reports = Window(window_s)
        self.cached = Window(window_s)  # reports that something was cached

    def windows(self) -> tuple[Window, ...]:
        return self.requests, self.matched, self.reports, self.cached


class SelfWatch:
    """Fed with every routed request and every report; `look` about once a second. The event loop's thread owns it."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.alarms: dict[tuple[Alarm, str], str] = {}
        """What is on, with its detail."""
        self._endpoints: dict[str, _Endpoint] = {}
        self._roles: dict[str, _Role] = {}
        self._held_at: dict[str, float] = {}  # role -> the last look at which it held keys

    # --- what happens

    def routed(
        self, where: str, role: str, prompt_tokens: int, best: int, chosen: int, block_tokens: int, now: float
    ) -> None:
        """A tokenized request went to `where`; of its prompt `best` tokens were held somewhere, `chosen` there."""
        if prompt_tokens - chosen > block_tokens:
            self._endpoint(where).new_blocks.add(1, now)
        if prompt_tokens > 2 * block_tokens:
            counts = self._role(role)
            counts.requests.add(1, now)
            counts.matched.add(best > 0, now)

    def reported(
        self, where: str, role: str, prompt_tokens: int, predicted: int, cached: int, block_tokens: int, now: float
    ) -> None:
        """An engine reported `cached` tokens where `predicted` were expected."""
        endpoint, off = self._endpoint(where), abs(predicted - cached)
        endpoint.reports.add(1, now)
        if off > max(block_tokens, self.limits.tolerance * prompt_tokens):
            endpoint.disagreeing.add(1, now)
            endpoint.worst = f"last: predicted {predicted}, reported {cached} of {prompt_tokens}"
        counts = self._role(role)
        counts.reports.add(1, now)
        counts.cached.add(cached > 0, now)

    # --- what follows

    def look(self, streams: Sequence[Stream], dead: Collection[str], now: float) -> list[Change]:
        """Judge; what has changed since the last look. `dead`: threads and tasks that have ended."""
        self._forget(streams, now)
        for stream in streams:
            endpoint = self._endpoint(stream.where)
            # From nothing, also at the first look and where a stream has begun anew: what it has was heard since then.
            before = endpoint.seen_events if stream.events >= endpoint.seen_events else 0
            if stream.events > before:
                endpoint.events.add(stream.events - before, now)
            endpoint.seen_events = stream.events
        rules: tuple[Callable[[Sequence[Stream], float], Iterable[tuple[Alarm, str, str]]], ...] = (
            self._no_events,
            self._no_match,
            self._cached_disagrees,
            self._role_keys_missing,
        )
        on = {(alarm, where): detail for rule in rules for alarm, where, detail in rule(streams, now)}
        for name in dead:
            on["thread_died", name] = "what it did is not done any more; restart the gateway"
        were, self.alarms = self.alarms, on
        raised = [Change(alarm=a, where=w, on=True, detail=d) for (a, w), d in on.items() if (a, w) not in were]
        return raised + [Change(alarm=a, where=w, on=False) for a, w in were if (a, w) not in on]

    def events_per_s(self, where: str) -> float:
        """Events of a stream per second over the window."""
        endpoint = self._endpoints.get(where)
        return endpoint.events.total / self.limits.window_s if endpoint else 0.0

    def _no_events(self, streams: Sequence[Stream], now: float) -> Iterable[tuple[Alarm, str, str]]:
        for stream in streams:
            endpoint = self._endpoint(stream.where)
            due = endpoint.new_blocks.before(now - self.limits.settle_s)
            if due >= self.limits.requests and not endpoint.events.total:
                yield "no_events", stream.where, f"{due:.0f} prompts with new blocks and no event in {self._span}"

    def _no_match(self, streams: Sequence[Stream], now: float) -> Iterable[tuple[Alarm, str, str]]:
        for role in {stream.role for stream in streams}:
            counts = self._role(role)
            nothing_cached = counts.reports.total >= self.limits.reports and not counts.cached.total
            if counts.requests.total >= self.limits.matches and not counts.matched.total and not nothing_cached:
                detail = f"{counts.requests.total:.0f} prompts in {self._span}, none of them held anywhere"
                yield "no_match", role, detail

    def _cached_disagrees(self, streams: Sequence[Stream], now: float) -> Iterable[tuple[Alarm, str, str]]:
        for stream in streams:
            endpoint = self._endpoint(stream.where)
            total, off = endpoint.reports.total, endpoint.disagreeing.total
            if total >= self.limits.reports and off >= self.limits.disagreeing * total:
                detail = f"{off:.0f} of {total:.0f} reports in {self._span} disagree; {endpoint.worst}"
                yield "cached_disagrees", stream.where, detail

    def _role_keys_missing(self, streams: Sequence[Stream], now: float) -> Iterable[tuple[Alarm, str, str]]:
        held: dict[str, int] = {}
        for stream in streams:
            held[stream.role] = held.get(stream.role, 0) + stream.keys
        self._held_at |= {role: now for role, keys in held.items() if keys}
        due = now - self.limits.settle_s
        used: dict[str, float] = {}
        for stream in streams:
            # Prompts from before keys were lost prove nothing: an engine that was started again holds none of them.
            since = min(self._held_at.get(stream.role, float("-inf")), due)
            counts = self._endpoint(stream.where).new_blocks
            used[stream.role] = used.get(stream.role, 0.0) + counts.before(due) - counts.before(since)
        for role, keys in held.items():
            others = {other: count for other, count in held.items() if other != role and count}
            if not keys and others and used[role] >= self.limits.requests:
                said = ", ".join(f"{other} {count}" for other, count in others.items())
                yield "role_keys_missing", role, f"{used[role]:.0f} prompts in {self._span}, 0 keys; {said}"

    @property
    def _span(self) -> str:
        return f"{self.limits.window_s:.0f} s"

    def _endpoint(self, where: str) -> _Endpoint:
        if where not in self._endpoints:
            self._endpoints[where] = _Endpoint(self.limits.window_s)
        return self._endpoints[where]

    def _role(self, role: str) -> _Role:
        if role not in self._roles:
            self._roles[role] = _Role(self.limits.window_s)
        return self._roles[role]

    def _forget(self, streams: Sequence[Stream], now: float) -> None:
        """What is old, and endpoints that are gone."""
        present = {stream.where for stream in streams}
        for where in [where for where in self._endpoints if where not in present]:
            del self._endpoints[where]
        counted: list[_Endpoint | _Role] = [*self._endpoints.values(), *self._roles.values()]
        for counts in counted:
            for window in counts.windows():
                window.forget(now)
