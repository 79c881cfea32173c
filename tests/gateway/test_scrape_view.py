import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway import scrape_view
from gateway.http_server import BoundApp, metrics_app
from gateway.part_metrics import Sample
from gateway.picture_metrics import EndpointState, IndexState, StreamState
from gateway.scrape_view import ScrapeView


class Gateway:
    """Picture and parts in one, which know who asked them."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.error: Exception | None = None

    def streams(self) -> list[StreamState]:
        self.asked.append(threading.get_ident())
        if self.error:
            raise self.error
        return []

    def index(self) -> IndexState:
        self.asked.append(threading.get_ident())
        return IndexState(keys=7, entries=0, evicted_keys=0, evicted_holders=0)

    def endpoints(self) -> list[EndpointState]:
        self.asked.append(threading.get_ident())
        return []

    def samples(self) -> Iterable[Sample]:
        self.asked.append(threading.get_ident())
        yield "books_open", (), 3.0


async def test_a_look_from_another_thread_happens_on_the_event_loops() -> None:
    gateway = Gateway()
    view = ScrapeView(gateway, gateway)
    view.bind(asyncio.get_running_loop())

    def scrape() -> tuple[Any, ...]:
        return view.streams(), view.index().keys, view.endpoints(), view.samples()

    assert await asyncio.to_thread(scrape) == ([], 7, [], [("books_open", (), 3.0)])
    assert scrape() == ([], 7, [], [("books_open", (), 3.0)]), "from the event loop itself it does not wait for it"
    assert set(gateway.asked) == {threading.get_ident()}


def test_before_there_is_a_loop_it_looks_where_it_is() -> None:
    gateway = Gateway()
    assert ScrapeView(gateway, gateway).index().keys == 7


async def test_what_a_look_raises_is_raised_where_it_was_asked_for() -> None:
    gateway = Gateway()
    gateway.error = KeyError("slot 3")
    view = ScrapeView(gateway, gateway)
    view.bind(asyncio.get_running_loop())
    with pytest.raises(KeyError, match="slot 3"):
        await asyncio.to_thread(view.streams)


async def test_an_event_loop_without_time_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape_view, "LONGEST_LOOK_S", 0.05)
    gateway = Gateway()
    view = ScrapeView(gateway, gateway)
    view.bind(asyncio.get_running_loop())
    caught: list[BaseException] = []

    def scrape() -> None:
        try:
            view.index()
        except TimeoutError as error:
            caught.append(error)

    thread = threading.Thread(target=scrape)
    thread.start()
    thread.join()  # the event loop does nothing else meanwhile
    assert "did not answer within 0.05 s" in str(caught[0])
    await asyncio.sleep(0)
    assert gateway.asked == [], "a look that nobody waits for is not made"


async def test_requests_are_served_while_the_page_is_written(free_port: Callable[[], int]) -> None:
    writing, go_on = threading.Event(), threading.Event()

    class Slow(Collector):
        def collect(self) -> Iterable[Metric]:
            writing.set()
            assert go_on.wait(30)
            yield GaugeMetricFamily("slow", "s", 1.0)

        def describe(self) -> Iterable[Metric]:
            return ()

    registry = CollectorRegistry()
    registry.register(Slow())
    port = free_port()
    page = BoundApp(metrics_app(registry, lambda: True), "127.0.0.1", port)
    await page.start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            scrape = asyncio.create_task(session.get("/metrics"))
            await asyncio.to_thread(writing.wait, 30)
            async with session.get("/healthz") as response:
                assert response.status == 200
            assert not scrape.done()
            go_on.set()
            async with await scrape as response:
                assert "slow 1.0" in await response.text()
    finally:
        go_on.set()
        await page.stop()
