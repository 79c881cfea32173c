"""The doctor against simulated engines: every planted fault is named, and a healthy fleet gets a clean bill."""

import json
import lzma
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from event_ingest.events import Batch, BlockStored
from fleet.endpoint import Endpoint
from gateway.doctor.event_checks import heard_own, ids_bytes
from gateway.doctor.facts import Heard, Probe, Stream
from gateway.doctor.findings import Report, pairs
from simulator.wire import encode_batch

MODEL_FILES = Path(__file__).resolve().parents[3] / "configs" / "models" / "qwen3"


def ids(report: Report) -> set[str]:
    return {finding.id for finding in report.findings}


def the(report: Report, id: str) -> Any:
    """The one finding of this id, and no other: a fault must not make others look broken."""
    assert ids(report) == {id}, report.findings
    return report.findings[0]


# --- healthy


async def test_a_healthy_fleet_gets_a_clean_bill_without_a_gateway(world: Any) -> None:
    await world.engine()
    await world.engine()
    report = await world.examine()
    assert report.findings == []
    skipped = {checked.id for checked in report.checks if checked.ok is None}
    assert skipped == {
        *("dynamo-server", "dynamo-subjects", "dynamo-workers", "dynamo-block-size"),
        *("index-freshness", "trust", "alarms"),
        *("envoy-ext-proc", "envoy-metadata", "envoy-timeout", "envoy-destination", "envoy-path"),
    }


# --- events


async def test_an_engine_without_events_is_named(world: Any) -> None:
    engine = await world.engine(events=None, replay=None)
    finding = the(await world.examine(), "events-not-enabled")
    assert finding.where == "engine-0"
    assert f'"endpoint": "tcp://*:{engine.entry["events"]}"' in finding.fix


async def test_a_wrong_event_port_is_named_with_the_right_one(world: Any) -> None:
    engine = await world.engine()
    right, engine.entry["events"] = engine.entry["events"], world.free_port()
    finding = the(await world.examine(), "wrong-event-port")
    assert "nobody listens there" in finding.evidence
    assert f"write events: {right} at endpoint 'engine-0'" in finding.fix


async def test_events_of_another_engine_are_noticed_by_the_prompt_in_them(world: Any) -> None:
    first, second = await world.engine(), await world.engine()
    first.entry["events"], second.entry["events"] = second.entry["events"], first.entry["events"]
    first.entry["replay"], second.entry["replay"] = second.entry["replay"], first.entry["replay"]
    report = await world.examine()
    assert ids(report) == {"wrong-event-port"}
    assert [finding.where for finding in report.findings] == ["engine-0", "engine-1"]
    assert f"was announced on tcp://127.0.0.1:{second.entry['events']}" in report.findings[0].evidence


async def test_a_publisher_that_binds_an_address_with_a_host_has_a_wrong_port_and_not_a_wrong_side(world: Any) -> None:
    right, replay = world.free_port(), world.free_port()
    await world.engine(
        events=f"tcp://127.0.0.1:{right}",
        bind_events=True,
        replay=f"tcp://127.0.0.1:{replay}",
        entry={"events": world.free_port(), "replay": replay},
    )
    finding = the(await world.examine(), "wrong-event-port")
    assert f"write events: {right} at endpoint 'engine-0'" in finding.fix


async def test_two_endpoints_with_one_engines_events_are_noticed(world: Any) -> None:
    first, second = await world.engine(), await world.engine()
    right = second.entry["events"]
    for key in ("events", "replay"):
        second.entry[key] = first.entry[key]
    report = await world.examine()
    assert ("wrong-event-port", "engine-1") in pairs(report.findings)
    assert any(f"write events: {right} at endpoint 'engine-1'" in finding.fix for finding in report.findings)


def test_a_block_that_all_prompts_have_is_nobodys_own() -> None:
    """A prompt that ends with its block announces that block again, and the block need not hold the endpoint's name."""
    endpoints = [Endpoint(name=name, address=f"10.0.0.{at}:8000") for at, name in enumerate(("mine", "other"))]
    probes = [Probe(endpoint=it, model="m", engine_ids=[7, at, 7, 7]) for at, it in enumerate(endpoints)]
    both, own = (ids_bytes(ids) for ids in ([7, 7], [7, 0]))

    def stream(tokens: bytes) -> Stream:
        stored = BlockStored(hashes=(1,), parent=None, tokens=tokens, block_tokens=2)
        batch = Batch(ts=0.0, events=(stored,))
        return Stream(endpoint=endpoints[0], link="up", heard=[Heard(topic="", seq=0, batch=batch)])

    assert not heard_own(stream(both), probes[0], probes)
    assert heard_own(stream(own), probes[0], probes)
    assert heard_own(stream(both), probes[0], probes[:1])


