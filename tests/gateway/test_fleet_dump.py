"""A dump holds what a decision is made from, and `warmroute explain` makes the same decision from it."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from click.testing import CliRunner

from fleet.endpoint import Endpoint
from fleet.fleet import Adapters, Fleet
from fleet.listing import Listing
from gateway.commands.explain import command
from gateway.dump_page import dump_page
from gateway.fleet_dump import DumpError, fleet_rows, read_dump, restore, with_keys
from gateway.http_server import admin_app
from indexer.block_key import block_keys, root_key
from indexer.hybrid import Group, Rule
from indexer.index import Index
from indexer.tier import CPU, GPU
from indexer.trust import Reason, Trust, degraded, exact
from tokenization.local import LocalTokenizer

QWEN3 = Path(__file__).resolve().parents[2] / "configs" / "models" / "qwen3"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Where do I go with all this text? " * 20}]}
CONFIG = f"""\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: static-discovery
  parameters:
    endpoints:
    - {{name: p0, address: 10.0.0.1, port: 8000, role: prefill}}
    - {{name: d0, address: 10.0.0.2, port: 8000, role: decode}}
    - {{name: d1, address: 10.0.0.3, port: 8000, role: decode}}
- type: precise-prefix-cache-producer
- type: prefill-filter
- type: decode-filter
- type: expected-work-scorer
  parameters: {{prefixMatchInfoProducerName: precise-prefix-cache-producer}}
- type: prefix-based-pd-decider
  parameters: {{nonCachedTokens: 64, prefixMatchInfoProducerName: precise-prefix-cache-producer}}
- type: disagg-profile-handler
  parameters: {{deciders: {{prefill: prefix-based-pd-decider}}}}
