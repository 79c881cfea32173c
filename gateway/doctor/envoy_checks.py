"""Does the Envoy in front let the gateway decide, and nobody else?

Pure functions of a configuration as Envoy has it (a bootstrap file, or its admin page's dump: both use the same names).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from gateway.doctor.facts import Facts
from gateway.doctor.findings import Finding, check, found
from gateway.extproc.headers import DESTINATION

EXT_PROC, MUTATION = "ext_proc.v3.ExternalProcessor", "header_mutation.v3.HeaderMutation"
DEFAULT_TIMEOUT_S = 0.2
NAMESPACE, HINT = "envoy.lb", "envoy.lb.subset_hint"
GENERATED = "`warmroute envoy-config -c FILE` writes a configuration that has it"

Config = Mapping[str, Any]


def envoy_needed(facts: Facts) -> str:
    if facts.envoy is None:
        return (
            "no Envoy configuration: give --envoy FILE, or let its admin port (warmroute.envoy.adminPort) be reachable"
        )
    return "" if managers(facts.envoy.listeners) else "this Envoy has no listener for HTTP"


def managers(listeners: Any) -> list[tuple[str, Config]]:
    """(listener's name, HTTP connection manager) of every HTTP filter chain."""
    result = []
    for listener in listeners:
        for chain in [*listener.get("filter_chains", []), *filter(None, [listener.get("default_filter_chain")])]:
            for item in chain.get("filters", []):
                config = item.get("typed_config", {})
                if config.get("@type", "").endswith("HttpConnectionManager"):
                    result.append((str(listener.get("name", "?")), config))
    return result


def ext_procs(facts: Facts) -> list[tuple[str, list[Config], Config]]:
    """(where, the HTTP filters in front of it, its configuration) of every ext_proc filter."""
    result = []
    for name, manager in managers(facts.envoy.listeners if facts.envoy else []):
        filters = [item.get("typed_config", {}) for item in manager.get("http_filters", [])]
        for at, config in enumerate(filters):
            if config.get("@type", "").endswith(EXT_PROC):
                result.append((f"{facts.envoy.where if facts.envoy else ''} listener {name}", filters[:at], config))
    return result


def seconds(text: object) -> float | None:
    """A protobuf duration in JSON or YAML: "10s", "0.200s"."""
    if isinstance(text, str) and text.endswith("s"):
        try:
            return float(text[:-1])
        except ValueError:
            return None
    return None


def sources(facts: Facts) -> set[str]:
    """What the clusters with a picker-aware policy look at: "header", "metadata", "original_dst"."""
    result: set[str] = set()

    def look(value: Any) -> None:
        if isinstance(value, Mapping):
            for source in value.get("override_host_sources", []):
                result.update(key for key in ("header", "metadata") if key in source)
            if value.get("use_http_header"):
                result.add("original_dst")
            for inner in value.values():
                look(inner)
        elif isinstance(value, list):
            for inner in value:
                look(inner)

    look(list(facts.envoy.clusters) if facts.envoy else [])
    return result


@check("envoy-ext-proc", "Envoy asks the gateway", {"envoy-without-ext-proc": "error"}, envoy_needed)
def ext_proc(facts: Facts) -> Iterator[Finding]:
    assert facts.envoy is not None  # envoy_needed says so
    if not ext_procs(facts):
        yield found(
            "envoy-without-ext-proc",
            facts.envoy.where,
            f"no ext_proc filter in the listeners {', '.join(name for name, _ in managers(facts.envoy.listeners))}",
            f"put envoy.filters.http.ext_proc in front of the router filter; {GENERATED}",
        )


@check(
    "envoy-metadata",
    "Envoy passes the picker's metadata and the subset hint",
    {"envoy-drops-metadata": "error", "envoy-drops-subset-hint": "warning"},
    envoy_needed,
)
def metadata(facts: Facts) -> Iterator[Finding]:
    for where, _, config in ext_procs(facts):
        options = config.get("metadata_options", {})
        receiving = options.get("receiving_namespaces", {}).get("untyped", [])
        forwarding = options.get("forwarding_namespaces", {}).get("untyped", [])
        looks_at = sources(facts)
        if NAMESPACE not in receiving:
            only = (
                "the only source of the destination"
                if looks_at == {"metadata"}
                else "what the destination is repeated in"
            )
            yield found(
                "envoy-drops-metadata",
                where,
                f"metadata_options.receiving_namespaces.untyped is {receiving}: the picker's dynamic metadata, {only}, is "
                "dropped without an error, and requests go by the fallback policy",
                f"metadata_options: {{receiving_namespaces: {{untyped: [{NAMESPACE}]}}}}; {GENERATED}",
            )
        if HINT not in forwarding:
            yield found(
                "envoy-drops-subset-hint",
                where,
                f"metadata_options.forwarding_namespaces.untyped is {forwarding}: the picker never sees which endpoints it may "
                "choose from, and may choose others",
                f"metadata_options: {{forwarding_namespaces: {{untyped: [{NAMESPACE}, {HINT}]}}}}; {GENERATED}",
            )


@check("envoy-timeout", "Envoy waits long enough for a decision", {"envoy-short-timeout": "error"}, envoy_needed)
def timeout(facts: Facts) -> Iterator[Finding]:
    needed = facts.config.decision_limit_s
    for where, _, config in ext_procs(facts):
        written = seconds(config.get("message_timeout"))
        limit = DEFAULT_TIMEOUT_S if written is None else written
        if 0 < limit < needed:
            given = f"message_timeout is {limit:g} s" if written else "message_timeout is not set: 200 ms by default"
            yield found(
                "envoy-short-timeout",
                where,
                f"{given}; a decision may take up to {needed:g} s (a cold tokenizer, the router queue), and is then a 504, or a "
                "request that goes by the fallback policy",
                f"message_timeout: {needed + 2:g}s; {GENERATED}",
            )


@check(
    "envoy-destination",
    "clients cannot choose their endpoint",
    {"envoy-destination-spoofable": "error"},
    envoy_needed,
)
def destination(facts: Facts) -> Iterator[Finding]:
    for where, before, config in ext_procs(facts):
        if any(DESTINATION in _removed(it) for it in before):
            continue
        open_ = bool(config.get("failure_mode_allow"))
        yield found(
            "envoy-destination-spoofable",
            where,
            f"no filter in front of ext_proc removes {DESTINATION}"
            + (
                "; with failure_mode_allow a client's own header chooses the upstream whenever the picker does not answer"
                if open_
                else ""
            )
            + ("; the cluster is ORIGINAL_DST: any address can be chosen" if "original_dst" in sources(facts) else ""),
            "put envoy.filters.http.header_mutation in front of ext_proc: mutations: {request_mutations: "
            f"[{{remove: {DESTINATION}}}]}}; {GENERATED}",
        )


def _removed(config: Config) -> set[str]:
    """Request headers that a header_mutation filter takes away."""
    if not config.get("@type", "").endswith(MUTATION):
        return set()
    mutations = config.get("mutations", {}).get("request_mutations", [])
    return {str(mutation.get("remove", "")).lower() for mutation in mutations}


@check(
    "envoy-path",
    "a request through Envoy reaches the gateway",
    {"envoy-bypasses-gateway": "error", "envoy-refuses": "error"},
    lambda facts: (
        envoy_needed(facts)
        or ("" if facts.envoy and facts.envoy.through else "no request was sent through Envoy")
        or ("" if facts.gateway and facts.gateway.running else "the gateway is not running")
    ),
)
def path(facts: Facts) -> Iterator[Finding]:
    envoy = facts.envoy
    assert envoy is not None  # envoy_needed says so
    if envoy.status is None or envoy.status >= 500:
        yield found(
            "envoy-refuses",
            envoy.through,
            f"a request of one token: {envoy.status or 'no answer'}",
            "look at Envoy's access log for the response flags, and at docs/envoy.md for what they mean here",
        )
    elif envoy.counted is False:
        yield found(
            "envoy-bypasses-gateway",
            envoy.through,
            f"a request was answered with {envoy.status}, and the gateway has not seen it",
            "let the ext_proc filter's cluster point at warmroute.grpcPort, and the route lead through that listener",
        )