async def test_an_engine_that_says_nothing_of_its_ports_still_has_a_wrong_one(world: Any) -> None:
    engine = await world.engine(change={"/kv_event_sources": lambda request, body: web.Response(status=404)})
    engine.entry["events"] = world.free_port()
    finding = the(await world.examine(), "wrong-event-port")
    assert "does not list its event sources" in finding.evidence


async def test_a_publisher_that_connects_where_nobody_binds(world: Any) -> None:
    port = world.free_port()
    await world.engine(events=f"tcp://127.0.0.1:{port}", bind_events=False, entry={"events": port})
    finding = the(await world.examine(), "publisher-connects")
    assert f"write events: bind:tcp://127.0.0.1:{port} at endpoint 'engine-0'" in finding.fix


async def test_a_publisher_that_connects_to_a_bound_address_is_healthy(world: Any) -> None:
    address = f"tcp://127.0.0.1:{world.free_port()}"
    await world.engine(events=address, bind_events=False, entry={"events": f"bind:{address}"})
    assert (await world.examine()).findings == []


async def test_two_sides_that_bind(world: Any) -> None:
    engine = await world.engine()
    port = engine.entry["events"]
    engine.entry["events"] = f"bind:tcp://127.0.0.1:{port}"
    finding = the(await world.examine(), "both-bind")
    assert f"write events: {port} at" in finding.fix


async def test_a_wrong_topic_filter(world: Any) -> None:
    await world.engine(topic="kv@10.0.0.1:8000@sim", entry={"topic": "kv@10.0.0.2:8000@sim"})
    finding = the(await world.examine(), "wrong-topic")
    assert "'kv@10.0.0.1:8000@sim'" in finding.evidence
    assert 'topic: "kv@10.0.0.1:8000@sim"' in finding.fix


async def test_a_right_topic_filter_is_healthy(world: Any) -> None:
    await world.engine(topic="kv@10.0.0.1:8000@sim", entry={"topic": "kv@"})
    assert (await world.examine()).findings == []


async def test_a_silent_publisher(world: Any) -> None:
    engine = await world.engine()
    await engine.post("/sim/faults", {"silent": True})
    finding = the(await world.examine(), "events-silent")
    assert "announced nowhere" in finding.evidence


async def test_an_engine_whose_events_nobody_asked_for(world: Any) -> None:
    def none_implied(document: dict[str, Any]) -> None:
        document["plugins"][2]["parameters"] = {"kvEventsConfig": {"discoverPods": False}}

    engine = await world.engine(entry={"events": None, "replay": None})
    finding = the(await world.examine(world.config(none_implied)), "event-address-missing")
    assert str(engine.server.settings.events).rpartition(":")[2] in finding.fix


def two_ranks(request: Any, body: Any) -> Any:
    first = body["0"]
    head, _, port = first["endpoint"].rpartition(":")
    return {**body, "1": {**first, "endpoint": f"{head}:{int(port) + 1}"}}


async def test_data_parallel_ranks_that_nobody_listens_to(world: Any) -> None:
    await world.engine(change={"/kv_event_sources": two_ranks})
    finding = the(await world.examine(), "rank-not-subscribed")
    assert "ranks 0, 1" in finding.evidence
    assert "dataParallelSize: 2" in finding.fix


async def test_a_missing_replay_address_that_the_engine_offers(world: Any) -> None:
    engine = await world.engine()
    port = engine.entry.pop("replay")
    finding = the(await world.examine(), "replay-missing")
    assert f"write replay: {port}" in finding.fix


async def test_a_missing_replay_address_that_the_engine_does_not_offer(world: Any) -> None:
    await world.engine(replay=None, entry={"replay": None})
    finding = the(await world.examine(), "replay-missing")
    assert '"replay_endpoint": "tcp://*:' in finding.fix


async def test_a_replay_port_that_is_a_ranks_event_port(world: Any) -> None:
    engine = await world.engine(change={"/kv_event_sources": two_ranks}, replay=None)
    engine.entry |= {"replay": engine.entry["events"] + 1, "dataParallelSize": 2}
    report = await world.examine()
    assert "replay-port-collision" in ids(report)
    finding = next(finding for finding in report.findings if finding.id == "replay-port-collision")
    assert (finding.where, "where rank 1 publishes" in finding.evidence) == ("engine-0-rank-0", True)


