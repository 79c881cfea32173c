"""The HTTP surface, through a real client and real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp.test_utils import TestClient, TestServer

from simulator.reply import ReplyWriter
from simulator.server import EngineServer
from simulator.settings import ServerSettings
from tokenization.local import LocalTokenizer

Client = TestClient[Any, Any]
Start = Callable[..., Awaitable[tuple[Client, EngineServer]]]

CHAT = {"model": "sim", "messages": [{"role": "user", "content": "Tell me about prefix caches. " * 20}]}


@pytest.fixture
async def start(tokenizer: LocalTokenizer, writer: ReplyWriter, free_port: Callable[[], int]) -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def begin(**changes: Any) -> tuple[Client, EngineServer]:
            port = free_port()
            settings = ServerSettings(**{"port": port, "speed": 20.0, "blocks": 512, **changes})
            engine = EngineServer(settings, tokenizer, writer)
            client = TestClient(TestServer(engine.app(), host="127.0.0.1", port=port))
            await stack.enter_async_context(client)
            return client, engine

        yield begin


async def post(client: Client, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    async with client.post(path, data=json.dumps(body), headers=headers) as answer:
        return answer.status, await answer.json()


async def eventually(true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not become true within 10 s")


async def stream(client: Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with client.post(path, json={**body, "stream": True}) as answer:
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = (await answer.text()).strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"messages": CHAT["messages"]}, 400, "a model name is required"),
        ({**CHAT, "model": "other"}, 404, "The model `other` does not exist."),
        ({"model": "sim"}, 400, "messages"),
        ({**CHAT, "max_tokens": 0}, 400, "max_tokens must be at least 1, got 0"),
        ({**CHAT, "n": 2}, 400, "one choice per prompt"),
        ({**CHAT, "stop": [1]}, 400, "stop must be a string or an array of strings"),
        ({**CHAT, "stream_options": {"include_usage": True}}, 400, "`stream=True`"),
        ({**CHAT, "max_tokens": 10_000}, 400, "maximum context length is 8176 tokens"),
        ({**CHAT, "kv_transfer_params": {"do_remote_prefill": True}}, 400, "remote_engine_id: expected str, got None"),
        ([], 400, "must be a JSON object"),
    ],
)
async def test_bad_requests_are_answered_in_openai_shape(start: Start, body: Any, status: int, message: str) -> None:
    client, engine = await start()
    got, answer = await post(client, "/v1/chat/completions", body)
    assert got == status
    assert message in answer["error"]["message"]
    assert (answer["error"]["code"], set(answer["error"])) == (status, {"message", "type", "param", "code"})
    assert not engine.live.engine.busy


async def test_a_body_that_is_no_json_is_a_400_and_an_unknown_route_a_404(start: Start) -> None:
    client, _ = await start()
    async with client.post("/v1/completions", data="{nope") as answer:
        assert (answer.status, "not valid JSON" in await answer.text()) == (400, True)
    async with client.get("/v2/none") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, 404)


async def test_the_second_turn_of_a_chat_is_cached_up_to_the_end_of_the_reply(start: Start) -> None:
    client, _ = await start()
    _, first = await post(client, "/v1/chat/completions", {**CHAT, "return_token_ids": True})
    choice = first["choices"][0]
    assert choice["finish_reason"] == "stop"
    held = len(first["prompt_token_ids"]) + len(choice["token_ids"])
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert first["usage"]["total_tokens"] == held
    more = [*CHAT["messages"], choice["message"], {"role": "user", "content": "Go on."}]
    _, second = await post(client, "/v1/chat/completions", {**CHAT, "messages": more})
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == (held - 1) // 16 * 16


async def test_a_streamed_chat_equals_the_whole_one_and_reports_usage_when_asked(start: Start) -> None:
    client, _ = await start()
    chunks = await stream(client, "/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}})
    _, whole = await post(client, "/v1/chat/completions", CHAT)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]][-1] == "stop"
    assert chunks[-1]["choices"] == []
    for name in ("prompt_tokens", "completion_tokens"):
        assert chunks[-1]["usage"][name] == whole["usage"][name]


async def test_a_stream_has_no_usage_unless_asked(start: Start) -> None:
    client, _ = await start()
    chunks = await stream(client, "/v1/completions", {"model": "sim", "prompt": "Hello", "max_tokens": 4})
    assert len(chunks) == 4
    assert not any("usage" in chunk for chunk in chunks)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]


async def test_a_completion_takes_texts_token_ids_and_lists_of_them(start: Start) -> None:
    client, _ = await start()
    for prompt, choices in (("Hello", 1), ([1, 2, 3], 1), (["a", "b", "c"], 3), ([[1, 2], [3]], 2)):
        body = {"model": "sim", "prompt": prompt, "max_tokens": 3}
        _, whole = await post(client, "/v1/completions", body)
        assert [choice["index"] for choice in whole["choices"]] == list(range(choices))
        assert whole["usage"]["completion_tokens"] == 3 * choices
        chunks = await stream(client, "/v1/completions", body)
        texts = ["" for _ in range(choices)]
        for chunk in chunks:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert texts == [choice["text"] for choice in whole["choices"]]


async def test_a_stop_string_ends_the_reply_before_it_and_the_request_on_the_engine(start: Start) -> None:
    client, engine = await start()
    body = {"model": "sim", "prompt": "Hello", "max_tokens": 60, "ignore_eos": True}
    _, full = await post(client, "/v1/completions", body)
    words = full["choices"][0]["text"].split(" ")
    _, cut = await post(client, "/v1/completions", {**body, "stop": " " + words[5]})
    assert cut["choices"][0]["text"] == " ".join(words[: words.index(words[5])])
    assert (cut["choices"][0]["finish_reason"], cut["choices"][0]["stop_reason"]) == ("stop", " " + words[5])
    await eventually(lambda: not engine.live.engine.busy)


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_goes_away_aborts_its_request(start: Start, streamed: bool) -> None:
    client, engine = await start(speed=1.0)
    body = {**CHAT, "stream": streamed, "max_tokens": 5000, "ignore_eos": True}

    async def ask() -> None:
        async with client.post("/v1/chat/completions", json=body) as answer:
            await answer.content.read()

    asking = asyncio.create_task(ask())
    await eventually(lambda: engine.live.engine.counters.generated > 3)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await eventually(lambda: not engine.live.engine.busy)
    assert engine.live.engine.pool.used == 0
    async with client.get("/metrics") as page:
        assert 'finished_reason="abort",model_name="sim"} 1.0' in await page.text()


async def test_a_salt_and_an_adapter_keep_their_blocks_apart(start: Start) -> None:
    client, _ = await start(loras={"ad1": "/adapters/ad1"})
    for extra in ({}, {"cache_salt": "s1"}, {"model": "ad1"}):
        body = {"model": "sim", "prompt": list(range(100)), "max_tokens": 1, **extra}
        _, cold = await post(client, "/v1/completions", body)
        _, warm = await post(client, "/v1/completions", body)
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (cold, warm)]
        assert cached == [0, 96], extra
    async with client.get("/v1/models") as answer:
        models = (await answer.json())["data"]
    assert [(model["id"], model["root"], model["parent"]) for model in models] == [
        ("sim", "sim", None),
        ("ad1", "/adapters/ad1", "sim"),
    ]


async def test_render_and_tokenize_give_the_tokens_that_generation_uses(start: Start) -> None:
    client, _ = await start()
    _, chat = await post(client, "/v1/chat/completions", {**CHAT, "max_tokens": 1, "return_token_ids": True})
    _, rendered = await post(client, "/v1/chat/completions/render", CHAT)
    _, tokenized = await post(client, "/tokenize", CHAT)
    assert rendered["token_ids"] == tokenized["tokens"] == chat["prompt_token_ids"]
    _, text = await post(client, "/detokenize", {"tokens": tokenized["tokens"]})
    assert text["prompt"].startswith("<|im_start|>user\nTell me about prefix caches.")
    _, completion = await post(client, "/v1/completions/render", {"model": "sim", "prompt": "hi there"})
    assert isinstance(completion, list)


async def test_tokens_that_come_with_the_request_replace_tokenization(start: Start) -> None:
    client, _ = await start()
    body = {**CHAT, "max_tokens": 1, "return_token_ids": True, "kv_transfer_params": {"prompt_token_ids": [5, 6, 7]}}
    _, answer = await post(client, "/v1/chat/completions", body)
    assert answer["prompt_token_ids"] == [5, 6, 7]


async def test_the_metrics_page_has_the_names_a_router_reads(start: Start) -> None:
    client, _ = await start()
    await post(client, "/v1/completions", {"model": "sim", "prompt": list(range(100)), "max_tokens": 1})
    await post(client, "/v1/completions", {"model": "sim", "prompt": list(range(100)), "max_tokens": 1})
    async with client.get("/metrics") as answer:
        page = await answer.text()
    labels = '{engine="0",model_name="sim"}'
    for line in (
        f"vllm:num_requests_running{labels} 0.0",
        f"vllm:num_requests_waiting{labels} 0.0",
        f"vllm:kv_cache_usage_perc{labels} 0.0",
        f"vllm:prefix_cache_queries_total{labels} 200.0",
        f"vllm:prefix_cache_hits_total{labels} 96.0",
        f"vllm:prompt_tokens_total{labels} 200.0",
        f"vllm:time_to_first_token_seconds_count{labels} 2.0",
    ):
        assert line in page, line
    assert 'num_gpu_blocks="512"' in page
    assert 'block_size="16"' in page


async def test_the_event_stream_is_described_and_carries_what_was_stored(start: Start) -> None:
    client, _ = await start(events="tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*", bind_events=True, topic="kv@e@sim")
    async with client.get("/kv_event_sources") as answer:
        source = (await answer.json())["0"]
    assert (source["enable_kv_cache_events"], source["topic"], source["buffer_steps"]) == (True, "kv@e@sim", 10_000)
    await post(client, "/v1/completions", {"model": "sim", "prompt": list(range(100)), "max_tokens": 1})
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(source["replay_endpoint"])
        await dealer.send_multipart([b"", (0).to_bytes(8, "big")])
        frames = await asyncio.wait_for(dealer.recv_multipart(), 5)
    assert frames[:3] == [b"", b"kv@e@sim", (0).to_bytes(8, "big")]
    _, events, rank = msgspec.msgpack.decode(frames[3])
    assert (len(events[0]["block_hashes"]), rank) == (6, 0)


async def test_a_restart_loses_cache_and_running_requests(start: Start) -> None:
    client, engine = await start(speed=1.0)
    body = {"model": "sim", "prompt": list(range(100)), "max_tokens": 1000, "ignore_eos": True}
    asking = asyncio.create_task(post(client, "/v1/completions", body))
    await eventually(lambda: engine.live.engine.counters.generated > 0)
    await post(client, "/sim/restart", {})
    status, answer = await asking
    assert (status, answer["error"]["type"]) == (500, "InternalServerError")
    _, again = await post(client, "/v1/completions", {**body, "max_tokens": 1})
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_faults_of_the_event_stream_are_planted_and_unknown_ones_refused(start: Start) -> None:
    client, _ = await start(events="tcp://127.0.0.1:*", bind_events=True)
    status, faults = await post(client, "/sim/faults", {"silent": True})
    assert (status, faults["silent"]) == (200, True)
    status, answer = await post(client, "/sim/faults", {"quiet": True})
    assert (status, "not a fault" in answer["error"]["message"]) == (400, True)


# -- hand-offs --------------------------------------------------------------------------------------------------------

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
LONG = {"model": "sim", "prompt": list(range(100)), "ignore_eos": True}


async def test_a_handed_off_prompt_is_not_computed_again(start: Start) -> None:
    prefill, p_engine = await start()
    decode, d_engine = await start()
    _, first = await post(prefill, "/v1/completions", {**LONG, "max_tokens": 1, "kv_transfer_params": PREFILL})
    params = first["kv_transfer_params"]
    assert (params["do_remote_prefill"], params["remote_num_tokens"], params["transfer_mode"]) == (True, 100, "pull")
    assert len(params["remote_block_ids"][0]) == p_engine.live.engine.pool.used == 7
    _, second = await post(decode, "/v1/completions", {**LONG, "max_tokens": 5, "kv_transfer_params": params})
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 99
    assert d_engine.live.engine.counters.computed_prompt == 1
    assert p_engine.live.engine.pool.used == 0
    assert second["kv_transfer_params"] is None


async def test_an_ordinary_request_gets_no_transfer_parameters(start: Start) -> None:
    client, _ = await start()
    _, answer = await post(client, "/v1/completions", {**LONG, "max_tokens": 1})
    assert answer["kv_transfer_params"] is None


@pytest.mark.parametrize(("recompute", "status"), [(False, 500), (True, 200)])
async def test_a_hand_off_whose_blocks_are_gone_fails_or_is_recomputed(
    start: Start, recompute: bool, status: int
) -> None:
    prefill, _ = await start(lease_s=0.05)
    decode, _ = await start(load_failure_recompute=recompute)
    _, first = await post(prefill, "/v1/completions", {**LONG, "max_tokens": 1, "kv_transfer_params": PREFILL})
    await asyncio.sleep(0.1)
    body = {**LONG, "max_tokens": 5, "kv_transfer_params": first["kv_transfer_params"]}
    got, answer = await post(decode, "/v1/completions", body)
    assert got == status
    if recompute:
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    async with prefill.get("/metrics") as page:
        assert 'vllm:nixl_num_kv_expired_reqs_total{engine="0",model_name="sim"} 1.0' in await page.text()


async def test_a_hand_off_to_an_engine_that_cannot_reach_the_prefill_side_fails(
    start: Start, free_port: Callable[[], int]
) -> None:
    prefill, _ = await start()
    decode, engine = await start()
    _, first = await post(prefill, "/v1/completions", {**LONG, "max_tokens": 1, "kv_transfer_params": PREFILL})
    params = {**first["kv_transfer_params"], "remote_port": free_port()}
    status, _ = await post(decode, "/v1/completions", {**LONG, "max_tokens": 5, "kv_transfer_params": params})
    assert status == 500
    assert not engine.live.engine.busy


async def test_it_says_how_many_different_blocks_its_cache_holds(start: Start) -> None:
    client, engine = await start()
    for _ in range(2):  # the second one's last block is another copy of the same
        await post(client, "/v1/completions", {"model": "sim", "prompt": list(range(48)), "max_tokens": 1})
    answer = await client.get("/sim/cached")
    assert await answer.json() == {"digests": 3}
    assert engine.live.engine.pool.copies > 3
    await client.post("/reset_prefix_cache")
    assert await (await client.get("/sim/cached")).json() == {"digests": 0}
