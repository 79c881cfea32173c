"""The event streams of the fleet: one per endpoint and rank, from its first mention to its last entry.

A stream begins when the endpoint's model is known (its name seeds the block keys) and its event address is; until then the
slot is blind and says why. The subscriber's thread feeds the index; this object lives on the event loop and reads numbers.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from event_ingest.events import BlockStored
from event_ingest.pipeline import EventPath
from event_ingest.subscriber import Subscriber
from event_ingest.verify import Verifier
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from gateway.config import LoadedConfig
from gateway.dynamo_streams import DynamoStreams
from gateway.hybrid_matching import Layout
from gateway.picture_metrics import StreamState
from gateway.served_models import ServedModels
from indexer.index import Index
from indexer.predicted import Predicted
from indexer.trust import Reason, Trust, blind

log = logging.getLogger(__name__)

_AGAIN_S = 30.0
"""After so long an address that could not be used is tried again: a port or a file may be free by then."""


class EventStreams:
    """Follows what discovery and /v1/models say; answers what matching and metrics ask."""

    def __init__(
        self,
        fleet: Fleet,
        index: Index,
        models: ServedModels,
        config: LoadedConfig,
        predicted: Predicted | None = None,
    ) -> None:
        self._fleet, self._index, self._models = fleet, index, models
        self._predicted = predicted
        self.dynamo = DynamoStreams(config.settings.dynamo, index) if config.settings.dynamo is not None else None
        """Those endpoints that are Dynamo workers; None where the configuration knows none."""
        self._events = config.settings.events
        self._precise = config.precise
        self._block_tokens = config.settings.index.block_tokens or (
            self._precise.block_tokens if self._precise else None
        )
        self._subscriber = Subscriber()
        self._paths: dict[int, EventPath] = {}
        self._followed: dict[int, tuple[Endpoint, str]] = {}
        self._unusable: dict[int, tuple[str, float]] = {}  # why, and since when
        self.on_stored: Callable[[int, BlockStored, float], None] | None = None
        """Also told of stored events, with their slot, on the listening thread."""
        self._nothing = blind(Reason.NO_EVENTS, 0.0, "no events address")
        self._waiting = blind(Reason.NO_EVENTS, 0.0, "the engine has not said which model it serves")

    def start(self) -> None:
        """Begin listening."""
        self._subscriber.start()
        if self.dynamo is not None:
            self.dynamo.start()

    def stop(self) -> None:
        """End the threads; waits for them."""
        self._subscriber.stop()
        if self.dynamo is not None:
            self.dynamo.stop()

    def _stored(self, slot: int, event: BlockStored, now: float) -> None:
        if self.on_stored is not None:
            self.on_stored(slot, event, now)

    # Following the fleet

    def added(self, slot: int) -> None:
        """A new endpoint: listen to it as soon as its model is known."""
        self._follow(slot)

    def changed(self, slot: int, old: Endpoint, new: Endpoint) -> None:
        """Labels may change freely; another address or model of the same endpoint starts its stream anew."""
        if (old.events, old.replay, old.topic, old.model) != (new.events, new.replay, new.topic, new.model):
            self._unfollow(slot)
            self._follow(slot)

    def removed(self, slot: int, forgotten: Callable[[], None]) -> None:
        """The endpoint is gone. `forgotten` is called, from any thread, when the index holds nothing of it."""
        future = self._unfollow(slot)
        if future is None:
            forgotten()
        else:
            future.add_done_callback(lambda _: forgotten())

    def follow_models(self) -> None:
        """Called every second: engines come up, and say which model they serve, after we do."""
        if self.dynamo is not None:
            self.dynamo.refresh()
        for slot in map(int, self._fleet.slots()):
            followed = self._followed.get(slot)
            model = self._models.base_of(slot)
            if followed is not None and self._worker_changed(slot, followed[0]):
                log.warning("dynamo_worker_changed slot=%d address=%s", slot, followed[0].address)
                self._unfollow(slot)
                followed = None
            if followed is not None and model is not None and followed[1] != model:
                log.warning("model_changed slot=%d was=%s now=%s", slot, followed[1], model)
                self._unfollow(slot)
                followed = None
            unusable = self._unusable.get(slot)
            if unusable is not None and time.monotonic() - unusable[1] >= _AGAIN_S:
                self._unfollow(slot)
                followed = unusable = None
            if followed is None and unusable is None:
                self._follow(slot)

    def _follow(self, slot: int) -> None:
        endpoint = self._fleet.endpoint(slot)
        model = self._models.base_of(slot)
        if self.dynamo is not None and model is not None and (worker := self._worker_of(endpoint)) is not None:
            self._paths[slot] = self.dynamo.follow(slot, endpoint, worker, model, self._predicted)
            self._followed[slot] = (endpoint, model)
            return
        endpoint = self._with_addresses(endpoint)
        if endpoint.events is None or model is None:
            return
        paths = {name: path for name, path in self._models.adapter_paths(slot).items() if path is not None}
        path = EventPath(
            self._index,
            slot,
            name=self._name(endpoint),
            model=model,
            can_replay=endpoint.replay is not None,
            block_tokens=self._block_tokens,
            verifier=Verifier(self._events.hash_algorithm, self._events.hash_seed, lora_paths=paths),
            predicted=self._predicted,
        )
        path.on_stored = partial(self._stored, slot)
        self._paths[slot] = path
        self._followed[slot] = (endpoint, model)
        self._subscriber.add(endpoint, path).add_done_callback(lambda future: self._added(slot, path, future))

    def _unfollow(self, slot: int) -> "Future[None] | None":
        self._paths.pop(slot, None)
        self._unusable.pop(slot, None)
        followed = self._followed.pop(slot, None)
        if self._predicted is not None:
            self._predicted.clear(slot)
        if self.dynamo is not None and self.dynamo.follows(slot) is not None:
            return self.dynamo.unfollow(slot)
        return self._subscriber.remove(self._name(followed[0])) if followed else None

    def _added(self, slot: int, path: EventPath, future: "Future[None]") -> None:
        """On the listening thread; by now the slot may have another stream, or be another endpoint's."""
        error = future.exception()
        if error is not None and self._paths.get(slot) is path:
            self._unusable[slot] = str(error), time.monotonic()
            log.error("stream_unusable slot=%d error=%r", slot, str(error))

    def _worker_of(self, endpoint: Endpoint) -> int | None:
        """The Dynamo worker at an endpoint that has no event address of its own."""
        if self.dynamo is None or endpoint.events is not None:
            return None
        return self.dynamo.worker_of(endpoint, (self._fleet.endpoint(int(slot)) for slot in self._fleet.slots()))

    def _worker_changed(self, slot: int, endpoint: Endpoint) -> bool:
        if self.dynamo is None:
            return False
        return self._worker_of(self._fleet.endpoint(slot)) != self.dynamo.follows(slot)

    def _with_addresses(self, endpoint: Endpoint) -> Endpoint:
        """An endpoint that names no event address gets the one that the precise producer's podDiscoveryConfig implies."""
        if endpoint.events is not None or self._precise is None:
            return endpoint
        implied = self._precise.stream_of(endpoint)
        if implied is None:
            return endpoint
        return Endpoint(
            name=endpoint.name,
            address=endpoint.address,
            namespace=endpoint.namespace,
            labels=endpoint.labels,
            rank=endpoint.rank,
            events=implied[0],
            replay=implied[1],
            topic=endpoint.topic,
            model=endpoint.model,
        )

    @staticmethod
    def _name(endpoint: Endpoint) -> str:
        return f"{endpoint.address}/{endpoint.rank}"

    # What matching asks

    def block_tokens(self, slot: int) -> int:
        """Tokens per block key of this slot's entries; 0 while nothing has been learned."""
        path = self._paths.get(slot)
        return (path.block_tokens or 0) if path else 0

    @property
    def has_own_block_size(self) -> bool:
        """Whether entries may be in blocks of another size than the engines': where the configuration names one."""
        return self._block_tokens is not None

    def engine_block_tokens(self, slot: int) -> int:
        """Tokens per block of this slot's engine; 0 while nothing has been learned."""
        path = self._paths.get(slot)
        return (path.engine_block_tokens or 0) if path else 0

    def layout(self, slot: int) -> Layout:
        """The cache groups of this slot's engine as far as announced; empty where full attention is all there is."""
        path = self._paths.get(slot)
        return path.groups if path is not None and path.is_hybrid else ()

    def trust(self, slot: int) -> Trust:
        """What can be claimed about this slot's entries."""
        path = self._paths.get(slot)
        if path is not None:
            if self.dynamo is not None and path.trust.reason is Reason.NO_EVENTS and slot in self.dynamo.slots:
                return blind(
                    Reason.NO_EVENTS, path.trust.since, self.dynamo.alarm() or "nothing heard of this worker yet"
                )
            unusable = self._unusable.get(slot)
            return path.trust if unusable is None else blind(Reason.NO_EVENTS, unusable[1], unusable[0])
        return self._nothing if self._with_addresses(self._fleet.endpoint(slot)).events is None else self._waiting

    def confirmed(
        self, slot: int, keys: Sequence[int], prompt_tokens: int, predicted: int, cached: int, decided_at: float
    ) -> None:
        """An engine reported `cached` tokens where `predicted` were expected."""
        path = self._paths.get(slot)
        if path is not None and self.dynamo is not None and slot in self.dynamo.slots:
            self.dynamo.observe(path, keys, prompt_tokens, predicted, cached, decided_at)
        elif path is not None:
            self._subscriber.observe(path.name, keys, prompt_tokens, predicted, cached, decided_at)

    # What metrics and the admin port ask

    @property
    def errors(self) -> int:
        """Messages that our own code failed on."""
        return self._subscriber.errors + (self.dynamo.errors if self.dynamo is not None else 0)

    def states(self) -> list[StreamState]:
        """One per endpoint and rank, also for those without a stream."""
        return [self._state(slot) for slot in map(int, self._fleet.slots())]

    def dead_threads(self) -> list[str]:
        """Listening threads that were started and have ended although nobody stopped them."""
        listeners = (self._subscriber, self.dynamo)
        return [it.thread_name for it in listeners if it is not None and it.died]

    def _state(self, slot: int) -> StreamState:
        endpoint, trust, path = self._fleet.endpoint(slot), self.trust(slot), self._paths.get(slot)
        if path is None:
            return StreamState(
                endpoint=endpoint.address, rank=endpoint.rank, state=trust.state, reason=str(trust.reason),
                detail=trust.detail, events={}, skipped={}, gaps=0, replays=0, sequence=-1, last_event_age_s=-1.0,
            )  # fmt: skip
        stream, counters = path.stream, path.stream.counters
        heard = path.heard_at
        return StreamState(
            endpoint=endpoint.address,
            rank=endpoint.rank,
            state=trust.state,
            reason=str(trust.reason),
            detail=trust.detail,
            events=dict(path.events),
            skipped={str(reason): count for reason, count in dict(path.skipped).items()},
            gaps=counters.gaps,
            replays=counters.questions,
            sequence=(stream.next_seq or 0) - 1,
            last_event_age_s=time.monotonic() - heard if heard is not None else -1.0,
            lag_s=path.lag_s,
            batches=counters.applied,
            keys=path.ledger.held_keys,
        )
