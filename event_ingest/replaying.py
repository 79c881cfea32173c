"""Play a recording through the ingest path and say what came of it.

What is compared with what. Every batch whose engine time is before a request's sending time is applied, then the longest
prefix of the prompt that the index finds is the prediction. An engine can use at most `(prompt tokens - 1) // B` blocks of its
size B and only whole ones, and the router sees whole blocks of its own size R only. So both the prediction and the report are
rounded down to R, then to B. A request counts as

    exact    both are equal, or (where R is no multiple and no divisor of B) the prediction lies between the rounded report
             and the report itself: a router block that ends inside an engine block cannot tell how that one goes on
    over     more predicted than reported          under    less predicted than the rounded report
    unknown  the meta file lacks what a comparison needs; the row says what

Several ports in one recording are several streams (data-parallel ranks), each a cache of its own. A request that was pinned
is compared with its rank's; otherwise it is exact if any rank's prediction is, and else compared with the best.

An idle engine publishes a cache reset only with its next step. The first request after a reset is therefore predicted from
what was there before, whoever looks at the events: its row carries the note `late_reset`.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from event_ingest.limits import Limits
from event_ingest.pipeline import EventPath
from event_ingest.recording import Message, Meta, RecordingError, Request, read, read_meta
from event_ingest.verify import Hashes, Verifier
from event_ingest.vllm_wire import decode
from indexer.block_key import block_keys, media_extras, root_key
from indexer.hybrid import match_groups
from indexer.index import Index

_PATIENCE = Limits(probe_idle_s=0.0)
_LATE_S = 60.0  # longer than any timeout: what is unanswered at the end of a file stays so


class Outcomes(msgspec.Struct):
    total: int = 0
    exact: int = 0
    over: int = 0
    under: int = 0
    unknown: int = 0


class Size(msgspec.Struct, frozen=True):
    keys: int
    entries: int


class StreamTrust(msgspec.Struct, frozen=True):
    state: str
    reason: str
    detail: str


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One request: tokens predicted and reported, at the router's block size."""

    request: int
    outcome: str
    prompt_tokens: int
    predicted: int | None = None
    actual: int | None = None
    cached_tokens: int | None = None
    """As the engine reported it, before rounding."""
    stream: str | None = None
    notes: tuple[str, ...] = ()


class Report(msgspec.Struct, kw_only=True):
    """What a recording holds. The JSON form is stable: fields are added, never renamed."""

    file: str
    block_tokens: int | None
    requests: Outcomes
    events: dict[str, int]
    skipped: dict[str, int]
    index: Size
    trust: dict[str, StreamTrust]
    hashes: Hashes
    streams: dict[str, dict[str, int]]
    """Counters of each stream: batches, gaps, restarts, blocks waiting for their parent, ..."""
    rows: list[Row]
    mismatch: str = ""
    """What is wrong with the engine's hashes, where something is."""


class _Player:
    """One stream of a recording: its messages not yet fed, and its path."""

    def __init__(self, path: EventPath, messages: Sequence[Message]) -> None:
        self.path = path
        self._messages = deque((message, _engine_time(message)) for message in messages)
        first = messages[0].t if messages else 0.0
        self._now = first
        path.connected(first)

    def play(self, until: float | None) -> None:
        """Feed what the engine published before `until` (its own clock); all of it for None."""
        while self._messages:
            message, published = self._messages[0]
            if until is not None and published >= until:
                return
            self._messages.popleft()
            self._now = max(self._now, message.t)
            if message.is_replay:
                self.path.feed_replay(message.frames, self._now)
            else:
                self.path.feed(message.frames, self._now)
        if until is None:
            self._finish()

    def _finish(self) -> None:
        """Whatever is still asked gets no answer any more."""
        for round_ in range(1, 5):
            self.path.tick(self._now + round_ * _LATE_S)


