"""Which endpoints are Dynamo workers, and their event streams.

Dynamo names a worker by its instance id; the fleet knows addresses. What connects them is the configuration's map, a file
with the same map that something keeps up to date, or the folder of Dynamo's own file discovery, whose entries tell an
instance's IP (then exactly one endpoint must have it). A worker that begins anew gets a new id: its old entries are dropped
with the old id.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

from event_ingest.dynamo_listener import DynamoListener, DynamoSource, DynamoState
from event_ingest.dynamo_stream import sequence_key
from event_ingest.pipeline import EventPath
from fleet.endpoint import Endpoint
from gateway.config_document import Dynamo
from gateway.dynamo_workers import MOST_BYTES, WorkerMapError, discovered, read_workers, workers_of
from indexer.index import Index
from indexer.predicted import Predicted

log = logging.getLogger(__name__)


class DynamoStreams:
    """Belongs to the event loop's thread; the listener's thread feeds the paths."""

    def __init__(self, settings: Dynamo, index: Index) -> None:
        self._settings = settings
        self._index = index
        self._listener = DynamoListener(
            DynamoSource(
                servers=tuple(settings.servers),
                namespace=settings.namespace,
                components=tuple(settings.components),
                block_tokens=settings.block_tokens,
                jetstream=settings.jetstream,
                silent_after_s=settings.silent_after,
            )
        )
        self._configured = workers_of(settings.endpoints, "warmroute.dynamo.endpoints")
        self._by_address: dict[str, int] = {}
        self._by_host: dict[str, int] = {}
        self._complained = ""
        self._alarm = ""
        self.slots: dict[int, int] = {}
        """Slots whose entries are under Dynamo's hashes -> tokens per block."""
        self._workers: dict[int, tuple[int, int]] = {}  # slot -> (worker id, rank)
        self.refresh()

    def start(self) -> None:
        self._listener.start()

    def stop(self) -> None:
        self._listener.stop()

    def refresh(self) -> None:
        """Look at the discovery file or folder again, and at how the subscription is doing. Called every second."""
        try:
            self._look()
            self._complained = ""
        except (OSError, WorkerMapError) as error:
            if str(error) != self._complained:
                self._complained = str(error)
                log.error("dynamo_workers_unusable kept=old error=%s", error)
        alarm = self._listener.alarm(time.monotonic())
        if bool(alarm) != bool(self._alarm):
            log.log(
                logging.ERROR if alarm else logging.INFO, "dynamo_%s detail=%r", "deaf" if alarm else "heard", alarm
            )
        self._alarm = alarm

    def _look(self) -> None:
        by_address = {address: worker for worker, address in self._configured.items()}
        by_host: dict[str, int] = {}
        place = Path(self._settings.discovery) if self._settings.discovery is not None else None
        if place is not None and place.is_dir():
            by_host = {host: worker for worker, host in discovered(place, self._settings.namespace).items()}
        elif place is not None:
            with place.open() as file:
                read = read_workers(file.read(MOST_BYTES), str(place))
            by_address.update({address: worker for worker, address in read.items()})
        self._by_address, self._by_host = by_address, by_host

    def worker_of(self, endpoint: Endpoint, fleet: Iterable[Endpoint]) -> int | None:
        """The worker that serves at an endpoint; None where nobody says. By IP only where one endpoint alone has it."""
        worker = self._by_address.get(endpoint.address)
        if worker is None and self._by_host:
            host = endpoint.address.rpartition(":")[0]
            alike = {other.address for other in fleet if other.address.rpartition(":")[0] == host}
            worker = self._by_host.get(host) if len(alike) == 1 else None
        return worker

    def follow(self, slot: int, endpoint: Endpoint, worker: int, model: str, predicted: Predicted | None) -> EventPath:
        """Take the worker's events for this slot from now on."""
        path = EventPath(
            self._index,
            slot,
            name=f"{endpoint.address}/{endpoint.rank}",
            model=model,
            can_replay=False,
            block_tokens=self._settings.block_tokens,
            counted=False,
            sequence_key=sequence_key(model),
            predicted=predicted,
        )
        self.slots[slot] = self._settings.block_tokens
        self._workers[slot] = (worker, endpoint.rank)
        self._listener.assign(worker, endpoint.rank, path)
        log.info("dynamo_worker_followed slot=%d address=%s worker=%d", slot, endpoint.address, worker)
        return path

    def follows(self, slot: int) -> int | None:
        """The worker whose events go to this slot."""
        return self._workers[slot][0] if slot in self._workers else None

    def unfollow(self, slot: int) -> "Future[None]":
        self.slots.pop(slot, None)
        return self._listener.release(*self._workers.pop(slot))

    def observe(
        self, path: EventPath, keys: Sequence[int], prompt: int, predicted: int, cached: int, decided_at: float
    ) -> None:
        self._listener.observe(path, keys, prompt, predicted, cached, decided_at)

    def alarm(self) -> str:
        """What is wrong with the subscription as a whole; empty while all is well."""
        return self._alarm

    @property
    def thread_name(self) -> str:
        return self._listener.thread_name

    @property
    def died(self) -> bool:
        """Whether the listening thread has ended although nobody stopped it."""
        return self._listener.died

    @property
    def errors(self) -> int:
        """Messages that our own code failed on."""
        return self._listener.errors

    def state(self) -> DynamoState:
        return self._listener.state(time.monotonic())
