"""Hand-offs with SGLang's rendezvous, against real sockets; NIXL's are in tests/e2e/test_prefill_decode.py."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from fleet.books import Books
from fleet.breaker import Breaker, BreakerSettings
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from fleet.request import Request
from gateway.config_document import Handoff
from gateway.cycle import Decision, Run
from gateway.departure import Departures, Placed
from gateway.extproc.decision import ABORTED_UNSENT, Decided, Head
from gateway.handoff import Handoffs
from gateway.metrics import Metrics
from gateway.prefill_leg import LegFailed, PrefillLegs

BODY = json.dumps({"model": "m", "messages": [], "stream": True}).encode()
HEAD = Head(
    method="POST",
    path="/v1/chat/completions?x=1",
    headers={"content-type": "application/json", "host": "front", "content-length": "9", "x-session-id": "s"},
    request_id="r",
)


SOURCE = "x-kv-cache-source-host-port"


class Observer:
    def __init__(self) -> None:
        self.ends: list[str] = []

    def response_headers(self, status: int, headers: Any, served: str | None) -> None: ...
    def response_chunk(self, data: bytes) -> None: ...
    def finished(self) -> None:
        self.ends.append("finished")

    def aborted(self, reason: str) -> None:
        self.ends.append(reason)


class Prefiller:
    """An SGLang prefill engine: answers when somebody met it in the room."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.asked: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.met = asyncio.Event()
        self.cancelled = 0
        self.status = 200

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(({k.lower(): v for k, v in request.headers.items()}, json.loads(await request.read())))
        try:
            await self.met.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return web.json_response({}, status=self.status)


class World:
    """Slot 0 decodes, slots 1 and 2 prefill; a request was just decided for 0 and 1."""

    def __init__(self, free_port: Callable[[], int], **settings: Any) -> None:
        self.prefillers = [Prefiller(free_port()), Prefiller(free_port())]
        self.fleet = Fleet()
        addresses = ["10.0.0.1:8000", *(f"127.0.0.1:{it.port}" for it in self.prefillers)]
        for number, address in enumerate(addresses):
            labels = {"bootstrap-port": "9000"} if number == 1 else {}
            self.fleet.add(Endpoint(name=str(number), address=address, labels=labels))
        self.books = Books(self.fleet)
        self.metrics = Metrics(CollectorRegistry())
        self.legs = PrefillLegs()
        handoffs = Handoffs(
            Handoff(mode="gateway", connector="sglang", **settings),
            self.legs, self.fleet, self.books, Breaker(self.fleet), self.metrics, lambda: 1.0, tell_clients=True,
        )  # fmt: skip
        self.departures = Departures(self.metrics, handoffs)
        self.observer = Observer()
        self._runners: list[web.AppRunner] = []

    async def serve(self, *numbers: int) -> None:
        for number in numbers:
            app = web.Application()
            app.router.add_post("/v1/chat/completions", self.prefillers[number].answer)
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            self._runners.append(runner)
            await web.TCPSite(runner, "127.0.0.1", self.prefillers[number].port).start()

    async def close(self) -> None:
        await self.legs.close()
        for runner in self._runners:
            await runner.cleanup()

    async def leave(self, source: str = "") -> Decided:
        """`source`: where a p2p-source-producer says that the prefill endpoint can pull from."""
        self.books.reserve("r", 0, 0, 400, 0.0, cached_tokens=100, fetched_tokens=100)
        self.books.reserve("r", 1, 100, 1, 0.0, prefill_only=True)
        slots = np.array([1, 2], np.intp)
        run = Run("prefill", [], slots, [], np.array([2.0, 1.0]), slots[:1])
        decision = Decision(
            primary="decode", slots=(0,), destinations=("10.0.0.1:8000",),
            headers={"x-prefiller-host-port": "x", **({SOURCE: source} if source else {})}, response_headers={},
            picks={"decode": np.array([0]), "prefill": slots[:1]}, runs={"prefill": run}, verdicts={}, prefill=1,
        )  # fmt: skip
        placed = Placed(
            request=Request(id="r", model="m", target_model="m", path=HEAD.path, prompt_tokens=100),
            decision=decision, destination=decision.destinations, observer=self.observer,
            set_headers={**decision.headers, "traceparent": "00-t"},
        )  # fmt: skip
        return await self.departures.leave(HEAD, BODY, json.loads(BODY), None, placed)

    def count(self, outcome: str, reason: str) -> float:
        labels = {"outcome": outcome, "reason": reason}
        return self.metrics.registry.get_sample_value("warmroute_handoffs_total", labels) or 0.0

    async def until(self, true: Callable[[], object]) -> None:
        for _ in range(500):
            if true():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("did not become true within 5 s")