def replay_recording(file: Path, meta_file: Path | None = None, block_tokens: int | None = None) -> Report:
    """Play `file`; `block_tokens` is the router's block size, None for the engine's own.

    Raises RecordingError for files that are none, OSError where they cannot be read.
    """
    messages = list(read(file))
    if not messages:
        raise RecordingError(f"{file} holds no messages; `warmroute events record` writes recordings")
    meta = read_meta(meta_file) if meta_file is not None else Meta()
    index = Index()
    players = _players(index, messages, meta, block_tokens)
    report = Report(
        file=file.name,
        block_tokens=block_tokens,
        requests=Outcomes(),
        events={},
        skipped={},
        index=Size(0, 0),
        trust={},
        hashes=Hashes(),
        streams={},
        rows=[],
    )
    timed = sorted(meta.requests, key=lambda request: (request.t0 is None, request.t0 or 0.0, request.number))
    for request in timed:
        for player in players:
            if request.t0 is not None:
                player.play(request.t0)
        report.rows.append(_judge(index, players, request))
    for player in players:
        player.play(None)
    report.rows.sort(key=lambda row: row.request)
    _summarise(report, index, players)
    return report


def _players(index: Index, messages: Sequence[Message], meta: Meta, block_tokens: int | None) -> list[_Player]:
    ports: dict[int, list[Message]] = {}
    for message in messages:
        ports.setdefault(message.port, []).append(message)
    players = []
    for slot, port in enumerate(sorted(ports)):
        path = EventPath(
            index,
            slot,
            name=str(port),
            model=meta.model,
            can_replay=any(message.is_replay for message in ports[port]),
            block_tokens=block_tokens,
            limits=_PATIENCE,
            verifier=Verifier(meta.algorithm, meta.seed, lora_paths=meta.lora_paths, limit=None),
        )
        players.append(_Player(path, ports[port]))
    return players


def _engine_time(message: Message) -> float:
    """When the engine published a message; what cannot be read, and the end marker, take their receive time."""
    decoded = decode(message.frames[-1]) if message.frames and not message.is_end else None
    return decoded.batch.ts if decoded is not None and decoded.batch is not None else message.t


def _judge(index: Index, players: Sequence[_Player], request: Request) -> Row:
    prompt = len(request.tokens)
    if request.problem or request.cached_tokens is None:
        notes = (request.problem,) if request.problem else ()
        predicted = max((_predict(index, player.path, request) or 0 for player in players), default=0)
        return Row(
            request=request.number,
            outcome="unknown",
            prompt_tokens=prompt,
            predicted=predicted if request.tokens and request.t0 is not None else None,
            notes=notes,
        )
    chosen = [p for slot, p in enumerate(players) if request.rank is None or slot == request.rank] or list(players)
    best: tuple[str, int, int, str] | None = None
    notes = ()
    for player in chosen:
        predicted = _predict(index, player.path, request) or 0
        actual = _expressible(request.cached_tokens, player.path)
        outcome = "over" if predicted > request.cached_tokens else "under" if predicted < actual else "exact"
        if best is None or outcome == "exact" or predicted > best[1]:
            best = (outcome, predicted, actual, player.path.name)
        if outcome == "exact":
            break
        if player.path.events["AllBlocksCleared"] < request.resets_before:
            notes = ("late_reset",)
    if best is None:
        return Row(request=request.number, outcome="unknown", prompt_tokens=prompt, notes=("no stream",))
    outcome, predicted, actual, name = best
    return Row(
        request=request.number,
        outcome=outcome,
        prompt_tokens=prompt,
        predicted=predicted,
        actual=actual,
        cached_tokens=request.cached_tokens,
        stream=name,
        notes=notes if outcome != "exact" else (),
    )


