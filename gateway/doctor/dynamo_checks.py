"""Are the events of Dynamo workers those that are listened to, and are the workers known?"""

from collections.abc import Iterator

from event_ingest.dynamo_listener import DynamoSource
from event_ingest.dynamo_wire import Subject, parse_subject
from fleet.endpoint import Role
from gateway.doctor.facts import Dynamo, Facts
from gateway.doctor.findings import Finding, check, found

PLACE = "warmroute.dynamo"


def dynamo_needed(facts: Facts) -> str:
    if facts.dynamo is None:
        return "the configuration has no warmroute.dynamo"
    return (
        facts.dynamo.error and f"NATS: {facts.dynamo.error}" if facts.dynamo.error and not facts.dynamo.subjects else ""
    )


def subjects_of(dynamo: Dynamo) -> dict[str, Subject]:
    """What was heard, parsed."""
    parsed = {text: parse_subject(text) for text in dynamo.subjects}
    return {text: subject for text, subject in parsed.items() if subject is not None}


def taken(dynamo: Dynamo, subject: Subject) -> bool:
    """Whether the configuration wants this subject."""
    source = DynamoSource(
        servers=tuple(dynamo.servers),
        namespace=dynamo.namespace,
        components=tuple(dynamo.components),
        block_tokens=dynamo.block_tokens,
    )
    return source.takes(subject)


@check(
    "dynamo-server",
    "NATS answers",
    {"dynamo-unreachable": "error"},
    lambda facts: "" if facts.dynamo else "the configuration has no warmroute.dynamo",
)
def server(facts: Facts) -> Iterator[Finding]:
    assert facts.dynamo is not None  # it is needed
    if facts.dynamo.error:
        yield found(
            "dynamo-unreachable",
            PLACE,
            facts.dynamo.error,
            f"correct {PLACE}.servers (and .discovery), or start the NATS server",
        )


@check(
    "dynamo-subjects",
    "the workers' subjects are those that are listened to",
    {
        "dynamo-namespace-suffix": "error",
        "dynamo-wrong-namespace": "error",
        "dynamo-wrong-component": "error",
        "dynamo-silent": "error",
    },
    dynamo_needed,
)
def subjects(facts: Facts) -> Iterator[Finding]:
    dynamo = facts.dynamo
    assert dynamo is not None  # it is needed
    heard = subjects_of(dynamo)
    wanted = {text for text, subject in heard.items() if taken(dynamo, subject)}
    if not heard:
        yield from _silent(facts, dynamo)
        return
    others = {text: subject for text, subject in heard.items() if text not in wanted}
    ours = {text for text in others if not wanted or _known_there(dynamo, text)}
    yield from _namespaces(dynamo, {text: others[text] for text in ours})
    yield from _components(facts, dynamo, others, wanted, heard)


def _known_there(dynamo: Dynamo, text: str) -> bool:
    """Whether a worker of ours publishes on this subject: then somebody else's fleet it is not."""
    return any(worker in dynamo.known and subject == text for worker, subject in dynamo.workers.items())


def _silent(facts: Facts, dynamo: Dynamo) -> Iterator[Finding]:
    mapped = set(dynamo.known.values())
    served = [it.endpoint.name for it in facts.probes if it.usage and it.endpoint.address in mapped]
    if served:
        yield found(
            "dynamo-silent",
            PLACE,
            f"{', '.join(served)} computed new prompts, and nothing was heard for {dynamo.seconds:.0f} s from "
            f"{', '.join(dynamo.servers)} on any subject of KV events",
            "start the workers with DYN_EVENT_PLANE=nats and NATS_SERVER set to this server (the default plane is ZMQ)",
        )