@pytest.fixture
async def world(free_port: Callable[[], int]) -> AsyncIterator[World]:
    made = World(free_port)
    yield made
    await made.close()


async def test_without_any_prefill_engine_the_decode_endpoint_gets_the_clients_body(world: World) -> None:
    decided = await world.leave()
    assert decided.body is None
    assert decided.response_headers == {"x-warmroute-handoff": "local: connect"}
    assert world.count("local", "connect") == 1
    assert world.fleet.in_flight[:3].tolist() == [1, 0, 0]
    assert world.fleet.in_flight_tokens[:3].tolist() == [100, 0, 0]


async def test_another_prefill_engine_is_tried_where_the_first_is_dead(world: World) -> None:
    await world.serve(1)
    decided = await world.leave()
    assert decided.body is not None
    assert json.loads(decided.body)["bootstrap_port"] == 8998
    assert world.fleet.in_flight[:3].tolist() == [1, 0, 1]
    world.prefillers[1].met.set()
    await world.until(lambda: world.fleet.in_flight[2] == 0)


async def test_a_leg_that_fails_after_the_decode_leg_left_is_counted(world: World) -> None:
    await world.serve(0)
    world.prefillers[0].status = 500
    await world.leave()
    world.prefillers[0].met.set()
    await world.until(lambda: world.count("broken", "server_error"))
    assert world.fleet.in_flight[:3].tolist() == [1, 0, 0]


async def test_a_client_that_leaves_later_ends_the_prefill_leg(world: World) -> None:
    await world.serve(0)
    decided = await world.leave()
    assert decided.observer is not None
    await world.until(lambda: world.prefillers[0].asked)
    decided.observer.aborted("ended-before-response")
    await world.until(lambda: world.prefillers[0].cancelled)
    assert world.observer.ends == ["ended-before-response"]


async def test_whoever_gives_up_while_a_leg_is_sent_is_released(free_port: Callable[[], int]) -> None:
    world = World(free_port)
    hanging = asyncio.Event()

    async def never(*_: Any, **__: Any) -> bytes:
        hanging.set()
        await asyncio.sleep(60)
        return b""

    world.legs.send = never  # type: ignore[method-assign]
    leaving = asyncio.create_task(world.leave())
    await hanging.wait()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert world.observer.ends == [ABORTED_UNSENT]


async def test_who_fails_to_hand_over_leaves_no_source_behind(world: World) -> None:
    decided = await world.leave(source="10.0.0.1:8000")  # the decode endpoint, which now computes the prompt itself
    assert decided.response_headers == {"x-warmroute-handoff": "local: connect"}
    assert SOURCE not in decided.set_headers


async def test_another_prefill_engine_is_not_told_to_pull_from_itself(world: World) -> None:
    await world.serve(1)
    await world.leave(source=f"127.0.0.1:{world.prefillers[1].port}")
    await world.until(lambda: world.prefillers[1].asked)
    assert SOURCE not in world.prefillers[1].asked[0][0]


async def test_the_source_is_told_to_the_prefill_leg_alone(world: World) -> None:
    await world.serve(0)
    decided = await world.leave(source="10.0.0.1:8000")
    await world.until(lambda: world.prefillers[0].asked)
    assert world.prefillers[0].asked[0][0][SOURCE] == "10.0.0.1:8000"
    assert SOURCE not in decided.set_headers


async def test_both_legs_leave_at_once_and_know_the_same_room(world: World) -> None:
    await world.serve(0)
    decided = await world.leave()
    assert decided.body is not None
    await world.until(lambda: world.prefillers[0].asked)
    [(headers, first)] = world.prefillers[0].asked
    assert first == json.loads(decided.body)
    assert {**first, "bootstrap_room": 0} == {
        **json.loads(BODY), "bootstrap_host": "127.0.0.1", "bootstrap_port": 9000, "bootstrap_room": 0,
    }  # fmt: skip
    assert 0 <= first["bootstrap_room"] < 2**63
    assert (headers["x-request-id"], headers["traceparent"], headers["x-session-id"]) == ("r", "00-t", "s")
    assert headers["host"] != "front"
    assert "x-prefiller-host-port" not in {**headers, **decided.set_headers}
    assert world.count("transferred", "ok") == 1
    world.prefillers[0].met.set()
    await world.until(lambda: world.fleet.in_flight[1] == 0)
    assert world.fleet.in_flight[0] == 1


# NIXL, with an engine's answers made up.