async def test_a_replay_socket_that_does_not_answer(world: Any) -> None:
    engine = await world.engine()
    await engine.post("/sim/faults", {"deaf": True})
    the(await world.examine(), "replay-unanswered")


async def test_a_replay_port_that_is_another(world: Any) -> None:
    engine = await world.engine()
    right, engine.entry["replay"] = engine.entry["replay"], world.free_port()
    assert f"write replay: {right}" in the(await world.examine(), "replay-unanswered").fix


async def test_a_buffer_too_short_for_a_reconnection(world: Any) -> None:
    engine = await world.engine(buffer_steps=4)
    for number in range(7):
        await engine.complete(f"{number} " + "words " * 40)
    finding = the(await world.examine(), "gap-older-than-buffer")
    assert "buffer_steps 4" in finding.evidence
    assert '"buffer_steps"' in finding.fix


async def test_a_sequence_that_goes_backwards(world: Any) -> None:
    """Two engines connect to one bound address: their numbers are mixed."""
    address = f"tcp://127.0.0.1:{world.free_port()}"
    for _ in range(2):
        await world.engine(events=address, bind_events=False, entry={"events": f"bind:{address}"})
    for engine in world.engines:
        await engine.complete("words " * 40)
    report = await world.examine()
    assert {("sequence-backwards", f"engine-0 (bind:{address})"), ("wrong-event-port", "engine-1")} <= set(
        pairs(report.findings)
    )


async def test_a_clock_that_goes_backwards(world: Any) -> None:
    engine = await world.engine()
    for ts in (time.time(), time.time() - 3600):
        engine.server.publisher.publish(encode_batch([], ts))
    finding = the(await world.examine(), "clock-backwards")
    assert "batch 1 carries an engine time 3600." in finding.evidence


# --- engines


async def test_an_engine_that_is_not_there(world: Any) -> None:
    engine = await world.engine()
    engine.entry["port"] = world.free_port()
    the(await world.examine(), "engine-unreachable")


async def test_an_engine_that_refuses_requests(world: Any) -> None:
    await world.engine(change={"/v1/chat/completions": lambda request, body: web.Response(status=503)})
    assert "503" in the(await world.examine(), "engine-refuses").evidence


async def test_prefix_caching_off_on_prefill(world: Any) -> None:
    await world.engine(entry={"role": "prefill"}, caching=False)
    await world.engine(entry={"role": "decode"})
    finding = the(await world.examine(), "prefix-caching-off")
    assert finding.where == "engine-0 (role prefill)"


async def test_a_hash_seed_that_differs_between_engines(world: Any) -> None:
    await world.engine(hash_seed="42")
    await world.engine(hash_seed="0")
    finding = the(await world.examine(), "hash-differs")
    assert "engine-0" in finding.evidence
    assert "PYTHONHASHSEED 42" in finding.evidence
    assert "PYTHONHASHSEED 0" in finding.evidence


async def test_a_hash_algorithm_that_differs_between_engines(world: Any) -> None:
    for algorithm in ("sha256", "sha256_cbor", "sha256_cbor"):
        await world.engine(hash_algorithm=algorithm)
    finding = the(await world.examine(), "hash-differs")
    assert "sha256: engine-0; sha256_cbor: engine-1, engine-2" in finding.evidence
    assert "--prefix-caching-hash-algo sha256_cbor" in finding.fix


async def test_hashes_other_than_configured(world: Any) -> None:
    await world.engine(hash_seed="42")
    report = await world.examine(world.config(events={"hashSeed": "7"}))
    assert "PYTHONHASHSEED 42" in the(report, "hash-not-as-configured").evidence


async def test_a_block_size_that_the_index_cannot_express(world: Any) -> None:
    await world.engine()
    finding = the(await world.examine(world.config(index={"blockTokens": 24})), "block-size-not-expressible")
    assert "16 tokens, the index's 24" in finding.evidence


@pytest.mark.parametrize("size", [8, 16, 32, 64])
async def test_multiples_and_parts_of_the_engines_block_size_are_healthy(world: Any, size: int) -> None:
    await world.engine()
    assert (await world.examine(world.config(index={"blockTokens": size}))).findings == []


async def test_usage_without_cached_tokens(world: Any) -> None:
    def strip(request: Any, body: Any) -> Any:
        body["usage"]["prompt_tokens_details"] = None
        return body

    await world.engine(change={"/v1/chat/completions": strip})
    assert "--enable-prompt-tokens-details" in the(await world.examine(), "cached-tokens-unreported").fix


