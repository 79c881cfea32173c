"""The document: llm-d's EndpointPickerConfig as structs, plus the optional section `warmroute:`.

Only shapes and defaults live here. What the parts mean together (references, injections, what is refused) is config.py.
Source: llm-d-router `apix/config/v1alpha1`, snapshot ebab68792.
"""

import ipaddress
from typing import Annotated, Any, Literal

import msgspec

from gateway.config_decode import Duration, ModelDirectory, Quantity
from gateway.config_decode import Path as FilePath
from gateway.dynamo_workers import workers_of

API_VERSION = "llm-d.ai/v1alpha1"
OLD_API_VERSION = "inference.networking.x-k8s.io/v1alpha1"
KIND = "EndpointPickerConfig"
FEATURE_GATES = ("flowControl", "haPopulateNonLeaderDatastore")

Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Positive = Annotated[int, msgspec.Meta(gt=0)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """A mapping of the document: camelCase keys, unknown ones are errors."""


# llm-d's part


class PluginEntry(Section, frozen=True, kw_only=True):
    type: str
    name: str | None = None
    parameters: dict[str, Any] = {}


class Ref(Section, frozen=True, kw_only=True):
    plugin_ref: str


class WeightedRef(Section, frozen=True, kw_only=True):
    plugin_ref: str
    weight: float | None = None


class ProfileEntry(Section, frozen=True, kw_only=True):
    name: str
    plugins: list[WeightedRef] = []


class SourceEntry(Section, frozen=True, kw_only=True):
    plugin_ref: str
    extractors: list[Ref] = []


class DataLayer(Section, frozen=True, kw_only=True):
    inject_defaults: bool = True
    sources: list[SourceEntry] = []
    discovery: Ref | None = None
    peer_discovery: Ref | None = None
    cross_replica_syncer_plugin_ref: str | None = None
    cross_replica_sync_interval: Duration | None = None


class PriorityBand(Section, frozen=True, kw_only=True):
    priority: int = 0
    max_bytes: Quantity | None = None
    max_requests: Quantity | None = None
    fairness_policy_ref: str | None = None
    ordering_policy_ref: str | None = None


class FlowControl(Section, frozen=True, kw_only=True):
    """Read for compatibility; only `saturationDetector` has an effect (see docs/configuration.md)."""

    max_bytes: Quantity | None = None
    max_requests: Quantity | None = None
    default_request_ttl: Duration | None = msgspec.field(name="defaultRequestTTL", default=None)
    no_endpoint_request_ttl: Duration | None = msgspec.field(name="noEndpointRequestTTL", default=None)
    default_priority_band: PriorityBand | None = None
    default_negative_priority_band: PriorityBand | None = None
    priority_bands: list[PriorityBand] = []
    usage_limit_policy_plugin_ref: str | None = None
    saturation_detector: Ref | None = None
    enable_eviction: bool = False


class RequestHandler(Section, frozen=True, kw_only=True):
    parsers: list[Ref] = []


# Our part


class Tls(Section, frozen=True, kw_only=True):
    """Certificate of the ext-proc port, read again when it changes. Without this section the port speaks plaintext."""

    cert_path: FilePath
    """PEM file with the chain; a directory means `tls.crt` and `tls.key` inside it."""
    key_path: FilePath | None = None


class Images(Section, frozen=True, kw_only=True):
    """How the engines name and scale images; for the Qwen-VL family, whose images are tokenized here."""

    engine_model: str | None = None
    """The engines' `--model`; as they list it (`root` of /v1/models) where it is not given. Engines with HF_HUB_OFFLINE list the
    name but use the path of the snapshot."""
    hash: Literal["blake3", "sha256", "sha512"] = "blake3"
    """The engines' `--mm-hasher-algorithm`."""
    min_pixels: Positive | None = None
    """As in the engines' `--mm-processor-kwargs`; from the tokenizer's directory where it is not given."""
    max_pixels: Positive | None = None


class Model(Section, frozen=True, kw_only=True):
    """What the router knows of one served model."""

    tokenizer: ModelDirectory | None = None
    """Directory with tokenizer.json and the chat template; used by a `token-producer` that names no backend of its own."""
    aliases: list[str] = []
    """Other names that clients may use for it."""
    rewrites_history: bool | None = None
    """Whether the chat template renders earlier turns differently later; found out by a probe where it is not given."""
    images: Images | None = None


class Tracing(Section, frozen=True, kw_only=True):
    enabled: bool = False
    endpoint: str = "http://localhost:4318"
    """OTLP over HTTP, JSON; `/v1/traces` is added."""


class EnvoySettings(Section, frozen=True, kw_only=True):
    """The Envoy in front, for `warmroute envoy-config`."""

    address: str = "0.0.0.0"
    port: Port = 8080
    admin_port: Port | None = 9901
    mode: Literal["BUFFERED", "FULL_DUPLEX_STREAMED"] = "BUFFERED"
    """How Envoy hands over request bodies."""
    fail_open: bool = True
    """Route by Envoy's own fallback when the picker does not answer; loses no request in BUFFERED mode."""


class IndexSettings(Section, frozen=True, kw_only=True):
    max_keys: Quantity = 10_000_000
    """Blocks remembered over all endpoints; the least recently used are forgotten, and counted."""
    max_holders: Positive = 1024
    """Endpoints remembered per block."""
    block_tokens: Positive | None = None
    """Tokens per block of the index; learned from the engines where it is not given."""
    tier_weights: dict[str, Annotated[float, msgspec.Meta(ge=0, le=1)]] = msgspec.field(
        default_factory=lambda: {"gpu": 1.0, "cpu": 0.8}
    )
    """What a cached token is worth by the tier that holds it."""


class EventSettings(Section, frozen=True, kw_only=True):
    """How the engines hash blocks; needed only to verify their configuration and for events that carry hashes alone."""

    hash_algorithm: Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"] = "sha256"
    hash_seed: str | None = None
    """PYTHONHASHSEED of the engines; None where they run without."""


class Dynamo(Section, frozen=True, kw_only=True):
    """Workers that publish their events as NVIDIA Dynamo does, over NATS; docs/dynamo.md."""

    servers: list[str] = msgspec.field(default_factory=lambda: ["nats://127.0.0.1:4222"])
    namespace: str = ""
    """Dynamo's namespace, with or without its worker-hash suffix; every one where it is not given."""
    components: list[str] = []
    """Only these; every one where none is given."""
    block_tokens: Positive = 16
    """The engines' block size: these events do not carry it."""
    endpoints: dict[str, str] = {}
    """Worker (instance) id -> `ip:port` of the endpoint."""
    discovery: FilePath | None = None
    """A file with the same map that is read again when it changes, or the folder of Dynamo's file discovery."""
    jetstream: bool = True
    """Also follow the streams of releases that used JetStream."""
    silent_after: Duration = 60.0
    """When a subscription that has heard nothing raises an alarm."""

    def __post_init__(self) -> None:
        if not self.servers:
            raise ValueError("servers: at least one is needed")
        workers_of(self.endpoints, "endpoints")


class Handoff(Section, frozen=True, kw_only=True):
    """How a prompt that was computed on one endpoint gets to the one that decodes; docs/prefill-decode.md."""

    mode: Literal["sidecar", "gateway"] = "sidecar"
    """Who sends the prefill leg: a routing sidecar at the decode endpoint, told by a header, or this gateway."""
    connector: Literal["nixl", "sglang"] = "nixl"
    """The gateway's protocol with the engines; a sidecar is told its own."""
    timeout: Annotated[Duration, msgspec.Meta(gt=0)] = 20.0
    """How long the gateway waits for a prefill leg before the decode endpoint computes the prompt itself."""
    bootstrap_port: Port = 8998
    """Of SGLang's prefill engines; an endpoint's label `bootstrap-port` overrides it."""


class Settings(Section, frozen=True, kw_only=True):
    """The section `warmroute:`: everything that llm-d passes as flags or environment, and what only we have."""

    listen: str = "0.0.0.0"
    """Address of the gRPC port."""
    grpc_port: Port = 9002
    """ext-proc and grpc.health.v1."""
    grpc_health_port: Port | None = None
    """A second port for grpc.health.v1, always plaintext."""
    transport: Literal["auto", "http2", "grpcio"] = "auto"
    """What speaks gRPC: http2 (libnghttp2) or grpcio; auto is http2 where its library can be imported."""
    metrics_port: Port = 9090
    metrics_listen: str = "0.0.0.0"
    compatibility_metrics: bool = False
    """Also export what llm-d users alert on under llm-d's names; docs/metrics.md has the table."""
    admin_port: Port | None = None
    """Admin endpoints; off where it is not given."""
    admin_listen: str = "127.0.0.1"
    admin_token: str | None = None
    """What clients of the admin port must send as `Authorization: Bearer TOKEN`; needed where it is not on loopback."""
    admin_token_file: FilePath | None = None
    """The same, read from a file, again for every request."""
    tls: Tls | None = None
    models: dict[str, Model] = {}
    max_body_bytes: Annotated[Quantity, msgspec.Meta(gt=0)] = 32 * 2**20
    """A larger request body is answered with 413."""
    reply_pieces_per_second: Annotated[float, msgspec.Meta(ge=0)] | None = 5000.0
    """Pieces of streamed replies that the gateway reads per second, all together; of further replies it sees the beginning and
    the end alone. null: no limit."""
    response_headers: bool = False
    """Tell clients in response headers where their request went and what was found cached."""
    explain: bool = False
    """Remember how the last decisions were made (admin port), and answer `x-warmroute-explain: 1` with it."""
    fallback_endpoints: Annotated[int, msgspec.Meta(ge=0, le=16)] = 2
    """How many further endpoints, by score, Envoy may try when the picked one does not answer."""
    tracing: Tracing = Tracing()
    drain_timeout: Duration = 30.0
    """After SIGTERM: seconds to finish what runs."""
    decide_timeout: Annotated[Duration, msgspec.Meta(gt=0)] = 0.4
    """A decision that takes longer is made by load alone."""
    objectives: dict[str, int] = {}
    """Priorities by the objective that a request names (x-llm-d-inference-objective); 0 for any other, negative = shed first."""
    handoff: Handoff = Handoff()
    forward_token_ids: bool = False
    """Send the router's token ids with chat requests, so that the engine does not tokenize again (vLLM, experimental)."""
    envoy: EnvoySettings = EnvoySettings()
    index: IndexSettings = IndexSettings()
    events: EventSettings = EventSettings()
    dynamo: Dynamo | None = None

    def __post_init__(self) -> None:
        if self.admin_token is not None and self.admin_token_file is not None:
            raise ValueError("adminToken and adminTokenFile exclude each other")
        if self.admin_token == "":
            raise ValueError("adminToken: empty; expected a secret")
        open_to_all = self.admin_port is not None and not _is_loopback(self.admin_listen)
        if open_to_all and self.admin_token is None and self.admin_token_file is None:
            raise ValueError(
                f"adminListen: {self.admin_listen!r} can be reached from elsewhere: give adminToken or adminTokenFile, or "
                "leave it at 127.0.0.1"
            )


def _is_loopback(host: str) -> bool:
    """Whether an address to listen on can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class Document(Section, frozen=True, kw_only=True):
    """A whole EndpointPickerConfig."""

    api_version: str
    kind: str
    feature_gates: list[str] = []
    plugins: list[PluginEntry]
    scheduling_profiles: list[ProfileEntry] = []
    data_layer: DataLayer = DataLayer()
    flow_control: FlowControl | None = None
    request_handler: RequestHandler = RequestHandler()
    saturation_detector: Ref | None = None
    parser: Ref | None = None
    warmroute: Settings = Settings()
