"""Log lines: the request's id is in every line of a request, once, and in no other."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from gateway.logs import REQUEST_ID, configure

log = logging.getLogger("tests.logs")


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What goes to stderr, with the root logger put back afterwards."""
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    text = io.StringIO()
    yield text
    root.handlers[:], root.level = before[0], before[1]


def start(lines: io.StringIO, *, as_json: bool) -> None:
    configure("info", as_json=as_json)
    handler = logging.getLogger().handlers[0]
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(lines)


async def request(name: str) -> None:
    REQUEST_ID.set(name)
    await asyncio.sleep(0)
    log.warning("tokenization_failed path=/v1/completions")
    await asyncio.to_thread(log.warning, "keys_failed error=x")
    log.info("explain_failed request_id=%s", name)


async def test_lines_of_interleaved_requests_have_their_own_ids_once(lines: io.StringIO) -> None:
    start(lines, as_json=False)
    log.warning("started")
    async with asyncio.TaskGroup() as group:
        for name in ("a1", "b2"):
            group.create_task(request(name))
    log.warning("stopped")
    said = lines.getvalue().splitlines()
    assert [line.count("request_id=") for line in said] == [0, *[1] * 6, 0]
    assert sum(line.endswith("request_id=a1") for line in said) == 3
    assert "WARNING tests.logs tokenization_failed path=/v1/completions request_id=b2" in lines.getvalue()


async def test_json_lines_have_it_as_a_field(lines: io.StringIO) -> None:
    start(lines, as_json=True)
    await asyncio.create_task(request("a1"))
    log.warning("stopped")
    said = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [line.get("request_id") for line in said] == ["a1", "a1", None, None]
    assert "request_id=a1" in said[2]["message"]
