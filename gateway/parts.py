"""The gateway's parts as far as their counters are concerned; `gateway.part_metrics` exports them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fleet.books import Books
from fleet.breaker import Breaker
from fleet.scraper import Scraper
from gateway.dynamo_streams import DynamoStreams
from gateway.part_metrics import EXTPROC_EVENTS, Sample, of_books
from indexer.predicted import Predicted
from tokenization.backends import Backend, LocalBackend
from tokenization.segments import KeyChainCache


class GatewayParts:
    """Asks for each part when it is scraped, because some come late and some are replaced by a reload."""

    def __init__(
        self,
        *,
        books: Books,
        breaker: Breaker,
        chains: KeyChainCache,
        backends: Callable[[], Mapping[str, Backend]],
        scraper: Callable[[], Scraper | None],
        extproc: Callable[[], Counter[str]],
        transport: Callable[[], tuple[str, str] | None],
        event_errors: Callable[[], int],
        predicted: Predicted | None = None,
        dynamo: DynamoStreams | None = None,
    ) -> None:
        """`transport`: the one in use and the one that is configured; None before the server is there."""
        self._books, self._breaker, self._chains = books, breaker, chains
        self._backends, self._scraper, self._extproc, self._event_errors = backends, scraper, extproc, event_errors
        self._transport, self._predicted, self._dynamo = transport, predicted, dynamo

    def samples(self) -> Iterable[Sample]:
        for model, backend in self._backends().items():
            for outcome, count in dict(backend.counts).items():
                yield "tokenizer_outcomes", (model, backend.name, outcome), count
            if isinstance(backend, LocalBackend):
                yield from self._segments(model, backend)
        yield "key_chain_hit_keys", (), self._chains.hit_keys
        yield "key_chain_computed_keys", (), self._chains.computed_keys
        yield "key_chain_keys", (), len(self._chains)
        if (scraper := self._scraper()) is not None:
            for (page, outcome), count in dict(scraper.counts).items():
                yield "scrapes", (page, outcome), count
        yield from of_books(self._books.counts, len(self._books))
        yield "breaker_trips", (), self._breaker.trips
        counts = self._extproc()
        for event in EXTPROC_EVENTS:
            yield "extproc", (event,), counts[event]
        if (transport := self._transport()) is not None:
            yield "extproc_transport", transport, 1
        yield "event_errors", (), self._event_errors()
        if self._predicted is not None:
            stats = self._predicted.stats()
            for end in ("confirmed", "expired", "released", "evicted"):
                yield "predicted_blocks", (end,), getattr(stats, end)
            yield "predicted_blocks_open", (), stats.entries
        if self._dynamo is not None:
            state = self._dynamo.state()
            yield "dynamo_up", (), float(state.connected and not state.alarm)
            yield "dynamo_messages", ("wanted",), state.messages
            yield "dynamo_messages", ("elsewhere",), state.elsewhere
            yield "dynamo_unknown_worker_events", (), sum(state.strangers.values())
            for reason, count in state.skipped.items():
                yield "dynamo_skipped", (reason,), count

    @staticmethod
    def _segments(model: str, backend: LocalBackend) -> Iterable[Sample]:
        stats = backend.tokenizer.segments.cache.stats()
        for name in ("hits", "misses", "hit_tokens", "miss_tokens", "evicted", "bytes"):
            value: Any = getattr(stats, name)
            yield f"segment_cache_{name}", (model,), value
        for outcome, count in dict(backend.tokenizer.image_counts).items():
            yield "tokenizer_images", (model, outcome), count
