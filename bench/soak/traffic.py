"""Requests of every kind that a gateway meets: most are turns of chats, some are bad, long, of unknown models, or given up."""

import asyncio
import json
import random
from collections import Counter
from typing import Any

import aiohttp
import msgspec

from bench.overhead import WORDS
from gateway.demo_setup import MODEL

PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
BROKEN = (b"{", b'{"model": 5}', b"\xff\xfe", json.dumps({"model": MODEL, "messages": 7}).encode())
CHATS, TURNS = 40, 6
AT_ONCE = 60
"""Requests in flight at most: the clients wait for an overloaded machine."""
ENGINE = "x-sim-engine"
"""What a simulated engine answers itself has this header."""
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


class Reply(msgspec.Struct, frozen=True):
    """Of a request that was answered with 200."""

    headers: Any
    text: str
    cached: int | None
    """As the engine reported."""


class Traffic:
    def __init__(self, url: str, session: aiohttp.ClientSession, dice: random.Random) -> None:
        self.answers: Counter[str] = Counter()
        """Statuses, and what clients saw instead of one."""
        self.failures: list[str] = []
        """Answers of 5xx that are neither an engine's nor Envoy's about an engine that was killed."""
        self.chats: list[list[dict[str, str]]] = []
        self._url, self._session, self._dice = url, session, dice

    async def run(self, rate: float, ends: float) -> None:
        """`rate` requests a second until the loop's time `ends`, and until all are answered."""
        running: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as group:
            while asyncio.get_running_loop().time() < ends:
                await asyncio.sleep(self._dice.expovariate(rate))
                if len(running) < AT_ONCE:
                    running.add(task := group.create_task(self._one()))
                    task.add_done_callback(running.discard)

    async def ask(self, body: dict[str, Any] | bytes, path: str = CHAT, leave_s: float | None = None) -> Reply | None:
        """None where it was not answered with 200, or given up after `leave_s`."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            async with asyncio.timeout(leave_s or 120.0):
                headers = {"content-type": "application/json"}
                async with self._session.post(self._url + path, data=raw, headers=headers) as answer:
                    text, usage = await _read(answer)
        except TimeoutError:
            self.answers["left" if leave_s else "timeout"] += 1
            return None
        except (aiohttp.ClientError, ConnectionError, msgspec.DecodeError) as error:
            self.answers[type(error).__name__] += 1
            return None
        self.answers[str(answer.status)] += 1
        ended_by_mischief = ENGINE in answer.headers or text.startswith("upstream connect error")
        if answer.status >= 500 and not ended_by_mischief and len(self.failures) < 20:
            self.failures.append(f"{answer.status} {text[:200]}")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return Reply(answer.headers, text, cached) if answer.status == 200 else None

    async def _one(self) -> None:
        dice, kind = self._dice, self._dice.random()
        body: dict[str, Any] = {"model": MODEL, "max_tokens": dice.randint(2, 40), "stream": dice.random() < 0.6}
        if body["stream"] and dice.random() < 0.8:
            body["stream_options"] = {"include_usage": True}
        if kind < 0.08:
            await self.ask({**body, "prompt": self._prose(dice.randint(5, 120))}, COMPLETION)
        elif kind < 0.11:
            await self.ask({**body, "prompt": [dice.randrange(1000, 2000) for _ in range(200)]}, COMPLETION)
        elif kind < 0.15:
            await self.ask(dice.choice(BROKEN))
        elif kind < 0.19:
            await self.ask({**body, "model": f"no-{dice.randrange(10**6)}", "messages": [_user("Hi")]})
        elif kind < 0.21:
            image = [{"type": "text", "text": self._prose(20)}, {"type": "image_url", "image_url": {"url": PIXEL}}]
            await self.ask({**body, "messages": [{"role": "user", "content": image}]})
        elif kind < 0.22:
            await self.ask({**body, "messages": [_user(self._prose(2500))]})
        else:
            await self._turn(body, leave_s=dice.uniform(0.01, 0.4) if kind < 0.32 else None)

    async def _turn(self, body: dict[str, Any], leave_s: float | None) -> None:
        dice, chats = self._dice, self.chats
        if len(chats) < CHATS:
            chats.append([_user(self._prose(dice.randint(20, 150)))])
        elif dice.random() < 0.1:
            chats[dice.randrange(CHATS)] = [_user(self._prose(dice.randint(20, 150)))]
        chat = dice.choice(chats)
        if (reply := await self.ask({**body, "messages": list(chat)}, leave_s=leave_s)) and reply.text:
            chat += [{"role": "assistant", "content": reply.text}, _user(self._prose(dice.randint(3, 30)))]
            if len(chat) > 2 * TURNS:
                del chat[2:]

    def _prose(self, words: int) -> str:
        return " ".join(f"{self._dice.choice(WORDS)} {self._dice.randrange(999)}" for _ in range(words))


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def _read(answer: aiohttp.ClientResponse) -> tuple[str, dict[str, Any]]:
    """Text and usage, of whatever it is."""
    if answer.content_type != "text/event-stream":
        raw = await answer.read()
        usage = msgspec.json.decode(raw).get("usage") if answer.content_type == "application/json" else None
        return raw.decode(errors="replace") if answer.status != 200 else "", usage or {}
    text, usage = "", None
    async for line in answer.content:
        if line.startswith(b"data: {"):
            chunk = msgspec.json.decode(line[6:])
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", ())[:1]:
                text += choice.get("delta", {}).get("content") or ""
    return text, usage or {}
