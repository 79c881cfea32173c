"""Does the gateway make the same tokens of a prompt as the engines do, and does the template let them be reused?"""

from collections.abc import Iterator, Sequence

from gateway.doctor.event_checks import entry, own_events
from gateway.doctor.facts import Facts, Probe
from gateway.doctor.findings import Finding, check, found


def prompts_needed(facts: Facts) -> str:
    return "" if facts.probes else "no request was sent (--no-requests, or no engine that could be asked)"


@check(
    "tokens",
    "prompts have the engines' own token ids",
    {
        "tokens-estimated": "error",
        "tokenizer-differs": "error",
        "template-differs": "error",
        "tokenization-failed": "error",
    },
    prompts_needed,
)
def tokens(facts: Facts) -> Iterator[Finding]:
    estimated: set[str] = set()
    for probe in facts.probes:
        if probe.router_error:
            yield found(
                "tokenization-failed",
                f"model {probe.model}",
                f"the gateway's tokenizer: {probe.router_error}",
                "correct token-producer.parameters or warmroute.models.NAME.tokenizer; until then requests are routed by load",
            )
        elif not probe.router_exact:
            if facts.config.precise and probe.model not in estimated:
                estimated.add(probe.model)
                yield found(
                    "tokens-estimated",
                    f"model {probe.model}",
                    "the token producer only estimates tokens, and estimates never match what engines announce",
                    "give token-producer the model's files: parameters: {local: {path: DIR}}, or an engine: {vllm: {url: URL}}",
                )
        else:
            yield from _compare(facts, probe)


def _compare(facts: Facts, probe: Probe) -> Iterator[Finding]:
    theirs, source = list(probe.engine_ids), probe.engine_ids_from
    if not theirs:
        theirs, source = _announced(facts, probe), "its events"
    at = difference(theirs, probe.router_ids, whole=source != "its events") if theirs else None
    text_at = difference(probe.text_engine_ids, probe.text_router_ids) if probe.text_engine_ids else None
    if at is None and text_at is None:
        return
    same_text = bool(probe.text_engine_ids) and text_at is None
    where = f"{probe.endpoint.name} (model {probe.model})"
    directory = facts.config.tokenizer_of(probe.model)
    files = f"{directory}" if directory else "the directory of the model's tokenizer"
    if probe.chat and same_text and at is not None:
        said = _shown(at, theirs, probe.router_ids)
        yield found(
            "template-differs",
            where,
            f"a plain text gives the same ids on both sides, a chat does not: {said} ({source})",
            f"put the engine's chat template (its --chat-template, if it has one) into {files}/chat_template.jinja; the engine's "
            "--default-chat-template-kwargs must be empty",
        )
    else:
        if text_at is not None:
            said = "a plain text: " + _shown(text_at, probe.text_engine_ids, probe.text_router_ids)
            source = "/tokenize"
        else:
            said = _shown(at or 0, theirs, probe.router_ids)
        yield found(
            "tokenizer-differs",
            where,
            f"{said} ({source})",
            f"put the tokenizer.json that the engine serves into {files}, or correct the path in {entry(facts, probe.endpoint)}",
        )


def _announced(facts: Facts, probe: Probe) -> list[int]:
    """The prompt's ids as far as the engine's events spell them from the first token on."""
    stream = facts.stream_of(probe.endpoint)
    ids: list[int] = []
    parent: int | None = None
    for event in own_events(stream, None) if stream else []:
        if (event.parent is None and not ids) or (ids and event.parent == parent):
            ids += [int.from_bytes(event.tokens[at : at + 4], "little") for at in range(0, len(event.tokens), 4)]
            parent = event.hashes[-1] if event.hashes else None
    return ids


def difference(theirs: Sequence[int], ours: Sequence[int], *, whole: bool = True) -> int | None:
    """The first position where two prompts differ; `whole`: also in their length, else `theirs` may end earlier."""
    for at, (left, right) in enumerate(zip(theirs, ours, strict=False)):
        if int(left) != int(right):
            return at
    if len(theirs) > len(ours) or (whole and len(theirs) < len(ours)):
        return min(len(theirs), len(ours))
    return None


def _shown(at: int, theirs: Sequence[int], ours: Sequence[int]) -> str:
    def at_or_end(ids: Sequence[int]) -> str:
        return str(int(ids[at])) if at < len(ids) else "nothing"

    return (
        f"at token {at} the engine has {at_or_end(theirs)}, the gateway {at_or_end(ours)} "
        f"(lengths {len(theirs)} and {len(ours)})"
    )


@check(
    "templates",
    "chat templates keep their history",
    {"template-rewrites-history": "warning"},
    lambda facts: "" if facts.templates else "no chat template is rendered here",
)
def templates(facts: Facts) -> Iterator[Finding]:
    for template in facts.templates:
        if template.rewrites and not template.acknowledged:
            yield found(
                "template-rewrites-history",
                f"model {template.model}",
                f"of {template.held_tokens} tokens that an engine holds after turn 1, turn 2 begins with only "
                f"{template.match_tokens} ({template.cause})",
                f"`warmroute template {template.directory}` shows where. Use a template that only appends, or accept it with "
                f"warmroute.models: {{{template.model}: {{rewritesHistory: true}}}}: replies are then not expected to be reused",
            )
