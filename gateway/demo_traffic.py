"""Multi-turn chats as a demo sends them: groups that share a system prompt, conversations that grow by their replies.

The plan depends on a seed only and the engines' replies on the prompts only, so that the same prompts are sent whatever
routes them. A conversation waits for its reply and thinks before it goes on, as people do.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence

import aiohttp
import msgspec

from gateway.http_errors import reason

_VOCABULARY = (
    "account address answer archive balance batch border bridge budget cache carrier case channel check claim "
    "client close copy core cost credit cycle data date delay delivery detail device draft driver edge entry error "
    "event export field file filter final flow form frame goal group handler header history host image import index "
    "input invoice issue item journey label layer ledger letter level limit line link list local lookup machine "
    "manual map market measure member memory message method minute model module month network node note notice "
    "number object offer office option order origin output owner package page parcel partner path pattern payment "
    "phase phone plan point policy port position price print process product profile project proof purpose quality "
    "quarter query queue range rate reader reason receipt record refund region release report request reserve "
    "result return review route rule sample scale schedule scope search season section segment seller sender series "
    "server service session shape share shift signal size slot source space stage standard state status step stock "
    "storage store stream street subject summary supply support surface system table target task team term test "
    "text thread ticket time title token topic total track trade traffic transfer trend unit update user value "
    "vendor version view volume voucher warehouse warning week weight window word work writer zone "
)
_WORDS = _VOCABULARY.split()


class Conversation(msgspec.Struct, frozen=True):
    """One chat: when it begins, its system prompt, what the user says in each turn, and the pauses before each turn."""

    starts_s: float
    system: str
    turns: tuple[str, ...]
    pauses_s: tuple[float, ...]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The size of the traffic. A conversation opens with a document; words come to about 1.1 tokens each."""

    requests: int = 240
    turns: int = 6
    groups: int = 10
    system_words: int = 1200
    document_words: int = 2600
    user_words: int = 160
    spread_s: float = 18.0
    pause_s: float = 1.6
    seed: int = 7


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the client saw it; tokens as the engine reported them. `error`: why nothing else is known."""

    turn: int
    engine: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reply_tokens: int = 0
    predicted_tokens: int | None = None
    ttft_s: float = 0.0
    total_s: float = 0.0
    error: str | None = None


def plan(shape: Shape) -> list[Conversation]:
    """The conversations, about `shape.requests` requests in all, in order of their beginning."""
    dice = random.Random(shape.seed)
    systems = [f"You are assistant number {g}. {_prose(dice, shape.system_words)}" for g in range(shape.groups)]
    conversations: list[Conversation] = []
    left = shape.requests
    while left > 0:
        turns = min(shape.turns, left)
        left -= turns
        questions = [_prose(dice, dice.randint(shape.user_words // 3, shape.user_words)) for _ in range(turns)]
        questions[0] = _prose(dice, dice.randint(shape.document_words // 2, shape.document_words)) + questions[0]
        conversations.append(
            Conversation(
                starts_s=dice.uniform(0, shape.spread_s),
                system=systems[len(conversations) % shape.groups],
                turns=tuple(questions),
                pauses_s=tuple(dice.uniform(0.5, 1.5) * shape.pause_s for _ in range(turns)),
            )
        )
    return sorted(conversations, key=lambda conversation: conversation.starts_s)


async def drive(
    url: str, model: str, conversations: Sequence[Conversation], seen: Callable[[Observation], None]
) -> list[Observation]:
    """Run all conversations against an OpenAI server; `seen` is called with each observation as it is made."""
    observations: list[Observation] = []

    def note(observation: Observation) -> None:
        observations.append(observation)
        seen(observation)

    async with client_session() as session, asyncio.TaskGroup() as group:
        for conversation in conversations:
            group.create_task(_converse(session, url, model, conversation, note))
    return observations


def client_session() -> aiohttp.ClientSession:
    """A session without a limit on connections: a queue in the client would count as the server's time."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=60))


async def _converse(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    conversation: Conversation,
    note: Callable[[Observation], None],
) -> None:
    await asyncio.sleep(conversation.starts_s)
    messages = [{"role": "system", "content": conversation.system}]
    for turn, (text, pause_s) in enumerate(zip(conversation.turns, conversation.pauses_s, strict=True)):
        if turn:
            await asyncio.sleep(pause_s)
        messages.append({"role": "user", "content": text})
        observation, reply = await ask(session, url, model, messages, turn)
        note(observation)
        if observation.error is not None:
            return  # the rest would not be what was planned
        messages.append({"role": "assistant", "content": reply})


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    messages: list[dict[str, str]],
    turn: int = 0,
    max_tokens: int = 256,
) -> tuple[Observation, str]:
    """One streamed chat completion: what was observed, and the reply's text."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, usage, first_s = "", None, 0.0
    started = time.perf_counter()
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                answer = (await response.text())[:300]
                return Observation(turn=turn, error=f"HTTP {response.status}: {answer}"), ""
            headers = response.headers
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                if not first_s:
                    first_s = time.perf_counter() - started
                chunk = msgspec.json.decode(line[6:])
                if "error" in chunk:
                    return Observation(turn=turn, error=chunk["error"]["message"]), ""
                if chunk["choices"]:
                    text += chunk["choices"][0]["delta"].get("content", "")
                usage = chunk.get("usage") or usage
    except (aiohttp.ClientError, TimeoutError) as error:
        return Observation(turn=turn, error=f"{type(error).__name__}: {reason(error)}"), ""
    if usage is None:
        return Observation(turn=turn, error="the stream ended without usage"), ""
    predicted = headers.get("x-warmroute-predicted-cached-tokens", "")
    observation = Observation(
        turn=turn,
        engine=headers.get("x-sim-engine", "?"),
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        reply_tokens=usage["completion_tokens"],
        predicted_tokens=int(predicted) if predicted.isdecimal() else None,
        ttft_s=first_s,
        total_s=time.perf_counter() - started,
    )
    return observation, text


def _prose(dice: random.Random, words: int) -> str:
    """Sentences of random words."""
    sentences = []
    while words > 0:
        length = min(words, dice.randint(6, 14))
        words -= length
        sentences.append(" ".join(dice.choices(_WORDS, k=length)).capitalize() + ".")
    return " ".join(sentences)