schedulingProfiles:
- {{name: prefill, plugins: [{{pluginRef: prefill-filter}}, {{pluginRef: expected-work-scorer}}]}}
- {{name: decode, plugins: [{{pluginRef: decode-filter}}, {{pluginRef: expected-work-scorer}}]}}
dataLayer: {{discovery: {{pluginRef: static-discovery}}}}
warmroute: {{models: {{m: {{tokenizer: {QWEN3}}}}}}}
"""


class Streams:
    def block_tokens(self, slot: int) -> int:
        return 16

    def engine_block_tokens(self, slot: int) -> int:
        return 32 if slot == 1 else 16

    def trust(self, slot: int) -> Trust:
        return degraded(Reason.LOST_BATCHES, 5.0, "lost 3") if slot == 1 else exact(0.0)

    def layout(self, slot: int) -> tuple[Group, ...]:
        return (Group(0, Rule.FULL), Group(1, Rule.SLIDING_WINDOW, 128)) if slot == 1 else ()


def dumped(fleet: Fleet, index: Index, keys: int = 1000) -> bytes:
    streams = Streams()
    rows = fleet_rows(fleet, streams, streams.layout, streams.engine_block_tokens)
    return msgspec.json.encode(with_keys(rows, index, 1.0, keys))


@pytest.fixture
def fleet() -> Fleet:
    made = Fleet(clock=lambda: 1000.0)
    made.add(Endpoint(name="p0", address="10.0.0.1:8000", labels={"llm-d.ai/role": "prefill"}))
    made.add(Endpoint(name="d0", address="10.0.0.2:8000", labels={"llm-d.ai/role": "decode"}))
    made.add(Endpoint(name="d1", address="10.0.0.3:8000", labels={"llm-d.ai/role": "decode"}, rank=1))
    return made


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not a dump"),
        (b"[]", "not a dump"),
        (b'{"version": 9, "at": 0, "complete": true, "endpoints": []}', "version 9 of the dump"),
    ],
)
def test_what_is_no_dump_is_refused_in_words(raw: bytes, message: str) -> None:
    with pytest.raises(DumpError, match=message):
        read_dump(raw)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": {"tape": ""}}, "no tier 'tape'"),
        ({"keys": {"gpu": "!"}}, "keys are not base64"),
        ({"keys": {"gpu": "AAAA"}}, "keys are not base64 of 64-bit"),
        ({"columns": {"speed": 1.0}}, "no column 'speed'"),
    ],
)
def test_a_spoiled_dump_says_which_endpoint_is_wrong(fleet: Fleet, change: dict[str, Any], message: str) -> None:
    document = json.loads(dumped(fleet, Index()))
    document["endpoints"][0] |= change
    with pytest.raises(DumpError, match=f"endpoint p0: {message}"):
        restore(read_dump(json.dumps(document).encode()), Fleet(), Index())


def test_everything_comes_back_and_times_as_ages(fleet: Fleet) -> None:
    index = Index()
    index.add(1, GPU, [1, 2, 2**64 - 1])
    index.add(1, CPU, [7])
    index.add(2, GPU, [2])
    fleet.scraped_at[1], fleet.oldest_since[1] = 990.0, 970.0
    fleet.in_flight_tokens[1], fleet.waiting[2], fleet.draining[2], fleet.block_tokens[0] = 512, 3, True, 32
    fleet.listed(1, Listing(base=("m",), adapters={"a": "/a", "b": None}))
    fleet.adapters[1] = Adapters(running=frozenset({"a"}), most=4)

    again, filled = Fleet(clock=lambda: 5000.0), Index()
    dump = read_dump(dumped(fleet, index))
    streams = restore(dump, again, filled)
    assert dump.complete
    assert [streams.engine_block_tokens(slot) for slot in range(2)] == [16, 32]
    assert [again.endpoint(slot) for slot in range(3)] == [fleet.endpoint(slot) for slot in range(3)]
    assert again.age(again.slots()).tolist() == [float("inf"), 10.0, float("inf")]
    assert again.oldest_since[1] == 4970.0
    assert (again.in_flight_tokens[1], again.waiting[2], bool(again.draining[2]), again.block_tokens[0]) == (
        512,
        3,
        True,
        32,
    )
    assert (again.listings[1], again.adapters[1]) == (fleet.listings[1], fleet.adapters[1])
    assert {key: filled.holders(key) for key in (1, 2, 7, 2**64 - 1)} == {1: 2, 2: 6, 7: 2, 2**64 - 1: 2}
    assert filled.tier_of(1, 7) == CPU
    assert str(streams.trust(1)) == "degraded(lost_batches)"
    assert streams.layout(1) == Streams().layout(1)


def test_a_bounded_dump_keeps_the_youngest_keys_and_says_so(fleet: Fleet) -> None:
    index = Index(shards=1)
    index.add(1, GPU, range(100, 0, -1))  # the last of a chain is its oldest
    dump = read_dump(dumped(fleet, index, 10))
    filled = Index()
    restore(dump, Fleet(), filled)
    assert not dump.complete
    assert [key for key in range(101) if filled.holders(key)] == list(range(91, 101))


# --- the command


def run(tmp_path: Path, body: object, *options: str, state: bytes | None = None) -> Any:
    files = {"config.yaml": CONFIG.encode(), "request.json": json.dumps(body).encode()}
    if state is not None:
        files["dump.json"] = state
        options = ("--state", str(tmp_path / "dump.json"), *options)
    for name, text in files.items():
        (tmp_path / name).write_bytes(text)
    return CliRunner().invoke(command, ["-c", str(tmp_path / "config.yaml"), str(tmp_path / "request.json"), *options])


def test_a_request_the_gateway_would_refuse_is_refused_here(tmp_path: Path) -> None:
    result = run(tmp_path, {"model": "other", "messages": []})
    assert result.exit_code == 1
    assert "the gateway answers 404: The model `other` does not exist" in result.output
    assert run(tmp_path, CHAT, "-H", "nonsense").exit_code == 2
    assert "not a dump" in run(tmp_path, CHAT, state=b"{}").output


def test_without_a_dump_the_configured_fleet_is_idle_and_empty(tmp_path: Path) -> None:
    result = run(tmp_path, CHAT, "--json")
    told = json.loads(result.stdout)
    assert result.exit_code == 0
    assert told["prefill"] == "p0"
    assert told["deciders"]["prefill"]["reason"] == "uncached"
    assert told["profiles"]["decode"]["removed"] == {"p0": "decode-filter"}
    assert told["blind"] is None


def test_without_a_dump_people_are_told_what_fleet_was_asked_and_which_page_knows_a_reason(tmp_path: Path) -> None:
    assert "without --state: an idle fleet with empty caches" in run(tmp_path, CHAT).stderr
    tiny = {"model": "m", "messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}
    assert "routed by load only: media (docs/troubleshooting.md#blind-media)" in run(tmp_path, tiny).stdout


def test_with_a_dump_the_decision_is_the_one_of_that_moment(tmp_path: Path, fleet: Fleet) -> None:
    tokenizer = LocalTokenizer.from_directory(QWEN3)
    ids = tokenizer.tokenize("/v1/chat/completions", CHAT).token_ids
    index = Index()
    index.add(2, GPU, block_keys(root_key("m"), ids, 16))
    fleet.in_flight_tokens[1] = 1000
    state = dumped(fleet, index)
    told = json.loads(run(tmp_path, CHAT, "--json", state=state).stdout)
    assert told["endpoints"][0] == "d1 rank 1"
    assert told["prefill"] is None
    assert told["deciders"]["prefill"]["reason"] == "cached"
    best, other = told["profiles"]["decode"]["candidates"]
    assert best["cachedTokens"] == {"precise-prefix-cache-producer": float(len(ids) // 16 * 16)}
    assert best["trust"] == "exact"
    assert best["work"]["own_s"] < other["work"]["own_s"]
    assert other["work"]["backlog_s"] > 0
    text = run(tmp_path, CHAT, state=state).output
    assert "goes to d1 rank 1 (10.0.0.3:8000)" in text
    assert "prefill? prefix-based-pd-decider says no: cached" in text
    assert "  p0         removed by decode-filter\n" in text
    (line,) = (it for it in text.splitlines() if it.startswith("  d1 rank 1  total"))
    scores = [f"{name} {it['score']:.3f} x {it['weight']:g}" for name, it in best["scores"].items()]
    assert (
        f"total {best['total']:.3f} = {' + '.join(scores)}; {len(ids) // 16 * 16} tokens cached (stream exact)" in line
    )
    assert line.endswith(f"ms of work before it, {best['work']['own_s'] * 1e3:.1f} ms of its own")
    assert "without --state" not in text


async def test_the_page_bounds_what_it_is_asked_for(fleet: Fleet) -> None:
    index, streams = Index(), Streams()
    index.add(0, GPU, [1, 2, 3])
    app = admin_app({}, [dump_page(fleet, index, streams, streams.layout, streams.engine_block_tokens)])
    async with TestClient(TestServer(app)) as client:
        async with client.get("/state/dump?keys=many") as answer:
            assert answer.status == 400
        async with client.get("/state/dump") as answer:
            dump = read_dump(await answer.read())
    assert len(dump.endpoints) == 3
    assert dump.endpoints[0].keys["gpu"]