def _predict(index: Index, path: EventPath, request: Request) -> int | None:
    """Tokens of the prompt that this stream's engine is expected to have; None before its block size is known."""
    size = path.block_tokens
    if size is None:
        return None
    root = root_key(request.model, lora=request.lora, salt=request.salt)
    keys = block_keys(root, request.tokens, size, media_extras(request.media, size))
    engine = path.engine_block_tokens or 1
    usable = max(len(request.tokens) - 1, 0) // engine * engine
    if path.is_hybrid:
        found = match_groups(index, keys, path.groups, size, cap=usable // size).get(path.slot, 0)
    else:
        found = index.match(keys).by_slot().get(path.slot, 0)
    return _expressible(min(found * size, usable), path)


def _expressible(tokens: int, path: EventPath) -> int:
    """What is left of a number of cached tokens in whole router blocks and whole engine blocks."""
    size, engine = path.block_tokens or 1, path.engine_block_tokens or 1
    return tokens // size * size // engine * engine


def _summarise(report: Report, index: Index, players: Iterable[_Player]) -> None:
    for row in report.rows:
        report.requests.total += 1
        setattr(report.requests, row.outcome, getattr(report.requests, row.outcome) + 1)
    events: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    for player in players:
        path = player.path
        events += path.events
        skipped += path.skipped
        report.trust[path.name] = StreamTrust(path.trust.state, path.trust.reason.value, path.trust.detail)
        if path.verifier is not None:
            report.hashes.checked += path.verifier.counts.checked
            report.hashes.wrong += path.verifier.counts.wrong
            report.hashes.unverifiable += path.verifier.counts.unverifiable
            report.mismatch = report.mismatch or path.verifier.mismatch
        report.streams[path.name] = path.counters()
        report.block_tokens = path.block_tokens or report.block_tokens
    report.events = dict(sorted(events.items()))
    report.skipped = dict(sorted(skipped.items()))
    stats = index.stats()
    report.index = Size(stats.keys, stats.entries)


def report_json(report: Report) -> str:
    """The report as one JSON object."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


_COUNTED = {
    "applied": "batches applied",
    "questions": "replays asked for",
    "replayed": "batches replayed",
    "second_copies": "blocks announced again",
    "engine_blocks": "engine blocks held",
    "keys": "index blocks held",
}
"""What a stream's counters are called for people; others by their names."""


def replay_report_text(report: Report) -> str:
    """The report for people."""
    size = (
        f"blocks of {report.block_tokens} tokens" if report.block_tokens else "block size unknown: no block was stored"
    )
    lines = [f"{report.file}  ({size})"]

    def pairs(values: dict[str, Any]) -> str:
        return "  ".join(f"{name} {value}" for name, value in values.items()) or "none"

    lines.append(f"events    {pairs(report.events)}")
    lines.append(f"skipped   {pairs(report.skipped)}")
    lines.append(f"index     {report.index.keys} different blocks, held {report.index.entries} times")
    for name, trust in report.trust.items():
        reason = "" if trust.state == "exact" else f"({trust.reason})" + (f"  {trust.detail}" if trust.detail else "")
        counts = {_COUNTED.get(k, k.replace("_", " ")): v for k, v in report.streams[name].items() if v}
        lines.append(f"stream    port {name}: {trust.state}{reason}  {pairs(counts)}")
    hashes = report.hashes
    lines.append(
        f"hashes    {hashes.checked} of the engine's computed again, {hashes.wrong} of them differ; "
        f"{hashes.unverifiable} more cannot be computed here"
    )
    if report.mismatch:
        lines.append(f"          {report.mismatch}")
    if report.rows:
        lines.append(f"requests  {pairs(msgspec.to_builtins(report.requests))}")
        for row in report.rows:
            if row.outcome in ("over", "under"):
                note = f"  {', '.join(row.notes)}" if row.notes else ""
                lines.append(f"  [{row.request}] {row.outcome}: predicted {row.predicted}, actual {row.actual}{note}")
        unknown = Counter(note for row in report.rows if row.outcome == "unknown" for note in row.notes)
        lines.extend(f"  {count} unknown: {note}" for note, count in unknown.items())
    return "\n".join(lines)