async def test_an_adapter_whose_path_is_unknown(world: Any) -> None:
    def strip(request: Any, body: Any) -> Any:
        return {**body, "data": [{**it, "root": None} if it["parent"] else it for it in body["data"]]}

    await world.engine(loras={"ad1": "/adapters/ad1"}, change={"/v1/models": strip})
    assert "ad1" in the(await world.examine(), "lora-path-unknown").evidence


async def test_only_decode_workers_known(world: Any) -> None:
    def split(document: dict[str, Any]) -> None:
        document["plugins"] += [
            {"type": "prefill-filter"},
            {"type": "decode-filter"},
            {"type": "always-disagg-pd-decider"},
            {"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": "always-disagg-pd-decider"}}},
        ]
        document["schedulingProfiles"] = [
            {"name": role, "plugins": [{"pluginRef": f"{role}-filter"}, {"pluginRef": "max-score-picker"}]}
            for role in ("prefill", "decode")
        ]

    await world.engine(entry={"role": "decode"})
    assert "decode" in the(await world.examine(world.config(split)), "only-decode-workers").evidence


# --- prompts


def other_files(tmp_path: Path, name: str, change: Callable[[str], str]) -> Path:
    """A copy of the model's files with one of them changed."""
    folder = tmp_path / "other"
    shutil.copytree(MODEL_FILES, folder)
    if name == "tokenizer.json":
        text = lzma.decompress((folder / "tokenizer.json.xz").read_bytes()).decode()
        (folder / "tokenizer.json.xz").unlink()
    else:
        text = (folder / name).read_text()
    (folder / name).write_text(change(text))
    return folder


def swapped(text: str) -> str:
    """Two tokens exchange their ids."""
    value = json.loads(text)
    vocabulary = value["model"]["vocab"]
    vocabulary["w"], vocabulary["The"] = vocabulary["The"], vocabulary["w"]
    return json.dumps(value)


async def test_a_tokenizer_other_than_the_engines(world: Any, tmp_path: Path) -> None:
    await world.engine(tokenizer=other_files(tmp_path, "tokenizer.json", swapped))
    finding = the(await world.examine(), "tokenizer-differs")
    assert "a plain text: at token 0" in finding.evidence


async def test_a_template_other_than_the_engines(world: Any, tmp_path: Path) -> None:
    changed = other_files(tmp_path, "chat_template.jinja", lambda text: "{{ '<|im_start|>' }}" + text)
    await world.engine(tokenizer=changed)
    finding = the(await world.examine(), "template-differs")
    assert "(the answer)" in finding.evidence


async def test_a_template_that_differs_in_what_engines_announce(world: Any, tmp_path: Path) -> None:
    """Where an engine neither tokenizes nor tells its prompt's ids, its events do."""

    def refuse(request: Any, body: Any) -> Any:
        return web.Response(status=403)

    def strip(request: Any, body: Any) -> Any:
        return {key: value for key, value in body.items() if key != "prompt_token_ids"}

    changed = other_files(tmp_path, "chat_template.jinja", lambda text: "{{ '<|im_start|>' }}" + text)
    paths = {"/tokenize": refuse, "/v1/chat/completions/render": refuse, "/v1/completions/render": refuse}
    await world.engine(tokenizer=changed, change={**paths, "/v1/chat/completions": strip})
    assert "(its events)" in the(await world.examine(), "tokenizer-differs").evidence


async def test_tokens_that_are_only_estimated(world: Any) -> None:
    def estimate(document: dict[str, Any]) -> None:
        document["plugins"][1]["parameters"] = {"estimate": {}}

    await world.engine()
    assert "local: {path: DIR}" in the(await world.examine(world.config(estimate)), "tokens-estimated").fix


async def test_a_template_that_rewrites_history(world: Any) -> None:
    await world.engine()
    finding = the(await world.examine(world.config(models={})), "template-rewrites-history")
    assert "think block dropped" in finding.evidence
    assert "rewritesHistory: true" in finding.fix


async def test_without_requests_engines_still_tokenize(world: Any, tmp_path: Path) -> None:
    changed = other_files(tmp_path, "chat_template.jinja", lambda text: "{{ '<|im_start|>' }}" + text)
    engine = await world.engine(tokenizer=changed)
    finding = the(await world.examine(requests=False), "template-differs")
    assert "(/tokenize)" in finding.evidence
    assert engine.server.live.engine.counters.prefix_queries == 0
