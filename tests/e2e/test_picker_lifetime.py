"""What Envoy does when the picker is killed, hangs, drains or comes back; TLS between the two."""

import asyncio
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.envoy_config import PickerTls

SelfSigned = Callable[[Path, str], None]
MODES = ["BUFFERED", "FULL_DUPLEX_STREAMED"]
STREAM = "/v1/completions?events=30&gap=0.1"


class Traffic:
    """Requests one after the other from a few clients, each decided slowly enough to be caught while deciding."""

    def __init__(self, fleet: Any, clients: int = 6) -> None:
        self.statuses: Counter[int] = Counter()
        self._fleet = fleet
        self._stop = False
        self._tasks = [asyncio.create_task(self._client()) for _ in range(clients)]

    async def _client(self) -> None:
        while not self._stop:
            status, _ = await self._fleet.post(b'{"a": 1}', x_test_delay="0.05")
            self.statuses[status] += 1
            await asyncio.sleep(0.01)

    async def stop(self) -> Counter[int]:
        self._stop = True
        await asyncio.gather(*self._tasks)
        return self.statuses


async def start_separate_picker(fleet: Any, **parameters: Any) -> tuple["subprocess.Popen[bytes]", int]:
    port = fleet.free_port()
    picker = fleet.spawn_picker(port)
    await fleet.start_envoy(f"127.0.0.1:{port}", **parameters)
    assert await by_picker(fleet)
    return picker, port


async def by_picker(fleet: Any) -> bool:
    """True when a request was routed by the picker rather than by the fallback."""
    status, answer = await fleet.post()
    assert status == 200, answer
    return ["x-from-picker", "yes"] in answer["headers"]


async def stream(fleet: Any) -> bytes:
    async with fleet.session.post(fleet.envoy.url + STREAM, data=b"{}") as response:
        return bytes(await response.read())


# --- the picker dies


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
async def test_buffered_with_fail_open_loses_no_request(fleet: Any, how: signal.Signals) -> None:
    picker, port = await start_separate_picker(fleet, mode="BUFFERED")
    streaming = asyncio.create_task(stream(fleet))
    traffic = Traffic(fleet)
    await asyncio.sleep(0.5)
    picker.send_signal(how)
    await fleet.until(lambda: _ejected(fleet), "Envoy ejects the picker")
    # Those that were being decided wait for Envoy's ping to fail; then all go on.
    answered = traffic.statuses[200] + 50
    await fleet.until(lambda: traffic.statuses[200] > answered, "requests go on without the picker", 20)
    assert set(await traffic.stop()) == {200}
    assert (await streaming).endswith(b"data: 29\n\n"), "a running stream is not cut"
    assert not await by_picker(fleet)

    picker.kill()
    picker.wait()
    fleet.spawn_picker(port)
    await fleet.until(lambda: by_picker(fleet), "a new picker is used again")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
async def test_duplex_loses_what_is_in_flight_and_fails_open_once_the_picker_is_ejected(
    fleet: Any, how: signal.Signals
) -> None:
    picker, port = await start_separate_picker(fleet, mode="FULL_DUPLEX_STREAMED")
    traffic = Traffic(fleet)
    await asyncio.sleep(0.5)
    picker.send_signal(how)
    await fleet.until(lambda: _ejected(fleet), "Envoy ejects the picker")
    lost = await traffic.stop()
    assert set(lost) <= {200, 500}
    assert 1 <= lost[500] <= 12, "about one per client: those which were being decided"
    later = Traffic(fleet)
    await asyncio.sleep(1.0)
    assert set(await later.stop()) == {200}

    picker.kill()
    picker.wait()
    fleet.spawn_picker(port)
    await fleet.until(lambda: by_picker(fleet), "a new picker is used again")


async def test_a_decision_that_outlasts_the_message_timeout_goes_to_the_fallback_in_buffered_mode(fleet: Any) -> None:
    server = await fleet.start_picker()
    await fleet.start_envoy(f"127.0.0.1:{server.port}", message_timeout_s=0.5)
    status, answer = await fleet.post(x_test_delay="3")
    assert status == 200
    assert ["x-from-picker", "yes"] not in answer["headers"]
    assert await by_picker(fleet), "one slow decision is no reason to eject the picker"
    assert server.service.counts["decide_cancelled"] == 1


async def test_in_duplex_mode_only_the_pickers_own_deadline_ends_a_decision(fleet: Any) -> None:
    server = await fleet.start_picker(decide_timeout_s=1.5)
    await fleet.start_envoy(f"127.0.0.1:{server.port}", message_timeout_s=0.5, mode="FULL_DUPLEX_STREAMED")
    status, answer = await fleet.post(x_test_delay="1")
    assert status == 200
    assert ["x-from-picker", "yes"] in answer["headers"], "Envoy's message_timeout has no effect here"
    status, answer = await fleet.post(x_test_delay="9")
    assert status == 504
    assert answer["error"]["code"] == "decide_timeout"


async def test_failing_closed_is_500(fleet: Any) -> None:
    picker, _ = await start_separate_picker(fleet, fail_open=False)
    picker.kill()
    picker.wait()
    for _ in range(3):
        status, _ = await fleet.post()
        assert status == 500


