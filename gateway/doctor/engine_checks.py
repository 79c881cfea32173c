"""Are the engines set up so that their caches can be used, told apart and checked?"""

from collections import defaultdict
from collections.abc import Iterator

from event_ingest.events import BlockStored
from event_ingest.verify import Verifier
from fleet.endpoint import Endpoint, Role
from gateway.doctor.event_checks import entry, ids_bytes, own_events, streams_needed, without_events
from gateway.doctor.facts import Facts
from gateway.doctor.findings import Finding, check, found
from gateway.profile_handlers import DisaggProfileHandler, PdProfileHandler
from indexer.engine_hash import Algorithm

PREFILLS = (
    *(Role.PREFILL, Role.ENCODE_PREFILL, Role.PREFILL_DECODE, Role.BOTH, Role.ENCODE_PREFILL_DECODE),
)  # fmt: skip


def endpoints_needed(facts: Facts) -> str:
    return "" if facts.endpoints else "no endpoints are known"


def probes_needed(facts: Facts) -> str:
    return "" if any(not probe.error for probe in facts.probes) else "no engine answered a request"


@check(
    "engines-reachable",
    "every engine answers",
    {"no-endpoints": "error", "engine-unreachable": "error", "engine-refuses": "error"},
)
def engines_reachable(facts: Facts) -> Iterator[Finding]:
    if not facts.endpoints:
        yield found(
            "no-endpoints",
            facts.config.file,
            "discovery knows no endpoint",
            "add static-discovery or file-discovery and name it in dataLayer.discovery.pluginRef",
        )
    for engine in facts.engines.values():
        if engine.error:
            yield found(
                "engine-unreachable",
                engine.names,
                f"http://{engine.address}: {engine.error}",
                f"start the engine, or correct its address at {entry(facts, engine.endpoints[0])}",
            )
    for probe in facts.probes:
        asked = facts.engine_of(probe.endpoint)
        if probe.error and not (asked and asked.error):
            yield found(
                "engine-refuses",
                probe.endpoint.name,
                f"a request of one token for model {probe.model!r} failed: {probe.error}",
                "make the engine serve this request first; its log says why it does not",
            )


@check("prefix-caching", "engines cache prefixes", {"prefix-caching-off": "error"}, endpoints_needed)
def prefix_caching(facts: Facts) -> Iterator[Finding]:
    for endpoint in facts.endpoints:
        engine, probe = facts.engine_of(endpoint), facts.probe_of(endpoint)
        label = (engine.cache.get(endpoint.rank, {}) if engine else {}).get("enable_prefix_caching")
        role = f" (role {endpoint.role.value})" if endpoint.role else ""
        if label == "False":
            evidence = f"vllm:cache_config_info of {endpoint.address} says enable_prefix_caching=False"
        elif label is None and probe and probe.cached == [0, 0] and probe.prompt_tokens >= 64:
            evidence = f"the same prompt of {probe.prompt_tokens} tokens twice: cached_tokens 0 both times"
        else:
            continue
        yield found(
            "prefix-caching-off",
            endpoint.name + role,
            evidence,
            "remove --no-enable-prefix-caching from the engine's options (or add --enable-prefix-caching)",
        )


@check(
    "reported-cache-use",
    "engines report how much of a prompt was cached",
    {"cached-tokens-unreported": "warning"},
    probes_needed,
)
def reported_cache_use(facts: Facts) -> Iterator[Finding]:
    for probe in facts.probes:
        if probe.usage and all(cached is None for cached in probe.cached):
            yield found(
                "cached-tokens-unreported",
                probe.endpoint.name,
                "usage of an answer has no prompt_tokens_details.cached_tokens",
                "start the engine with --enable-prompt-tokens-details",
            )


# --- block hashes


@check(
    "block-hashes",
    "engines of one model hash alike",
    {"hash-differs": "warning", "hash-not-as-configured": "warning"},
    streams_needed,
)
def block_hashes(facts: Facts) -> Iterator[Finding]:
    yield from _algorithms(facts)
    yield from _hashes(facts)
    yield from _configured(facts)


def _model_of(facts: Facts, endpoint: Endpoint) -> str:
    engine = facts.engine_of(endpoint)
    return endpoint.model or (engine.models.base[0] if engine and engine.models and engine.models.base else "")


def _algorithms(facts: Facts) -> Iterator[Finding]:
    by_model: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for endpoint in facts.endpoints:
        engine = facts.engine_of(endpoint)
        if engine and (algorithm := engine.cache.get(endpoint.rank, {}).get("prefix_caching_hash_algo")):
            by_model[_model_of(facts, endpoint)][algorithm].append(endpoint.name)
    for model, algorithms in by_model.items():
        if len(algorithms) > 1:
            said = "; ".join(f"{algorithm}: {', '.join(names)}" for algorithm, names in algorithms.items())
            most = max(algorithms, key=lambda it: len(algorithms[it]))
            yield found(
                "hash-differs",
                f"model {model}",
                f"prefix_caching_hash_algo {said}",
                f"start all engines of the model with --prefix-caching-hash-algo {most} and the same PYTHONHASHSEED",
            )


