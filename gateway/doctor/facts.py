"""What an examination saw, as values. No judgement and no sockets here; None and empty mean that it could not be seen."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from event_ingest.events import Batch, BlockStored
from event_ingest.sockets import BIND
from fleet.endpoint import Endpoint
from fleet.listing import Listing
from gateway.config import LoadedConfig

Link = Literal["up", "refused", "no_publisher", "unanswered", "bound", "bind_failed"]
"""up: a ZMQ publisher is there. refused: nobody listens. no_publisher: somebody listens who is no ZMQ publisher.
unanswered: no sign of life. bound: we listen ourselves and wait for engines. bind_failed: we cannot listen there."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of an engine's own GET /kv_event_sources."""

    enabled: bool
    endpoint: str | None = None
    replay: str | None = None
    topic: str = ""
    buffer_steps: int | None = None
    listening: bool = False
    """Whether somebody accepts connections at the port of `endpoint` on the engine's host, though `endpoint` names a host."""

    @property
    def binds(self) -> bool:
        """vLLM's rule: an address with a wildcard, ipc or inproc is bound, any other is connected to."""
        text = self.endpoint or ""
        return "*" in text or "::" in text or text.startswith(("ipc://", "inproc://"))

    @property
    def loopback_bound(self) -> bool:
        """An address that engines other than vLLM bind although it names a host."""
        return "0.0.0.0" in (self.endpoint or "") or self.listening


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP address of the fleet and what it says about itself."""

    address: str
    endpoints: Sequence[Endpoint] = ()
    """The configured endpoints there: one per rank."""
    error: str = ""
    """Why it does not answer at all."""
    sources: Mapping[int, Source] | None = None
    """By rank; None where the engine has no such route."""
    cache: Mapping[int, Mapping[str, str]] = {}
    """Labels of vllm:cache_config_info by rank."""
    models: Listing | None = None
    unnamed_adapters: Sequence[str] = ()
    """Adapters listed without a path."""

    @property
    def names(self) -> str:
        return ", ".join(endpoint.name for endpoint in self.endpoints) or self.address


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """One message of an event stream, live or from a replay."""

    topic: str
    seq: int | None
    batch: Batch | None
    skipped: Sequence[str] = ()
    """What could not be read."""

    def stored(self) -> list[BlockStored]:
        events = self.batch.events if self.batch else ()
        return [event for event in events if isinstance(event, BlockStored)]


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to "everything from batch `start` on"."""

    answered: bool
    start: int = 0
    first: int | None = None
    """Number of the oldest batch that came; None where the buffer is empty."""
    last: int | None = None
    span_s: float = 0.0
    """Engine time from the oldest batch to the newest."""
    times: Sequence[tuple[int, float]] = ()
    """(sequence, engine time) in the order in which they came."""
    complete: bool = False
    """The end marker came, and no number was missing."""


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """One configured event stream, as heard by listening to everything on its socket."""

    endpoint: Endpoint
    """With the addresses that the configuration implies."""
    link: Link = "unanswered"
    detail: str = ""
    heard: Sequence[Heard] = ()
    """Live messages, in the order in which they came."""
    replay: Replay | None = None
    """None where there is no replay address, or it was not asked."""

    @property
    def where(self) -> str:
        return f"{self.endpoint.name} ({self.endpoint.events})"

    @property
    def binds(self) -> bool:
        return bool(self.endpoint.events and self.endpoint.events.startswith(BIND))


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """One tiny request sent to one endpoint (twice), and the same prompt tokenized by the router and by the engine."""

    endpoint: Endpoint
    model: str
    chat: bool = True
    error: str = ""
    """Why the engine did not answer it."""
    engine_ids: Sequence[int] = ()
    """The prompt as the engine tokenized it; empty where it does not say."""
    engine_ids_from: str = ""
    """Who said so: the answer, /tokenize or /render."""
    router_ids: Sequence[int] = ()
    """The prompt as the gateway would tokenize it."""
    router_exact: bool = False
    router_error: str = ""
    text_engine_ids: Sequence[int] = ()
    """A plain text, tokenized by both: tells a tokenizer that differs from a template that differs."""
    text_router_ids: Sequence[int] = ()
    usage: Sequence[Mapping[str, Any]] = ()
    """`usage` of each answer."""

    @property
    def cached(self) -> list[int | None]:
        """cached_tokens of each answer."""
        return [(usage.get("prompt_tokens_details") or {}).get("cached_tokens") for usage in self.usage]

    @property
    def prompt_tokens(self) -> int:
        return max((int(usage.get("prompt_tokens") or 0) for usage in self.usage), default=0)


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """The template probe's verdict on one tokenizer directory."""

    model: str
    directory: str
    rewrites: bool
    cause: str = ""
    match_tokens: int = 0
    held_tokens: int = 0
    acknowledged: bool = False
    """`warmroute.models.NAME.rewritesHistory` says so already."""


