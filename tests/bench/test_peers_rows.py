"""The figures of a run, from answers written by hand."""

import pytest

from bench.peers.rows import Row, Usage, row
from bench.peers.table import table
from bench.peers.traffic import Answer
from gateway.demo_traffic import Observation

ENGINES = ["engine-0", "engine-1"]
USAGE = Usage(cpu_ms={"gateway": 2.0, "Envoy": 0.5}, idle_ms_per_s={"gateway": 10.0}, rss_mb={"gateway": 200.0})


def answer(
    at: float, engine: str = "engine-0", cached: int = 50, returned: bool | None = None, error: str | None = None
) -> Answer:
    """One of 100 prompt tokens that took a tenth of a second."""
    seen = Observation(turn=0, error=error)
    if error is None:
        seen = Observation(turn=0, engine=engine, prompt_tokens=100, cached_tokens=cached, ttft_s=0.05)
    return Answer(began_s=at - 0.1, ended_s=at, conversation=0, returned=returned, seen=seen)


def summed(answers: list[Answer], phases: list[tuple[str, float]], struck: str | None = None) -> Row:
    return row("any", "warmroute", answers, complete=True, engines=ENGINES, phases=phases, struck=struck, usage=USAGE)


def test_failures_count_as_requests_and_in_nothing_else() -> None:
    found = summed(
        [answer(1.0, cached=80), answer(2.0, error="HTTP 503: {...}"), answer(3.0, cached=20, returned=False)],
        [("all", 0.0)],
    )
    assert (found.requests, found.errors) == (3, {"HTTP 503": 1})
    assert found.cached_share == pytest.approx(0.5)
    assert found.returned_share == 0.0
    assert found.served == {"engine-0": 2, "engine-1": 0}
    assert found.busiest_over_mean == pytest.approx(2.0)
    assert found.recovery is None


def test_nothing_but_failures_is_a_row_of_zeros() -> None:
    found = summed([answer(1.0, error="ServerDisconnectedError: gone")], [("all", 0.0)])
    assert (found.cached_share, found.returned_share, found.busiest_over_mean) == (0.0, 0.0, 0.0)
    assert found.ttft_ms == {"p50": 0.0, "p90": 0.0, "p99": 0.0}


def test_a_request_belongs_to_the_phase_in_which_it_began() -> None:
    phases = [("before", 0.0), ("refused", 2.0), ("after", 2.5)]
    answers = [answer(1.0), answer(2.05), answer(2.2, error="HTTP 429: no"), answer(3.0, engine="engine-1")]
    found = summed(answers, phases, struck="engine-0")
    assert [(each.requests, each.failed) for each in found.phases] == [(2, 0), (1, 1), (1, 0)]
    assert [each.struck_share for each in found.phases] == [1.0, 0.0, 0.0]


def dying(cached_after: int) -> Row:
    """engine-0 dies at 10 s, is back at 12 s, answers again at 15 s; 20 cold answers until then, and 30 more."""
    before = [answer(0.2 * n, cached=90) for n in range(1, 50)]
    dead = [answer(10.2 + 0.2 * n, engine="engine-1", cached=0) for n in range(20)]
    back = [answer(15.0 + 0.2 * n, cached=cached_after) for n in range(30)]
    phases = [("before", 0.0), ("engine dead", 10.0), ("engine back", 12.0)]
    return summed([*before, *dead, *back], phases, struck="engine-0")


def test_recovery_is_counted_from_the_return_for_traffic_and_from_the_death_for_the_cache() -> None:
    recovery = dying(cached_after=90).recovery
    assert recovery is not None
    assert recovery.traffic_s == pytest.approx(3.0)
    assert recovery.cache_s == pytest.approx(15.0 + 0.2 * 18 - 10.0)  # 19 of 20 warm ones are 95 %


def test_a_cache_share_that_does_not_come_back_is_none() -> None:
    recovery = dying(cached_after=80).recovery
    assert recovery is not None
    assert recovery.cache_s is None
    assert "not within the run" in table([dying(cached_after=80)])


def test_a_table_has_a_column_per_router_and_says_what_is_incomplete() -> None:
    found = summed([answer(1.0)], [("all", 0.0)])
    lines = table(
        [
            found,
            row(
                "any",
                "smg",
                [answer(1.0, cached=0)],
                complete=False,
                engines=ENGINES,
                phases=[("all", 0.0)],
                struck=None,
                usage=Usage(cpu_ms={"router": 0.4}, idle_ms_per_s={}, rss_mb={}),
            ),
        ]
    ).splitlines()
    assert lines[0] == "|  | warmroute | smg |"
    assert "| requests | 1 | 1, **incomplete** |" in lines
    assert "| prompt tokens found cached | 50.0% | 0.0% |" in lines
    assert "| router CPU per request, ms | 2.50 (gateway 2.00, Envoy 0.50) | 0.40 |" in lines
    assert {line.count("|") for line in lines} == {4}