class Answers:
    """Instead of PrefillLegs: what `send` gives or raises, after `meanwhile`."""

    def __init__(self, answer: bytes | Exception, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.answer, self.meanwhile = answer, meanwhile

    async def send(self, *_: Any, **__: Any) -> bytes:
        await asyncio.sleep(0)
        self.meanwhile()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def nixl(world: World, answers: Answers) -> Handoffs:
    handoffs = world.departures.handoffs
    assert handoffs is not None
    handoffs.settings = Handoff(mode="gateway")
    world.legs.send = answers.send  # type: ignore[method-assign]
    return handoffs


USABLE = json.dumps(
    {
        "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "h"},
        "usage": {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 50}},
    }
).encode()
DEEP = b'{"usage": ' + b"[" * 200_000 + b"]" * 200_000 + b', "kv_transfer_params": {"do_remote_prefill": true}}'


@pytest.mark.parametrize("answer", [b"", b"[]", b"\xff", b"<html>", DEEP, b'{"kv_transfer_params": "x"}'])
async def test_garbage_is_an_answer_without_parameters(world: World, answer: bytes) -> None:
    nixl(world, Answers(answer))
    decided = await world.leave()
    assert decided.response_headers == {"x-warmroute-handoff": "local: no_transfer_params"}
    assert "x-prefiller-host-port" not in decided.set_headers
    assert world.fleet.in_flight_tokens[:3].tolist() == [100, 0, 0]


async def test_what_nobody_expected_of_a_leg_is_local_too(world: World) -> None:
    nixl(world, Answers(RuntimeError("Session is closed")))
    decided = await world.leave()
    assert decided.response_headers == {"x-warmroute-handoff": "local: internal"}
    assert "x-prefiller-host-port" not in decided.set_headers
    assert world.fleet.in_flight_tokens[:3].tolist() == [100, 0, 0]


@pytest.mark.parametrize("again", [False, True])
async def test_a_prefill_endpoint_that_leaves_the_fleet_while_its_leg_runs_has_done_its_work(
    world: World, again: bool
) -> None:
    def leave() -> None:
        world.fleet.remove(1)
        world.fleet.release(1)
        if again:
            assert world.fleet.add(Endpoint(name="other", address="10.0.0.9:8000")) == 1

    nixl(world, Answers(USABLE, leave))
    address = world.fleet.endpoint(1).address
    decided = await world.leave()
    assert decided.response_headers == {"x-warmroute-handoff": f"transferred from {address}"}
    assert decided.body is not None
    assert json.loads(decided.body)["kv_transfer_params"]["remote_host"] == "h"


async def test_a_failed_leg_is_nothing_against_who_has_the_slot_now(world: World) -> None:
    def replaced() -> None:
        world.fleet.remove(1)
        world.fleet.release(1)
        world.fleet.add(Endpoint(name="other", address="10.0.0.9:8000"))

    handoffs = nixl(world, Answers(LegFailed("connect", "gone"), replaced))
    handoffs._breaker = Breaker(world.fleet, BreakerSettings(failures=1))
    await world.leave()
    assert not world.fleet.tripped[1]


async def test_one_leg_alone_tries_a_prefill_endpoint_that_was_away(world: World) -> None:
    tripped = []
    handoffs = nixl(world, Answers(USABLE, lambda: tripped.append(bool(world.fleet.tripped[1]))))
    breaker = handoffs._breaker = Breaker(world.fleet, BreakerSettings(failures=1, open_s=1.0))
    breaker.report(1, None, 0.0)
    breaker.tick(1.0)
    assert not world.fleet.tripped[1]
    await world.leave()
    assert tripped == [True]
    assert not world.fleet.tripped[1]


async def test_a_client_that_gives_up_a_leg_lets_another_one_try_the_prefill_endpoint(world: World) -> None:
    hanging = asyncio.Event()

    async def never(*_: Any, **__: Any) -> bytes:
        hanging.set()
        await asyncio.sleep(60)
        return b""

    handoffs = nixl(world, Answers(USABLE))
    world.legs.send = never  # type: ignore[method-assign]
    breaker = handoffs._breaker = Breaker(world.fleet, BreakerSettings(failures=1, open_s=1.0))
    for settings in (Handoff(mode="gateway", connector="nixl"), Handoff(mode="gateway", connector="sglang")):
        handoffs.settings = settings
        breaker.report(1, None, 0.0)
        breaker.tick(1.0)
        hanging.clear()
        leaving = asyncio.create_task(world.leave())
        await hanging.wait()
        assert world.fleet.tripped[1], "the leg is the probe"
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert not world.fleet.tripped[1]
        breaker.report(1, 200, 1.0)
        world.books.finish("r", 1.0)


async def test_a_prefill_leg_that_outlives_its_decode_leg_is_ended(free_port: Callable[[], int]) -> None:
    world = World(free_port, timeout=0.2)
    try:
        await world.serve(0)
        decided = await world.leave()
        assert decided.observer is not None
        await world.until(lambda: world.prefillers[0].asked)
        decided.observer.finished()
        assert world.observer.ends == ["finished"]
        await world.until(lambda: world.prefillers[0].cancelled)
    finally:
        await world.close()
