"""llm-d's plugin types that Warmroute does not have: why, and what to use instead.

A configuration that names one is refused with this text; nothing is ever ignored. A type that exists in the registry
is never looked up here, so an entry may stay until its plugin is written.
"""

from collections.abc import Mapping

_MULTICLUSTER = "routing between clusters is not supported: run one Warmroute per cluster"
_PREDICTED = "latency is not learned online here, because learned rates mistake load for slowness"
_FLOW = "llm-d's flow control is not supported"
_ADMIT = "admission plugins are not supported"
_KUBERNETES = "endpoints do not come from Kubernetes watches here"
_QUEUE = "expected-work-queue: requests wait for room, by priority, fairly between flows, oldest or shortest first"
_DETECTOR = (
    "utilization-detector or concurrency-detector: requests of negative priority are turned away at saturation 1"
)

UNSUPPORTED: Mapping[str, tuple[str, str]] = {
    # scorers
    "latency-scorer": (_PREDICTED, "expected-work-scorer"),
    "mm-embeddings-cache-scorer": (
        "caches of multimodal embeddings are not modelled",
        "prefix-cache-scorer: image hashes are part of the block keys",
    ),
    "multicluster-queue-scorer": (_MULTICLUSTER, "queue-scorer"),
    "multicluster-kv-cache-utilization-scorer": (_MULTICLUSTER, "kv-cache-utilization-scorer"),
    "multicluster-prefix-cache-scorer": (_MULTICLUSTER, "prefix-cache-scorer"),
    # filters
    "slo-headroom-tier-filter": (_PREDICTED, "utilization-filter"),
    "multicluster-session-affinity-filter": (_MULTICLUSTER, "session-affinity-filter"),
    # producers
    "predicted-latency-producer": (_PREDICTED, "inflight-load-producer with expected-work-scorer"),
    "mm-embeddings-cache-producer": (
        "caches of multimodal embeddings are not modelled",
        "precise-prefix-cache-producer: image hashes are part of the block keys",
    ),
    "multicluster-approx-prefix-cache-producer": (_MULTICLUSTER, "approx-prefix-cache-producer"),
    # admission, headers, screeners, reporting
    "latency-slo-admitter": (f"{_ADMIT}, and {_PREDICTED}", _DETECTOR),
    "probabilistic-admitter": (_ADMIT, _DETECTOR),
    "disaggregatedset-rollout-screener": ("rollouts of disaggregated sets are not followed", "label-selector-filter"),
    "request-attribute-reporter": (
        "attributes are not computed from usage here",
        "warmroute.responseHeaders, or the metrics",
    ),
    "destination-endpoint-served-verifier": (
        "it serves llm-d's conformance tests only",
        "remove it; served endpoints are always compared with the decision",
    ),
    # parsers
    "sglanghttp-parser": ("SGLang's own /generate is not parsed", "openai-parser: SGLang serves OpenAI's API too"),
    "vllmgrpc-parser": ("vLLM's gRPC API is not parsed", "vllmhttp-parser"),
    "vertexai-parser": ("Vertex AI's API is not parsed", "openai-parser"),
    # flow control
    "global-strict-fairness-policy": (_FLOW, _QUEUE),
    "round-robin-fairness-policy": (_FLOW, _QUEUE),
    "program-aware-fairness": (_FLOW, _QUEUE),
    "fcfs-ordering-policy": (_FLOW, _QUEUE),
    "edf-ordering-policy": (_FLOW, _QUEUE),
    "slo-deadline-ordering-policy": (_FLOW, _QUEUE),
    "static-usage-limit-policy": (_FLOW, _DETECTOR),
    "priority-holdback-policy": (_FLOW, _DETECTOR),
    "soft-reflective-ceiling-policy": (_FLOW, _DETECTOR),
    "sheddable-eviction-filter": (_FLOW, _DETECTOR),
    "priority-then-time-eviction-order-policy": (_FLOW, _DETECTOR),
    # data layer
    "k8s-notification-source": (_KUBERNETES, "file-discovery with watchFile: true, or static-discovery"),
    "multicluster-file-discovery": (_MULTICLUSTER, "file-discovery"),
    "multicluster-metrics-data-source": (_MULTICLUSTER, "metrics-data-source"),
    "multicluster-metrics-extractor": (_MULTICLUSTER, "core-metrics-extractor"),
}


def refusal(type_: str) -> str | None:
    """Why a known type is refused and what to use; None for a type that llm-d does not have either."""
    if type_ not in UNSUPPORTED:
        return None
    reason, alternative = UNSUPPORTED[type_]
    return f"plugin type {type_!r} is not supported: {reason}. Instead: {alternative}"