class Sample(msgspec.Struct, frozen=True):
    """One line of the gateway's metrics page."""

    name: str
    labels: Mapping[str, str]
    value: float


class Gateway(msgspec.Struct, frozen=True, kw_only=True):
    """The running gateway's metrics page, read at the beginning and at the end."""

    where: str
    running: bool = False
    error: str = ""
    before: Sequence[Sample] = ()
    after: Sequence[Sample] = ()

    def value(self, name: str, labels: Mapping[str, str] = {}, *, first: bool = False) -> float | None:
        """The sum of the samples of this name with these labels; None where there is none."""
        samples = self.before if first else self.after
        values = [it.value for it in samples if it.name == name and labels.items() <= it.labels.items()]
        return sum(values) if values else None


class Envoy(msgspec.Struct, frozen=True, kw_only=True):
    """The Envoy in front: its configuration, and what a request through it showed."""

    where: str
    """The file, or the admin address."""
    listeners: Sequence[Mapping[str, Any]] = ()
    clusters: Sequence[Mapping[str, Any]] = ()
    through: str = ""
    """The listener that a request was sent through; empty where none was."""
    status: int | None = None
    """Of that request; None where Envoy did not answer."""
    counted: bool | None = None
    """Whether the gateway counted a request meanwhile; None where nobody knows."""


class Dynamo(msgspec.Struct, frozen=True, kw_only=True):
    """What was heard on NATS, whatever the configuration subscribes to."""

    servers: Sequence[str]
    error: str = ""
    subjects: Mapping[str, int] = {}
    """Subject -> messages."""
    workers: Mapping[int, str] = {}
    """Worker id -> subject, of those heard."""
    namespace: str = ""
    """As configured; empty takes all."""
    components: Sequence[str] = ()
    known: Mapping[int, str] = {}
    """Worker id -> `ip:port` (or the IP alone), as configured or discovered."""
    block_tokens: int = 0
    seconds: float = 0.0


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one examination saw."""

    config: LoadedConfig
    endpoints: Sequence[Endpoint] = ()
    """With the event addresses that the configuration implies."""
    engines: Mapping[str, Engine] = {}
    streams: Sequence[Stream] = ()
    probes: Sequence[Probe] = ()
    templates: Sequence[Template] = ()
    gateway: Gateway | None = None
    envoy: Envoy | None = None
    dynamo: Dynamo | None = None

    def engine_of(self, endpoint: Endpoint) -> Engine | None:
        return self.engines.get(endpoint.address)

    def by_dynamo(self, endpoint: Endpoint) -> bool:
        """Whether this endpoint's events come over NATS: it has no address of its own, and is a known worker."""
        known = set(self.dynamo.known.values()) if self.dynamo else set()
        return endpoint.events is None and bool({endpoint.address, endpoint.address.rpartition(":")[0]} & known)

    def source_of(self, endpoint: Endpoint) -> Source | None:
        """What the engine says about this endpoint's rank; a single rank answers for whatever number it was given."""
        engine = self.engine_of(endpoint)
        if engine is None or not engine.sources:
            return None
        if endpoint.rank in engine.sources:
            return engine.sources[endpoint.rank]
        return next(iter(engine.sources.values())) if len(engine.sources) == 1 else None

    def probe_of(self, endpoint: Endpoint) -> Probe | None:
        return next((it for it in self.probes if it.endpoint == endpoint), None)

    def stream_of(self, endpoint: Endpoint) -> Stream | None:
        return next((it for it in self.streams if it.endpoint == endpoint), None)
