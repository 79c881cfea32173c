import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from fleet.books import Books
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from fleet.scrape import gpu_utilization
from fleet.scraper import Scraper, ScrapeSettings, Source

PAGE = """\
vllm:num_requests_waiting{{engine="0"}} {waiting}
vllm:num_requests_running{{engine="0"}} 2
vllm:kv_cache_usage_perc{{engine="0"}} 0.25
vllm:num_requests_waiting{{engine="1"}} 7
vllm:num_requests_running{{engine="1"}} 4
vllm:kv_cache_usage_perc{{engine="1"}} 0.75
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="100"}} 1
vllm:cache_config_info{{block_size="16",engine="1",num_gpu_blocks="100"}} 1
"""


class ModelServer:
    """A model server that says what it is told to."""

    def __init__(self) -> None:
        self.status, self.body, self.delay_s = 200, PAGE.format(waiting=3), 0.0
        self.models: Any = {"object": "list", "data": [{"id": "m", "x": 1}, {"id": "adapter"}]}
        self.asked = 0

    async def metrics(self, request: web.Request) -> web.Response:
        self.asked += 1
        await asyncio.sleep(self.delay_s)
        return web.Response(status=self.status, text=self.body)

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response(self.models)


@contextlib.asynccontextmanager
async def serving(server: ModelServer, port: int) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/metrics", server.metrics)
    app.router.add_get("/v1/models", server.list_models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def scraping(fleet: Fleet, books: Books | None = None, **settings: Any) -> AsyncIterator[Scraper]:
    settings.setdefault("metrics", Source(path="/metrics", interval_s=0.02))
    scraper = Scraper(fleet, ScrapeSettings(timeout_s=0.2, retry_s=0.02, **settings), books)
    task = asyncio.create_task(scraper.run())
    try:
        yield scraper
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is waited for is a number in a column
            await asyncio.sleep(0.01)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


async def test_a_server_that_is_down_becomes_unhealthy_and_healthy_again(
    fleet: Fleet, free_port: Callable[[], int], caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    slot = fleet.add(Endpoint(name="e", address=f"127.0.0.1:{port}"))
    async with scraping(fleet) as scraper:
        await until(lambda: not fleet.healthy[slot])
        assert fleet.available().tolist() == []
        assert fleet.scraped_at[slot] == -np.inf
        assert scraper.counts["metrics", "connection"] >= 3
        async with serving(ModelServer(), port):
            await until(lambda: fleet.healthy[slot])
    assert caplog.text.count("server_unhealthy") == 1


@pytest.mark.parametrize(("status", "delay_s", "outcome"), [(503, 0.0, "status-5xx"), (200, 1.0, "timeout")])
async def test_errors_and_silence_are_failures(
    fleet: Fleet, free_port: Callable[[], int], status: int, delay_s: float, outcome: str
) -> None:
    server = ModelServer()
    server.status, server.delay_s = status, delay_s
    async with serving(server, free_port()) as address:
        slot = fleet.add(Endpoint(name="e", address=address))
        async with scraping(fleet) as scraper:
            await until(lambda: not fleet.healthy[slot])
            assert scraper.counts["metrics", outcome] >= 3


@pytest.mark.parametrize(
    ("status", "body", "outcome"),
    [(404, "", "status-4xx"), (200, "vllm:num_requests_waiting lots\n", "unreadable"), (200, "\xff\n", "ok")],
)
async def test_a_server_without_a_usable_page_is_alive_all_the_same(
    fleet: Fleet, free_port: Callable[[], int], status: int, body: str, outcome: str
) -> None:
    server = ModelServer()
    server.status, server.body = status, body
    async with serving(server, free_port()) as address:
        slot = fleet.add(Endpoint(name="e", address=address))
        async with scraping(fleet) as scraper:
            await until(lambda: scraper.counts["metrics", outcome] > 4)
            assert fleet.healthy[slot]
            assert fleet.scraped_at[slot] == -np.inf


async def test_ranks_of_one_server_get_their_own_numbers_from_one_page(
    fleet: Fleet, free_port: Callable[[], int]
) -> None:
    server = ModelServer()
    async with serving(server, free_port()) as address:
        slots = [fleet.add(Endpoint(name=f"e-{rank}", address=address, rank=rank)) for rank in range(2)]
        async with scraping(fleet, models=Source(path="/v1/models", interval_s=1.0)):
            await until(lambda: np.isfinite(fleet.scraped_at[slots]).all() and fleet.listings[slots[1]].base)
    assert fleet.waiting[slots].tolist() == [3, 7]
    assert fleet.kv_usage[slots].tolist() == [0.25, 0.75]
    assert fleet.block_tokens[slots].tolist() == [16, 16]
    assert fleet.kv_capacity_tokens[slots].tolist() == [1600, 1600]
    assert fleet.listings[slots[0]].names == {"m", "adapter"}
    assert (fleet.age(np.array(slots)) < 5).all()


async def test_an_endpoint_that_stands_for_all_ranks_gets_their_sum(fleet: Fleet, free_port: Callable[[], int]) -> None:
    async with serving(ModelServer(), free_port()) as address:
        slot = fleet.add(Endpoint(name="e", address=address))
        async with scraping(fleet):
            await until(lambda: fleet.scraped_at[slot] > 0)
    assert (fleet.waiting[slot], fleet.running[slot], fleet.kv_usage[slot]) == (10, 6, 0.5)
    assert fleet.kv_capacity_tokens[slot] == 3200


async def test_a_slow_server_is_not_asked_again_before_it_has_answered(
    fleet: Fleet, free_port: Callable[[], int]
) -> None:
    server = ModelServer()
    server.delay_s = 0.15
    async with serving(server, free_port()) as address:
        fleet.add(Endpoint(name="e", address=address))
        async with scraping(fleet):
            await asyncio.sleep(0.4)
    assert server.asked <= 3


async def test_endpoints_that_come_and_go_are_followed(fleet: Fleet, free_port: Callable[[], int]) -> None:
    servers = [ModelServer(), ModelServer()]
    async with serving(servers[0], free_port()) as first, serving(servers[1], free_port()) as second, scraping(fleet):
        slot = fleet.add(Endpoint(name="a", address=first))
        await until(lambda: fleet.scraped_at[slot] > 0)
        fleet.remove(slot)
        fleet.release(slot)
        other = fleet.add(Endpoint(name="b", address=second))
        await until(lambda: fleet.scraped_at[other] > 0)
        asked = servers[0].asked
        await asyncio.sleep(0.1)
        assert servers[0].asked <= asked + 1


async def test_an_idle_engine_corrects_the_books(fleet: Fleet, free_port: Callable[[], int]) -> None:
    server = ModelServer()
    server.body = "vllm:num_requests_waiting 0\nvllm:num_requests_running 0\n"
    books = Books(fleet, reconcile_grace_s=0.05)
    async with serving(server, free_port()) as address:
        slot = fleet.add(Endpoint(name="e", address=address))
        books.reserve("ghost", slot, 100, 400, fleet.clock())
        async with scraping(fleet, books):
            await until(lambda: fleet.in_flight[slot] == 0)
    assert books.counts.reconciled == 1


async def test_other_pages_become_attributes(fleet: Fleet, free_port: Callable[[], int]) -> None:
    server = ModelServer()
    server.body = 'DCGM_FI_DEV_GPU_UTIL{gpu="0"} 40\nDCGM_FI_DEV_GPU_UTIL{gpu="1"} 90\n'
    async with serving(server, free_port()) as address:
        slot = fleet.add(Endpoint(name="e", address="127.0.0.1:1"))
        exporter = Source(path="/metrics", interval_s=0.02, port=int(address.split(":")[1]))
        async with scraping(fleet, metrics=None, models=None, attributes=((exporter, gpu_utilization),)):
            await until(lambda: fleet.attribute("GPUUtilization")[slot] == 0.9)


def test_the_interval_grows_with_the_fleet(fleet: Fleet) -> None:
    scraper = Scraper(fleet, ScrapeSettings())
    source = Source(path="/metrics", interval_s=0.1)
    assert scraper.interval_s(source) == 0.1
    for number in range(200):
        fleet.add(Endpoint(name=f"e{number}", address=f"10.0.0.{number}:1"))
    scraper._follow_fleet()
    assert scraper.interval_s(source) == pytest.approx(1.0)