async def test_a_client_cannot_choose_its_destination_while_the_picker_is_down(fleet: Any) -> None:
    picker, _ = await start_separate_picker(fleet)
    picker.kill()
    picker.wait()
    servers = set()
    for _ in range(6):
        _, answer = await fleet.post(x_gateway_destination_endpoint=fleet.addresses[0])
        servers.add(answer["server"])
        assert "x-gateway-destination-endpoint" not in dict(answer["headers"])
    assert servers == set(fleet.addresses), "round robin, as without the header"


async def test_dynamic_hosts_need_the_picker(fleet: Any) -> None:
    picker, _ = await start_separate_picker(fleet, dynamic_hosts=True)
    _, answer = await fleet.post(test_epp_endpoint_selection=fleet.addresses[2])
    assert answer["server"] == fleet.addresses[2]
    picker.kill()
    picker.wait()
    status, _ = await fleet.post(x_gateway_destination_endpoint=fleet.addresses[0])
    assert status == 503, "nobody named a destination, and the client may not"


# --- the picker is asked to stop


@pytest.mark.parametrize("mode", MODES)
async def test_sigterm_drains_without_a_lost_request(fleet: Any, mode: str) -> None:
    picker, _ = await start_separate_picker(fleet, mode=mode)
    streaming = asyncio.create_task(stream(fleet))
    traffic = Traffic(fleet)
    await asyncio.sleep(0.5)
    picker.terminate()
    await fleet.until(lambda: _ejected(fleet), "Envoy sees NOT_SERVING")
    assert picker.poll() is None, "it still answers what Envoy sent before it knew"
    assert (await streaming).endswith(b"data: 29\n\n")
    assert await asyncio.to_thread(picker.wait, 15) == 0
    assert set(await traffic.stop()) == {200}


async def test_of_two_pickers_the_draining_one_gets_nothing_more(fleet: Any) -> None:
    first = await fleet.start_picker()
    decider = fleet.decider
    second = await fleet.start_picker()

    def patch(bootstrap: Any) -> None:
        (cluster,) = (c for c in bootstrap["static_resources"]["clusters"] if c["name"] == "picker")
        (locality,) = cluster["load_assignment"]["endpoints"]
        address = {"socket_address": {"address": "127.0.0.1", "port_value": second.port}}
        locality["lb_endpoints"].append({"endpoint": {"address": address}})

    await fleet.start_envoy(f"127.0.0.1:{first.port}", patch=patch, healthy=2)
    for _ in range(6):
        await fleet.post()
    assert (len(decider.heads), len(fleet.decider.heads)) == (3, 3)
    await first.set_serving(False)
    await fleet.until(lambda: _healthy(fleet, 1), "Envoy sees NOT_SERVING")
    for _ in range(6):
        assert await by_picker(fleet)
    assert (len(decider.heads), len(fleet.decider.heads)) == (3, 9)


# --- TLS


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("verified", [False, True], ids=["any certificate", "verified"])
@pytest.mark.parametrize("transport", ["http2", "grpcio"])
async def test_tls_to_the_picker(
    fleet: Any, self_signed: SelfSigned, mode: str, verified: bool, transport: str
) -> None:
    self_signed(fleet.directory, "picker.test")
    port = fleet.free_port()
    fleet.spawn_picker(port, tls=fleet.directory, transport=transport)
    ca = str(fleet.directory / "tls.crt") if verified else None
    await fleet.start_envoy(f"127.0.0.1:{port}", mode=mode, picker_tls=PickerTls(ca_path=ca, server_name="picker.test"))
    assert await by_picker(fleet)
    status, answer = await fleet.post(b'"' + b"x" * 5_000_000 + b'"')
    assert (status, answer["bytes"]) == (200, 5_000_002)


async def test_a_certificate_for_another_name_is_not_accepted(fleet: Any, self_signed: SelfSigned) -> None:
    self_signed(fleet.directory, "picker.test")
    port = fleet.free_port()
    fleet.spawn_picker(port, tls=fleet.directory)
    tls = PickerTls(ca_path=str(fleet.directory / "tls.crt"), server_name="somebody.else")
    await fleet.start_envoy(f"127.0.0.1:{port}", picker_tls=tls, healthy=None)
    await asyncio.sleep(2.0)
    assert await fleet.envoy.healthy_pickers() == 0
    assert not await by_picker(fleet)


# --- nobody pings it to death


async def test_an_idle_connection_is_kept(fleet: Any) -> None:
    """Envoy's pings, which find a hanging picker, are no abuse to our server."""
    server = await fleet.start_picker()
    await fleet.start_envoy(f"127.0.0.1:{server.port}")
    assert await by_picker(fleet)
    before = await fleet.envoy.stat("cluster.picker.upstream_cx_total")
    await asyncio.sleep(6)
    assert await by_picker(fleet)
    assert await fleet.envoy.stat("cluster.picker.upstream_cx_total") == before


async def _ejected(fleet: Any) -> bool:
    return await _healthy(fleet, 0)


async def _healthy(fleet: Any, count: int) -> bool:
    return bool(await fleet.envoy.healthy_pickers() == count)
