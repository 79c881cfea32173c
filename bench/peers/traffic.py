"""The traffic of one run: a fixed number of users in a closed loop, each with conversations of its own.

A user waits for the reply, thinks, and asks the next question; a question that failed is asked again after another pause,
as people do. So every router gets the same questions with the same histories, however long it takes.
"""

import asyncio
import time
from collections import Counter

import aiohttp
import msgspec

from gateway.demo_setup import MODEL
from gateway.demo_traffic import Conversation, Observation, Shape, ask, plan

PATIENCE_S = 15.0
"""After this a client gives up on a request."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt. Seconds since the run began. `returned`: did a follow-up turn meet its history; None for first turns."""

    began_s: float
    ended_s: float
    conversation: int
    returned: bool | None
    seen: Observation

    @property
    def failed(self) -> str | None:
        """The kind of failure, short enough to be counted."""
        return None if self.seen.error is None else self.seen.error.partition(":")[0]


class Traffic:
    """`users` share the conversations of `shape`, whose own starting times are not used."""

    def __init__(self, url: str, shape: Shape, users: int, limit_s: float) -> None:
        """`limit_s`: after so long users stop trying, and the run is incomplete."""
        self._url = url
        conversations = list(enumerate(plan(shape)))
        self._users = [conversations[user::users] for user in range(users)]
        self._limit_s = limit_s
        self._planned = shape.requests
        self._started = 0.0
        self._answered = 0
        self.answers: list[Answer] = []

    @property
    def complete(self) -> bool:
        return self._answered == self._planned

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._started

    async def run(self, session: aiohttp.ClientSession) -> None:
        self._started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for conversations in self._users:
                group.create_task(self._user(session, conversations))

    async def reached(self, share: float) -> None:
        """Wait until this share of all questions is answered (or nobody tries any more)."""
        goal = share * self._planned
        while self._answered < goal and self.now() < self._limit_s:  # noqa: ASYNC110 - looked at now and then is enough
            await asyncio.sleep(0.02)

    def busiest(self) -> str:
        """The engine that answered most so far; the first by name among equals."""
        served = Counter(answer.seen.engine for answer in self.answers if answer.failed is None)
        return min(served, key=lambda name: (-served[name], name))

    async def _user(self, session: aiohttp.ClientSession, mine: list[tuple[int, Conversation]]) -> None:
        for number, conversation in mine:
            messages = [{"role": "system", "content": conversation.system}]
            home: str | None = None
            for turn, (text, pause_s) in enumerate(zip(conversation.turns, conversation.pauses_s, strict=True)):
                messages.append({"role": "user", "content": text})
                while True:
                    await asyncio.sleep(pause_s)
                    if self.now() > self._limit_s:
                        return
                    began_s = self.now()
                    seen, reply = await _ask(session, self._url, messages, turn)
                    returned: bool | None = None if home is None or seen.error else seen.engine == home
                    self.answers.append(
                        Answer(began_s=began_s, ended_s=self.now(), conversation=number, returned=returned, seen=seen)
                    )
                    if seen.error is None:
                        break
                self._answered += 1
                home = seen.engine
                messages.append({"role": "assistant", "content": reply})


async def _ask(
    session: aiohttp.ClientSession, url: str, messages: list[dict[str, str]], turn: int
) -> tuple[Observation, str]:
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await ask(session, url, MODEL, messages, turn)
    except TimeoutError:
        return Observation(turn=turn, error=f"no answer in {PATIENCE_S:.0f} s"), ""
    except (
        msgspec.DecodeError,
        KeyError,
        TypeError,
    ) as error:  # a stream that was cut within a chunk, and ended politely
        return Observation(turn=turn, error=f"garbled stream: {error!r}"), ""