def _hashes(facts: Facts) -> Iterator[Finding]:
    """The same prompt went everywhere, so the same blocks must have the same hashes."""
    differing = {finding.where for finding in _algorithms(facts)}
    seen: dict[tuple[str, bytes], dict[int, list[Endpoint]]] = defaultdict(lambda: defaultdict(list))
    events: dict[str, list[BlockStored]] = {}
    for stream in facts.streams:
        probe = facts.probe_of(stream.endpoint)
        if probe is None or not probe.engine_ids:
            continue
        prompt = ids_bytes(probe.engine_ids)
        events[stream.endpoint.name] = own = own_events(stream, probe)
        for event in own:
            size = 4 * event.block_tokens
            if not size or len(event.tokens) != size * len(event.hashes):
                continue
            start = prompt.find(event.tokens)
            for number, hash_ in enumerate(event.hashes, start=1):
                chain = prompt[: start + number * size]  # equal hashes are expected of equal blocks behind equal blocks
                seen[_model_of(facts, stream.endpoint), chain][hash_].append(stream.endpoint)
    for (model, _), hashes in seen.items():
        where = f"model {model}"
        if len(hashes) < 2 or where in differing:
            continue
        differing.add(where)
        said = []
        for hash_, endpoints in hashes.items():
            names = ", ".join(endpoint.name for endpoint in endpoints)
            said.append(f"{names}: {hash_:016x} ({_likely(events[endpoints[0].name])})")
        yield found(
            "hash-differs",
            where,
            f"one block of the same prompt has different hashes: {'; '.join(said)}",
            "set the same PYTHONHASHSEED and --prefix-caching-hash-algo on all engines of the model. Routing here does not need "
            "equal hashes; caches that engines share (LMCache, Mooncake, Dynamo) do",
        )


def _likely(events: list[BlockStored]) -> str:
    """Which settings give these hashes, as far as they can be guessed."""
    verifier = Verifier(Algorithm.SHA256, "no such seed", limit=None)
    for event in events:
        verifier.check(event)
    if "nor any other" in verifier.mismatch or not verifier.mismatch.startswith("hashes are "):
        return "settings unknown"
    return verifier.mismatch.partition(";")[0].removeprefix("hashes are ")


def _configured(facts: Facts) -> Iterator[Finding]:
    """Only for somebody who wrote down what the hashes should be."""
    wanted = facts.config.settings.events
    if wanted.hash_seed is None and wanted.hash_algorithm == "sha256":
        return
    for stream in facts.streams:
        verifier = Verifier(wanted.hash_algorithm, wanted.hash_seed, limit=None)
        for event in own_events(stream, facts.probe_of(stream.endpoint)):
            verifier.check(event)
        if verifier.mismatch:
            yield found(
                "hash-not-as-configured",
                stream.endpoint.name,
                verifier.mismatch,
                "write the engines' own settings in warmroute.events (hashAlgorithm, hashSeed), or start the engine with those",
            )


# --- block sizes


@check(
    "block-sizes",
    "the index's block size fits the engines'",
    {"block-size-not-expressible": "error"},
    without_events,
)
def block_sizes(facts: Facts) -> Iterator[Finding]:
    config = facts.config
    wanted = config.settings.index.block_tokens or (config.precise.block_tokens if config.precise else None)
    if not wanted:
        return  # learned from the engines
    for endpoint in facts.endpoints:
        engine = facts.engine_of(endpoint)
        label = (engine.cache.get(endpoint.rank, {}) if engine else {}).get("block_size", "")
        stream = facts.stream_of(endpoint)
        announced = {event.block_tokens for heard in stream.heard for event in heard.stored()} if stream else set()
        sizes = {size for size in announced if size} or ({int(label)} if label.isdecimal() else set())
        unfit = sorted(size for size in sizes if wanted % size and size % wanted)
        if unfit:
            yield found(
                "block-size-not-expressible",
                endpoint.name,
                f"the engine's blocks have {unfit[0]} tokens, the index's {wanted}: neither is a multiple of the other, so a "
                f"match can end inside an engine block",
                f"remove index.blockTokens and blockSizeTokens (the size is then learned), or write {unfit[0]}",
            )


# --- roles and adapters


@check("roles", "every role that a profile needs is there", {"only-decode-workers": "error"}, endpoints_needed)
def roles(facts: Facts) -> Iterator[Finding]:
    if not isinstance(facts.config.handler, (DisaggProfileHandler, PdProfileHandler)):
        return
    known = sorted({endpoint.role.value if endpoint.role else "none" for endpoint in facts.endpoints})
    if not any(endpoint.role in PREFILLS for endpoint in facts.endpoints):
        yield found(
            "only-decode-workers",
            facts.config.file,
            f"the profiles split prefill and decode, the {len(facts.endpoints)} known endpoints have the roles: "
            f"{', '.join(known)}",
            "add the prefill endpoints with role: prefill (label llm-d.ai/role), or use single-profile-handler",
        )


@check("adapters", "the path of every LoRA adapter is known", {"lora-path-unknown": "warning"}, endpoints_needed)
def adapters(facts: Facts) -> Iterator[Finding]:
    for engine in facts.engines.values():
        listed = engine.models.adapters if engine.models else {}
        unnamed = sorted({*engine.unnamed_adapters, *(name for name, path in listed.items() if not path)})
        announced = {
            event.lora
            for stream in facts.streams
            if stream.endpoint.address == engine.address
            for heard in stream.heard
            for event in heard.stored()
            if event.lora is not None
        }
        if engine.models is not None:
            unnamed += sorted(name for name in announced if name not in listed and name not in unnamed)
        if unnamed:
            yield found(
                "lora-path-unknown",
                engine.names,
                f"adapters without a path in GET http://{engine.address}/v1/models: {', '.join(unnamed)}",
                "start the engine with --lora-modules NAME=PATH, so that /v1/models lists the path as root; without it hashes of "
                "the adapter's blocks cannot be verified, and requests for an adapter that is not listed get 404",
            )
