"""What a decision charges, and to whom: stages, ports of profile handlers, expected replies."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from fleet.breaker import State
from fleet.endpoint import Endpoint
from gateway.config import load_text
from gateway.extproc.decision import Decided
from gateway.producer_wiring import producers_of
from indexer.block_key import block_keys, root_key
from indexer.tier import GPU
from tests.gateway.test_request_path import CHAT, CONFIG, TOKENS, World
from tokenization.tokenized import Tokenized

RANKS = CONFIG.replace("plugins:\n", "plugins:\n- {type: data-parallel-profile-handler}\n", 1)
STAGES = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: decode-filter}
- {type: encode-filter}
- {type: prefill-filter}
- {type: always-disagg-multimodal-decider}
- {type: always-disagg-pd-decider}
- type: disagg-profile-handler
  parameters: {deciders: {encode: always-disagg-multimodal-decider, prefill: always-disagg-pd-decider}}
schedulingProfiles:
- {name: encode, plugins: [{pluginRef: encode-filter}]}
- {name: prefill, plugins: [{pluginRef: prefill-filter}]}
- {name: decode, plugins: [{pluginRef: decode-filter}]}
"""
COLUMNS = (
    *("in_flight", "awaiting", "in_flight_tokens", "in_flight_square", "decoding", "decode_tokens"),
    *("reserved_tokens", "oldest_tokens", "oldest_square", "oldest_left_tokens", "oldest_left_square"),
)


class Images:
    """Every prompt has an image."""

    async def tokenize(
        self, path: str, body: Mapping[str, Any], *, size: int | None = None, engine_model: str | None = None
    ) -> Tokenized:
        return Tokenized(token_ids=TOKENS, media=("image",))


def estimating(parameters: str) -> World:
    plugin = f"- {{type: inflight-load-producer, parameters: {{addEstimatedOutputTokens: true, {parameters}}}}}\n"
    return World(config=CONFIG.replace("plugins:\n", "plugins:\n" + plugin, 1), roles=[""])


async def test_a_rank_behind_its_hosts_primary_port_is_not_taken_for_a_fallback() -> None:
    world = World(config=RANKS, roles=[])
    first, second = (
        world.fleet.add(Endpoint(name=str(n), address=f"10.0.0.1:{8000 + n}", labels={})) for n in range(2)
    )
    world.fleet.waiting[first] = 10
    for number in range(6):
        answer = await world.ask(CHAT, request_id=f"r{number}")
        assert isinstance(answer, Decided)
        assert answer.destination == ("10.0.0.1:8000",)
        assert answer.set_headers["x-data-parallel-host-port"] == "10.0.0.1:8001"
        assert answer.observer is not None
        answer.observer.response_headers(200, {"content-type": "text/event-stream"}, "10.0.0.1:8000")
        assert (world.fleet.in_flight[first], world.fleet.in_flight[second]) == (0, 1)
        answer.observer.finished()
    assert world.path.sending._breaker.state(second) is State.CLOSED
    assert world.count("responses_total", endpoint="10.0.0.1:8001", end="finished") == 6


@pytest.mark.parametrize("prefill", [False, True])
async def test_who_encodes_images_is_not_charged_with_the_prompt(prefill: bool) -> None:
    roles = ["decode", "encode", "prefill"] if prefill else ["decode", "encode"]
    world = World(tokenizer=Images(), config=STAGES, roles=roles)
    answer = await world.ask(CHAT)
    assert isinstance(answer, Decided)
    assert answer.set_headers["x-encoder-hosts-ports"] == "10.0.0.1:8000"
    assert world.fleet.in_flight[: len(roles)].tolist() == [1] * len(roles)
    assert world.fleet.in_flight_tokens[: len(roles)].tolist() == ([0, 0, 100] if prefill else [100, 0])
    assert world.fleet.reserved_tokens[0] == 100 + 400
    assert world.fleet.reserved_tokens[1] == 0
    assert answer.observer is not None
    answer.observer.response_headers(200, {"content-type": "text/event-stream"}, None)
    answer.observer.response_chunk(b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n')
    assert world.fleet.in_flight[: len(roles)].tolist() == [1, *([0] * (len(roles) - 1))]
    answer.observer.finished()
    assert {name: float(getattr(world.fleet, name).sum()) for name in COLUMNS} == dict.fromkeys(COLUMNS, 0.0)


@pytest.mark.parametrize(
    ("parameters", "limit", "reply"),
    [
        ("outputRatio: 1.5", None, 150),
        ("outputRatio: 20", None, 2000),
        ("outputRatio: 20, maxEstimatedOutputTokens: 600", None, 600),
        ("outputRatio: 20", 700, 700),
        ("outputRatio: 1.5", 700, 150),
        ("outputRatio: 0", None, 400),
    ],
)
async def test_an_estimated_reply_is_what_is_reserved(parameters: str, limit: int | None, reply: int) -> None:
    world = estimating(parameters)
    await world.ask(json.dumps({**json.loads(CHAT), **({"max_tokens": limit} if limit else {})}).encode())
    assert world.fleet.reserved_tokens[0] == 100 + reply


async def test_a_name_made_for_a_twin_is_nobody_elses() -> None:
    world = World(roles=[""])
    observers = []
    for name in ("r~1", "r", "r"):
        answer = await world.ask(CHAT, request_id=name)
        assert isinstance(answer, Decided)
        observers.append(answer.observer)
    assert world.fleet.in_flight[0] == len(world.books) == 3
    for left, observer in zip((2, 1, 0), observers, strict=True):
        assert observer is not None
        observer.aborted("gone")
        assert world.fleet.in_flight[0] == len(world.books) == left


@pytest.mark.parametrize(
    ("plugins", "booked"),
    [
        ("- {type: queue-scorer}", ""),
        ("- {type: expected-work-scorer, parameters: {prefixMatchInfoProducerName: other}}", "other"),
        ("- {type: inflight-load-producer, parameters: {prefixMatchInfoProducerName: other}}", "other"),
        (
            "- {type: inflight-load-producer, parameters: {prefixMatchInfoProducerName: approx-prefix-cache-producer}}\n"
            "- {type: expected-work-scorer, parameters: {prefixMatchInfoProducerName: other}}",
            "other",
        ),
    ],
)
async def test_the_books_count_by_the_match_that_prices(plugins: str, booked: str) -> None:
    head = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n"
    text = (
        head
        + f"- {{type: approx-prefix-cache-producer}}\n- {{type: precise-prefix-cache-producer, name: other}}\n{plugins}"
    )
    world = World(roles=[""])
    world.path.producers = producers_of(load_text(text), world.fleet)
    assert (world.path.producers.default, world.path.producers.booked) == ("approx-prefix-cache-producer", booked)
    world.path.producers.approximate["approx-prefix-cache-producer"].sent(0, block_keys(root_key("m"), TOKENS[:32], 16))
    world.index.add(0, GPU, block_keys(root_key("m"), TOKENS[:64], 16))
    await world.ask(CHAT)
    assert world.fleet.in_flight_tokens[0] == (36 if booked else 68)
