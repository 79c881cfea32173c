"""What tokenization costs, against `tokenizers` on the whole prompt in the same run: `python -m bench.bench_tokenization`.

Ratios travel between machines, absolute figures do not. docs/tokenization.md has a recorded run. CPU is that of the whole
process (`process_time`), so a library that spreads work over threads gains nothing.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from indexer.block_key import block_keys, root_key
from tokenization.backends import LocalBackend
from tokenization.local import LocalTokenizer
from tokenization.model_files import read_model_files
from tokenization.segments import KeyChainCache

MODEL = Path(__file__).resolve().parent.parent / "configs" / "models" / "qwen3"
CHAT = "/v1/chat/completions"
Body = dict[str, Any]

WORDS = """
    cache block token engine router prefix the of and a that which keeps moves because latency queue memory request
    answer before after every under without measure table column value server client stream event sequence
""".split()  # noqa: SIM905  (a list of words reads better than a list of strings)
CODE = "def step(state: int, key: str = '') -> dict[str, int]:\n    return {key: state + 1, 'n': len(key)}\n"
OTHER = [
    "缓存命中率取决于前缀是否完全相同。",
    "Größe und Übergänge prüfen.",
    "これはテストです。",
    "👍🏽🚀 ",
    '{"a": [1, 2.5, null]}\n',
]


def prose(draw: random.Random, tokens: int) -> str:
    """About so many tokens of English, with some code, JSON and other scripts in it; new text for every `draw`."""
    parts: list[str] = []
    count = 0
    while count < tokens:
        kind = draw.random()
        if kind < 0.85:
            sentence = " ".join(draw.choices(WORDS, k=14))
            parts.append(f"{sentence.capitalize()} {draw.randrange(10**6)}. ")
            count += 20
        elif kind < 0.93:
            parts.append(CODE.replace("key", f"k{draw.randrange(10**5)}"))
            count += 40
        else:
            parts.append(draw.choice(OTHER))
            count += 12
    return "".join(parts)


def cpu_s(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


class Whole:
    """The usual way: render, then `tokenizers` on the whole text, then the keys of all blocks."""

    def __init__(self, local: LocalTokenizer, tokenizer: tokenizers.Tokenizer) -> None:
        self._local, self._tokenizer = local, tokenizer

    def ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def turn(self, messages: list[Body], root: int) -> list[int]:
        return block_keys(root, np.array(self.ids(self._local.render_chat(messages)), dtype=np.uint32), 16)


def grown_chat(local: LocalTokenizer, whole: Whole, turns: int, tokens: int) -> dict[str, float]:
    """A chat that grows to `tokens` over `turns`: CPU of the last turns, tokenization alone and with block keys."""
    draw = random.Random(11)
    root = root_key("bench")
    keys = KeyChainCache(block_keys)
    each = tokens // (2 * turns)
    messages: list[Body] = [{"role": "system", "content": prose(draw, 400)}]
    ours: list[float] = []
    theirs: list[float] = []
    encode: list[float] = []
    render: list[float] = []
    prompt_tokens = 0
    for turn in range(turns):
        messages.append({"role": "user", "content": prose(draw, each)})
        body = {"messages": messages}

        def incremental(body: Body = body) -> list[int]:
            result = local.tokenize(CHAT, body)
            return keys.keys(result.token_ids, result.boundaries, root, 16)

        ours.append(cpu_s(incremental))
        text = local.render_chat(messages)
        render.append(cpu_s(lambda: local.render_chat(messages)))
        encode.append(cpu_s(lambda text=text: whole.ids(text)))  # type: ignore[misc]
        theirs.append(cpu_s(lambda: whole.turn(messages, root)))
        if turn in (0, turns - 1):
            assert incremental() == whole.turn(messages, root)
            prompt_tokens = len(local.tokenize(CHAT, body).token_ids)
        messages.append({"role": "assistant", "content": prose(draw, each)})
    last = slice(-5, None)
    return {
        "prompt_tokens": prompt_tokens,
        "ours_ms": 1e3 * statistics.median(ours[last]),
        "whole_encode_ms": 1e3 * statistics.median(encode[last]),
        "whole_all_ms": 1e3 * statistics.median(theirs[last]),
        "render_ms": 1e3 * statistics.median(render[last]),
    }


def fresh_prompt(local: LocalTokenizer, whole: Whole, tokens: int, repeats: int = 7) -> dict[str, float]:
    """One long message that nobody has seen: CPU of encoding it."""
    draw = random.Random(12)
    ours, theirs, counts = [], [], []
    for _ in range(repeats):
        messages = [{"role": "user", "content": prose(draw, tokens)}]
        text = local.render_chat(messages)
        ours.append(cpu_s(lambda m=messages: local.tokenize(CHAT, {"messages": m})))  # type: ignore[misc]
        theirs.append(cpu_s(lambda t=text: whole.ids(t)))  # type: ignore[misc]
        counts.append(len(local.encode(text)))
    return {
        "prompt_tokens": statistics.median(counts),
        "ours_ms": 1e3 * statistics.median(ours),
        "whole_encode_ms": 1e3 * statistics.median(theirs),
    }


async def beside_big(local: LocalTokenizer, seconds: float, big: bool) -> dict[str, float]:
    """Latency of small requests (a 300-token chat, 100 a second), alone or while 512 KB ones arrive 5 a second."""
    backend = LocalBackend(local)
    draw = random.Random(13)
    await backend.tokenize(CHAT, {"messages": [{"role": "user", "content": "warm"}]}, size=1)
    latencies: list[float] = []
    late: list[float] = []
    pending: set[asyncio.Task[Any]] = set()

    async def one(body: Body, size: int, into: list[float] | None) -> None:
        start = time.perf_counter()
        await backend.tokenize(CHAT, body, size=size)
        if into is not None:
            into.append(time.perf_counter() - start)

    def launch(body: Body, size: int, into: list[float] | None) -> None:
        task = asyncio.create_task(one(body, size, into))
        pending.add(task)
        task.add_done_callback(pending.discard)

    bigs = [{"messages": [{"role": "user", "content": prose(draw, 110_000)}]} for _ in range(6)]
    smalls = [{"messages": [{"role": "user", "content": prose(draw, 300)}]} for _ in range(200)]
    tick = 0
    end = time.perf_counter() + seconds
    while (now := time.perf_counter()) < end:
        launch(smalls[tick % len(smalls)], 1_500, latencies)
        if big and tick % 20 == 0:
            body = bigs[(tick // 20) % len(bigs)]
            # A new first word makes it a text that the cache has not seen.
            content = f"{draw.random()} {body['messages'][0]['content']}"
            launch({"messages": [{"role": "user", "content": content}]}, 512 * 1024, None)
        tick += 1
        await asyncio.sleep(max(0.0, 0.01 - (time.perf_counter() - now)))
        late.append(time.perf_counter() - now - 0.01)
    await asyncio.gather(*pending)
    await backend.close()
    ranked = sorted(latencies)
    return {
        "requests": len(ranked),
        "p50_ms": 1e3 * ranked[len(ranked) // 2],
        "p99_ms": 1e3 * ranked[int(len(ranked) * 0.99)],
        "loop_late_p99_ms": 1e3 * sorted(late)[int(len(late) * 0.99)],
    }


def show(title: str, figures: dict[str, float], ratios: dict[str, float]) -> None:
    print(f"{title}: " + ", ".join(f"{name} {value:,.2f}" for name, value in figures.items()))
    for name, value in ratios.items():
        print(f"    {name}: {value:.1f} x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="a model's directory")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each latency run")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    local = LocalTokenizer.from_directory(options.model)
    whole = Whole(local, tokenizers.Tokenizer.from_str(read_model_files(options.model).tokenizer))
    whole.ids("warm")
    turns, tokens, fresh = (5, 3_000, 2_000) if options.quick else (50, 40_000, 32_000)
    chat = grown_chat(local, whole, turns, tokens)
    show(
        f"turn {turns} of a chat",
        chat,
        {
            "less CPU than tokenizers' encode of the whole prompt (ours: parse, render, encode and block keys)": (
                chat["whole_encode_ms"] / chat["ours_ms"]
            ),
            "less CPU than render, whole encode and all block keys": chat["whole_all_ms"] / chat["ours_ms"],
        },
    )
    prompt = fresh_prompt(local, whole, fresh, 3 if options.quick else 7)
    show("fresh prompt", prompt, {"less CPU than tokenizers": prompt["whole_encode_ms"] / prompt["ours_ms"]})
    seconds = 1.0 if options.quick else options.seconds
    alone = asyncio.run(beside_big(local, seconds, big=False))
    beside = asyncio.run(beside_big(local, seconds, big=True))
    show("small requests alone", alone, {})
    show("small requests beside 512 KB ones", beside, {"p99 against alone": beside["p99_ms"] / alone["p99_ms"]})


if __name__ == "__main__":
    main()
