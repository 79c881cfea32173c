"""Log lines: the request's id is in every line of a request, once, and in no other."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from gateway.logs import REQUEST_ID, RateLimit, Repeats, configure

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


def test_an_event_that_repeats_is_left_out_and_counted_and_others_are_not(lines: io.StringIO) -> None:
    start(lines, as_json=False)
    for number in range(25):
        log.warning("cache_replaced stream=%s keys=%d", "a", number)
    log.warning("cache_replaced stream=%s keys=%d", "b", 0)
    log.warning("batches_lost stream=%s", "a")
    said = lines.getvalue().splitlines()
    assert [sum("stream=a keys" in line for line in said), sum("stream=b keys" in line for line in said)] == [10, 1]
    assert "batches_lost" in said[-1]
    assert "left_out" not in lines.getvalue()


@pytest.mark.parametrize("as_json", [False, True])
def test_after_a_minute_the_next_line_says_how_many_were_left_out(lines: io.StringIO, as_json: bool) -> None:
    start(lines, as_json=as_json)
    for second in (*range(30), 61, 62):
        record = log.makeRecord("tests.logs", logging.WARNING, "f", 1, "link_down stream=%s", ("a",), None)
        record.created = 1000.0 + second
        log.handle(record)
    said = lines.getvalue().splitlines()
    assert len(said) == 12
    assert said[10].endswith('"left_out": 20}' if as_json else "link_down stream=a left_out=20")
    assert "left_out" not in said[11]


def test_of_events_that_never_repeat_only_so_many_are_remembered() -> None:
    repeats = Repeats(most=1, remembered=10)
    for number in range(1000):
        assert repeats.filter(log.makeRecord("x", logging.INFO, "f", 1, "ended request_id=%s", (str(number),), None))
    assert len(repeats._seen) == 10


async def test_json_lines_have_it_as_a_field(lines: io.StringIO) -> None:
    start(lines, as_json=True)
    await asyncio.create_task(request("a1"))
    log.warning("stopped")
    said = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [line.get("request_id") for line in said] == ["a1", "a1", None, None]
    assert "request_id=a1" in said[2]["message"]


def test_a_wall_clock_that_is_set_back_silences_nothing() -> None:
    repeats = Repeats(most=1, every_s=60.0)

    def passes(at: float) -> bool:
        record = log.makeRecord("x", logging.INFO, "f", 1, "again stream=%s", ("a",), None)
        record.created = at
        return repeats.filter(record)

    assert [passes(at) for at in (1e9, 1e9 + 1, 1e9 - 86_400, 1e9 - 86_399)] == [True, False, True, False]


def test_what_may_be_written_again_is_not_remembered_for_ever() -> None:
    quiet = RateLimit(10.0)
    assert all(quiet.allows(f"10.0.{n // 250}.{n % 250}:8000", now=float(n)) for n in range(5_000))
    assert len(quiet._last) <= quiet.REMEMBERED
    assert not quiet.allows("10.0.19.249:8000", now=5_000.0)
