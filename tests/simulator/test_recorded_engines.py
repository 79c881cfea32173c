"""The engine model against a real vLLM 0.32: same requests and replies in, same event batches out."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from simulator.engine import Engine
from simulator.engine_settings import EngineSettings
from simulator.hash_chain import HashRecipe, Lora
from simulator.sequence import Submission
from simulator.virtual_time import run
from simulator.wire import encode_batch


def batches(path: Path) -> list[list[dict[str, Any]]]:
    """The events of each live batch of a recording, without numbers and time stamps."""
    decoded = []
    for line in path.read_text().splitlines():
        frames = [base64.b64decode(frame) for frame in json.loads(line)["frames"]]
        decoded.append(msgspec.msgpack.decode(frames[-1])[1])
    return decoded


def meta(captures: Path, name: str) -> dict[str, Any]:
    """The sidecar of a recording."""
    return dict(json.loads((captures / f"{name}.meta.json").read_text()))


def engine_like(sidecar: dict[str, Any]) -> Engine:
    """A simulated engine with the flags of the recorded one."""
    args: list[str] = sidecar["engine"]["args"]

    def flag(name: str, default: str) -> str:
        return args[args.index(name) + 1] if name in args else default

    recipe = HashRecipe.of(
        flag("--prefix-caching-hash-algo", "sha256"),
        sidecar["engine"]["env"].get("PYTHONHASHSEED"),
        int(flag("--block-size", "16")),
    )
    return Engine(
        EngineSettings(
            recipe=recipe,
            blocks=int(flag("--num-gpu-blocks-override", "1000")),
            max_running=int(flag("--max-num-seqs", "256")),
            token_budget=int(flag("--max-num-batched-tokens", "8192")),
        )
    )


def submission(request: dict[str, Any], number: int, loras: dict[str, Lora] | None = None) -> Submission:
    """A recorded request, with the reply that the real engine sampled."""
    body = request.get("body") or {}
    return Submission(
        id=f"r{number}",
        prompt=request["prompt_token_ids"],
        reply=request["output_token_ids"],
        lora=(loras or {}).get(body.get("model", "")),
        salt=body.get("cache_salt"),
    )


def play(engine: Engine, *requests: Submission, later: Sequence[Submission] = ()) -> list[list[dict[str, Any]]]:
    """Run requests to their end and return the published batches, decoded; `later` arrive during the first step."""
    published = []
    arrivals = [(0.0, request) for request in requests] + [(1e-6, request) for request in later]
    for _, outcome in run(engine, arrivals):
        if outcome.events:
            published.append(msgspec.msgpack.decode(encode_batch(outcome.events, 0.0))[1])
    return published


def replay(captures: Path, names: list[str]) -> tuple[list[Any], list[Any]]:
    """Play the requests of consecutive recordings of one engine, one after the other."""
    expected, published = [], []
    engine = engine_like(meta(captures, names[0]))
    for name in names:
        sidecar = meta(captures, name)
        loras = {
            lora: Lora(lora, path, number)
            for number, (lora, path) in enumerate(sidecar.get("lora_paths", {}).items(), 1)
        }
        for number, request in enumerate(sidecar["requests"]):
            if "prompt_token_ids" in request:
                published += play(engine, submission(request, number, loras))
            else:
                assert engine.reset_prefix_cache()
        expected += batches(captures / f"{name}.jsonl")
    return expected, published


@pytest.mark.parametrize(
    "names",
    [
        ["a_prefill_decode_b16", "b1_prefix_hit_b16", "b2_multi_turn_chat_b16", "k_chunked_prefill_b16"],
        ["a2_exact_block_end_b16"],
        ["c1_eviction_b16", "c2_duplicate_then_evict_b16"],
        ["d2_reset_idle_then_request_b16"],
        ["e1_cache_salt_b16"],
        ["e2_lora_b16"],
        ["f_sha256_cbor_b16"],
        ["f_xxhash_b64"],
        ["f_xxhash_cbor_b128"],
        ["f_sha256_b64_noseed"],
    ],
    ids=lambda names: "+".join(names),
)
def test_batches_equal_the_recorded_ones(shared: Path, names: list[str]) -> None:
    expected, published = replay(shared / "captures", names)
    assert published == expected


def test_eighty_requests_with_evictions_and_a_reset_equal_the_recorded_stream(shared: Path) -> None:
    captures = shared / "captures"
    sidecar = meta(captures, "r_workload_truth_b16")
    engine = engine_like(sidecar)
    published, wrong = [], []
    for number, request in enumerate(sidecar["requests"]):
        if "prompt_token_ids" not in request:
            assert engine.reset_prefix_cache()
            continue
        sequence_id = f"r{number}"
        hits = engine.counters.prefix_hits
        published += play(engine, submission(request, number))
        if engine.counters.prefix_hits - hits != request["cached_tokens"]:
            wrong.append(sequence_id)
    assert wrong == []
    assert published == batches(captures / "r_workload_truth_b16.jsonl")


def test_three_equal_prompts_at_once_are_stored_once(shared: Path) -> None:
    captures = shared / "captures"
    sidecar = meta(captures, "l_duplicate_concurrent_b16")
    requests = [submission(request, number) for number, request in enumerate(sidecar["requests"])]
    assert play(engine_like(sidecar), *requests) == batches(captures / "l_duplicate_concurrent_b16.jsonl")


def test_preempted_requests_publish_what_the_real_engine_published(shared: Path) -> None:
    captures = shared / "captures"
    sidecar = meta(captures, "j_preemption_b16")
    first, *rest = [submission(request, number) for number, request in enumerate(sidecar["requests"])]
    engine = engine_like(sidecar)
    published = play(engine, first, later=rest)
    assert engine.counters.preemptions == 3
    assert published == batches(captures / "j_preemption_b16.jsonl")


def test_a_transferred_prompt_is_stored_like_a_computed_one(shared: Path) -> None:
    captures = shared / "captures"
    sidecar = meta(captures, "q_nixl_decode_b16")
    engine = engine_like(sidecar)
    published = []
    for number, request in enumerate(sidecar["requests"]):
        pull = bool(request["body"].get("kv_transfer_params"))
        sequence = engine.submit(msgspec.structs.replace(submission(request, number), source=pull or None), 0.0)
        while engine.busy:
            step = engine.begin_step(0.0)
            assert step is not None
            events = engine.finish_step(step).events
            if events:
                published.append(msgspec.msgpack.decode(encode_batch(events, 0.0))[1])
            for load in engine.take_loads():
                engine.loaded(load.id)
        assert sequence.finish_reason == "length"
    assert published == batches(captures / "q_nixl_decode_b16.jsonl")
