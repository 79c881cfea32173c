import json

import msgspec
import pytest
from rich.console import Console

from gateway import demo_report
from gateway.demo_report import Overhead, Report
from gateway.demo_traffic import Observation

PAGE = """\
# TYPE step_seconds histogram
step_seconds_bucket{le="0.001",step="parse"} 7
step_seconds_bucket{le="+Inf",step="parse"} 7
step_seconds_bucket{le="0.001",step="total"} 0
step_seconds_bucket{le="0.002",step="total"} 80
step_seconds_bucket{le="0.004",step="total"} 98
step_seconds_bucket{le="+Inf",step="total"} 100
"""


def seen(cached: int, predicted: int | None = None, engine: str = "engine-0", ttft_s: float = 0.1) -> Observation:
    return Observation(
        turn=0, engine=engine, prompt_tokens=100, cached_tokens=cached, predicted_tokens=predicted, ttft_s=ttft_s
    )


def report(**changes: object) -> Report:
    one = [seen(10, ttft_s=n / 100) for n in range(1, 101)]
    two = [seen(80, 80, ttft_s=n / 200) for n in range(1, 101)]
    built = Report(
        round_robin=demo_report.phase(one, ["engine-0", "engine-1"], 30),
        warmroute=demo_report.phase(two, ["engine-0", "engine-1"], 30),
        prediction=demo_report.prediction(two),
        overhead=Overhead(
            decision_ms={"p50": 1.0, "p90": 2.0, "p99": 3.0},
            through_ms={"p50": 6.5, "p90": 7.0, "p99": 8.0},
            past_ms={"p50": 5.0, "p90": 6.0, "p99": 7.0},
        ),
        errors=[],
        duration_s=80,
    )
    return msgspec.structs.replace(built, **changes)


def test_a_phase_of_failures_only_has_no_ratios_to_divide_by_zero() -> None:
    result = demo_report.phase([Observation(turn=0, error="HTTP 503")], ["engine-0"], 1)
    assert (result.requests, result.failed, result.hit_ratio) == (1, 1, 0)
    assert result.ttft_ms == {"p50": 0, "p90": 0, "p99": 0}


def test_an_engine_without_requests_is_in_the_result() -> None:
    result = demo_report.phase([seen(16), seen(32, engine="engine-2")], ["engine-0", "engine-1", "engine-2"], 1)
    assert result.requests_by_engine == {"engine-0": 1, "engine-1": 0, "engine-2": 1}
    assert result.hit_ratio == 48 / 200


def test_percentiles_are_nearest_ranks() -> None:
    assert demo_report.percentiles([float(n) for n in range(1, 101)]) == {"p50": 50, "p90": 90, "p99": 99}
    assert demo_report.percentiles([7.0]) == {"p50": 7, "p90": 7, "p99": 7}


def test_predictions_are_exact_over_under_or_missing() -> None:
    result = demo_report.prediction([seen(16, 16), seen(16, 32), seen(16, 0), seen(16), Observation(turn=0, error="x")])
    assert (result.exact, result.over, result.under, result.unknown) == (1, 1, 1, 1)
    assert (result.predicted_tokens, result.actual_tokens) == (48, 48)


def test_histogram_percentiles_are_interpolated_and_other_series_ignored() -> None:
    result = demo_report.histogram_percentiles("", PAGE, "step_seconds", 'step="total"')
    assert result["p50"] == 0.001 + 0.001 * 50 / 80
    assert result["p90"] == 0.002 + 0.002 * 10 / 18
    assert result["p99"] == 0.004  # in the open bucket: its lower bound


def test_what_was_there_before_does_not_count() -> None:
    later = PAGE.replace('total"} 80', 'total"} 180').replace("} 98", "} 198").replace("} 100", "} 200")
    result = demo_report.histogram_percentiles(PAGE, later, "step_seconds", 'step="total"')
    assert result == pytest.approx({"p50": 0.0015, "p90": 0.0019, "p99": 0.00199})
    assert demo_report.histogram_percentiles(PAGE, PAGE, "step_seconds", 'step="total"')["p99"] == 0


def test_a_missing_histogram_is_zero() -> None:
    assert demo_report.histogram_percentiles("", PAGE, "other_seconds", "") == {"p50": 0, "p90": 0, "p99": 0}


def test_the_table_shows_both_ways_the_prediction_and_the_cost() -> None:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(demo_report.table(report(errors=["HTTP 500: nope"])))
    text = console.export_text()
    for piece in (
        "10.0%",
        "80.0%",
        "+70.0 points",
        "2.0x faster",
        "8000 / 8000",
        "100 requests exact",
        "adds 1.5 ms",
        "HTTP 500",
    ):
        assert piece in text, piece


def test_the_json_form_has_everything_the_table_has() -> None:
    built = json.loads(report().as_json())
    assert set(built) == {"round_robin", "warmroute", "prediction", "overhead", "errors", "duration_s"}
    assert built["warmroute"]["hit_ratio"] == 0.8
    assert built["overhead"]["added_ms"] == 1.5