def _namespaces(dynamo: Dynamo, others: dict[str, Subject]) -> Iterator[Finding]:
    for text, subject in others.items():
        full = f"{subject.namespace}-{subject.suffix}" if subject.suffix else subject.namespace
        if not dynamo.namespace or dynamo.namespace in (subject.namespace, full):
            continue
        base = parse_subject(f"namespace.{dynamo.namespace}.component.any.kv-events")
        if base is not None and base.namespace == subject.namespace:
            yield found(
                "dynamo-namespace-suffix",
                PLACE,
                f"the workers publish on {text}, the configured namespace is {dynamo.namespace!r}: the worker-hash suffix "
                "changes with every rollout",
                f"write namespace: {subject.namespace} (without a suffix every suffix is heard)",
            )
        else:
            yield found(
                "dynamo-wrong-namespace",
                PLACE,
                f"the workers publish on {text}, the configured namespace is {dynamo.namespace!r}",
                f"write namespace: {subject.namespace}, or leave it out",
            )
        return


def _components(
    facts: Facts, dynamo: Dynamo, others: dict[str, Subject], wanted: set[str], heard: dict[str, Subject]
) -> Iterator[Finding]:
    if not dynamo.components:
        return
    roles = {endpoint.role for endpoint in facts.endpoints}
    wanted_roles = {heard[text].role for text in wanted}
    missed = {
        text: subject
        for text, subject in others.items()
        if subject.component not in dynamo.components
        and (
            not wanted
            or _known_there(dynamo, text)
            or (subject.role in (Role.PREFILL, Role.DECODE) and subject.role in roles - wanted_roles)
        )
    }
    if missed:
        components = sorted({subject.component for subject in missed.values()})
        split = any(subject.role in (Role.PREFILL, Role.DECODE) for subject in missed.values())
        yield found(
            "dynamo-wrong-component",
            PLACE,
            f"events come on {', '.join(sorted(missed))}; listened to are the components {', '.join(dynamo.components)}"
            + (": the fleet is split, the configuration names the aggregated component" if split else ""),
            f"leave {PLACE}.components out, or write components: [{', '.join([*dynamo.components, *components])}]",
        )


@check(
    "dynamo-workers",
    "the workers that are heard are known endpoints",
    {"dynamo-worker-unknown": "warning", "only-decode-workers": "error"},
    dynamo_needed,
)
def workers(facts: Facts) -> Iterator[Finding]:
    dynamo = facts.dynamo
    assert dynamo is not None  # it is needed
    heard = subjects_of(dynamo)
    here = {
        worker: heard[text] for worker, text in dynamo.workers.items() if text in heard and taken(dynamo, heard[text])
    }
    unknown = sorted(worker for worker in here if worker not in dynamo.known)
    if not unknown:
        return
    known_roles = {here[worker].role for worker in here if worker in dynamo.known}
    prefill = [worker for worker in unknown if here[worker].role is Role.PREFILL]
    said = ", ".join(f"{here[worker].component}/{worker}" for worker in unknown[:8])
    fix = f'write {PLACE}.endpoints: {{"{unknown[0]}": "IP:PORT"}} (one line for each), or name a discovery file'
    if prefill and known_roles <= {Role.DECODE}:
        yield found(
            "only-decode-workers",
            PLACE,
            f"prefill workers publish events and stand for no endpoint: {said}; known are {len(dynamo.known)} workers",
            fix,
        )
    else:
        yield found("dynamo-worker-unknown", PLACE, f"events of workers that stand for no endpoint: {said}", fix)


@check(
    "dynamo-block-size",
    "the configured block size is the workers'",
    {"block-size-not-expressible": "error"},
    lambda facts: "" if facts.dynamo else "the configuration has no warmroute.dynamo",
)
def block_size(facts: Facts) -> Iterator[Finding]:
    dynamo = facts.dynamo
    assert dynamo is not None  # it is needed
    for endpoint in facts.endpoints:
        engine = facts.engine_of(endpoint)
        label = (engine.cache.get(endpoint.rank, {}) if engine else {}).get("block_size", "")
        if facts.by_dynamo(endpoint) and label.isdecimal() and int(label) != dynamo.block_tokens:
            yield found(
                "block-size-not-expressible",
                endpoint.name,
                f"the engine's blocks have {label} tokens, {PLACE}.blockTokens is {dynamo.block_tokens}: these events carry no "
                "tokens, so they cannot be cut anew",
                f"write blockTokens: {label}",
            )
