"""`warmroute top`: frames from /state and from /metrics, drawn and as JSON; what it says where it cannot get one."""

import http.server
import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from rich.console import Console

from gateway.cli import cli
from gateway.metrics import Metrics
from gateway.picture_metrics import EndpointState, IndexState, PictureCollector, StreamState
from gateway.top import Frame, drawn, from_metrics, from_state


def stream(name: str, **changed: Any) -> StreamState:
    usual: dict[str, Any] = {
        "endpoint": name, "rank": 0, "state": "exact", "reason": "none", "detail": "",
        "events": {"BlockStored": 700, "BlockRemoved": 50},
        "skipped": {}, "gaps": 0, "replays": 1, "sequence": 99, "last_event_age_s": 0.4, "lag_s": 0.003, "batches": 100,
    }  # fmt: skip
    return StreamState(**{**usual, **changed})


def endpoint(name: str, address: str, **changed: Any) -> EndpointState:
    usual: dict[str, Any] = {
        "name": name, "namespace": "default", "endpoint": address, "rank": 0, "role": "decode", "up": True, "in_flight": 2,
        "in_flight_tokens": 12345.0, "waiting": 1.0, "running": 2.0, "kv_usage": 0.42, "scrape_age_s": 0.1,
    }  # fmt: skip
    return EndpointState(**{**usual, **changed})


class Picture:
    def streams(self) -> list[StreamState]:
        lost = {"state": "blind", "reason": "disconnected", "detail": "silent for 70 s", "skipped": {"bad_event": 3}}
        return [stream("10.0.0.1:8000"), stream("10.0.0.2:8000", **lost, last_event_age_s=-1.0)]

    def index(self) -> IndexState:
        return IndexState(keys=1000, entries=1500, evicted_keys=0, evicted_holders=0)

    def endpoints(self) -> list[EndpointState]:
        return [
            endpoint("decode-0", "10.0.0.1:8000"),
            endpoint("decode-1", "10.0.0.2:8000", up=False, role=""),
        ]


ROUTED = [
    {
        "at": 1000.0 - age, "request_id": f"0123456789-{age}", "model": "m", "endpoint": "decode-0", "rank": 0,
        "prefill": "prefill-0" if age == 1 else None, "prompt_tokens": 1000, "best_tokens": best, "chosen_tokens": chosen,
        "reason": reason, "verdicts": {"prefill": "cheaper-there"} if age == 1 else {},
    }
    for age, best, chosen, reason in ((1, 800, 400, "part_cached"), (2, 800, 800, "most_cached"), (3, -1, -1, "no_knowledge"))
]  # fmt: skip


def state() -> dict[str, Any]:
    picture = Picture()
    sections = {"endpoints": picture.endpoints(), "streams": picture.streams(), "index": picture.index()}
    alarms = [{"alarm": "no_match", "where": "decode", "detail": "0 of 40 requests"}]
    return {**msgspec.to_builtins(sections), "routed": ROUTED, "alarms": alarms}


def metrics_page() -> bytes:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    registry.register(PictureCollector(Picture()))
    for share in (0.5, 0.7):
        metrics.match_fraction.labels("10.0.0.1:8000", "chosen").observe(share)
    metrics.decisions.labels("10.0.0.1:8000", "most_cached").inc(2)
    metrics.alarm.labels("no_match", "decode").set(1)
    metrics.alarm.labels("no_events", "10.0.0.1:8000").set(0)
    return generate_latest(registry)


def text_of(frame: Frame) -> str:
    console = Console(file=io.StringIO(), width=132)
    console.print(drawn(frame))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_frame_from_state_has_endpoints_with_their_streams_and_decisions_with_their_reasons() -> None:
    frame = from_state(state(), "here", now=1000.0)
    first, second = frame.endpoints
    assert (first.name, first.trust, first.routed, first.events) == ("decode-0", "exact", 3, 750)
    assert first.match_share == pytest.approx(0.6)
    assert (second.trust, second.reason, second.match_share, second.skipped) == ("blind", "disconnected", None, 3)
    assert (frame.decisions[0].age_s, frame.decisions[0].reason) == (1.0, "part_cached")


def test_a_frame_from_metrics_has_the_same_endpoints_and_no_decisions() -> None:
    frame = from_metrics(metrics_page().decode(), "here")
    first, second = frame.endpoints
    assert (first.name, first.trust, first.routed, first.events) == ("decode-0", "exact", 2, 750)
    assert first.match_share == pytest.approx(0.6)
    assert (second.up, second.trust, second.reason, second.last_event_age_s) == (False, "blind", "disconnected", -1)
    assert (frame.decisions, frame.index_keys, frame.index_entries) == ([], 1000, 1500)
    assert frame.alarms == ["no_match decode"]


def test_what_is_drawn_names_the_blind_stream_with_its_detail_and_where_a_prompt_was_computed() -> None:
    text = text_of(from_state(state(), "here", now=1000.0))
    for words in (
        "1/2 up",
        "1/2 exact",
        "decode-1: blind, disconnected (silent for 70 s)",
        "12.3k",
        "60%",
        "any",
        "alarm no_match decode: 0 of 40",
    ):
        assert words in text
    assert "decode-0 after prefill-0" in text
    assert "part_cached, prefill: cheaper-there" in text
    assert all(len(line) <= 132 for line in text.splitlines())


@pytest.fixture
def gateway(free_port: Callable[[], int]) -> Iterator[str]:
    """Something that answers as a gateway's admin and metrics ports do."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/state" and self.headers.get("Authorization") not in (None, "Bearer right"):
                self.send_error(401)
                return
            pages = {"/state": msgspec.json.encode(state()), "/metrics": metrics_page()}
            body = pages.get(self.path)
            self.send_response(200 if body else 404)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", free_port()), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()


def test_without_a_gateway_it_says_what_to_set_and_ends_with_1(free_port: Callable[[], int]) -> None:
    result = CliRunner().invoke(cli, ["top", "--once", "--admin", f"127.0.0.1:{free_port()}"])
    assert result.exit_code == 1
    assert "warmroute.adminPort" in result.output


def test_two_sources_are_a_usage_error() -> None:
    result = CliRunner().invoke(cli, ["top", "--once", "--admin", "a:1", "--metrics", "b:1"])
    assert (result.exit_code, "one of" in result.output) == (2, True)


@pytest.mark.parametrize("source", ["--admin", "--metrics"])
def test_once_prints_one_frame_and_json_the_same_as_data(gateway: str, source: str) -> None:
    drawn_frame = CliRunner().invoke(cli, ["top", "--once", source, gateway])
    assert (drawn_frame.exit_code, "decode-1" in drawn_frame.output) == (0, True)
    as_json = CliRunner().invoke(cli, ["top", "--once", "--json", source, gateway])
    frame = msgspec.json.decode(as_json.output, type=Frame)
    assert [it.name for it in frame.endpoints] == ["decode-0", "decode-1"]


@pytest.mark.parametrize(("token", "status"), [("right", 0), ("wrong", 1)])
def test_the_admin_ports_token_comes_from_a_file(gateway: str, tmp_path: Path, token: str, status: int) -> None:
    (tmp_path / "token").write_text(f"{token}\n")
    options = ["--once", "--admin", gateway, "--token-file", str(tmp_path / "token")]
    result = CliRunner().invoke(cli, ["top", *options])
    assert result.exit_code == status
    assert ("401" in result.output) == (status == 1)
