"""Real HTTP through a real Envoy and the ext-proc server, in both body modes."""

import asyncio
import hashlib
import json
import time
from typing import Any

import aiohttp
import pytest

MODES = ["BUFFERED", "FULL_DUPLEX_STREAMED"]
VARIANTS = {
    "buffered": ("BUFFERED", "STREAMED", "http2"),
    "duplex": ("FULL_DUPLEX_STREAMED", "STREAMED", "http2"),
    "duplex-both": ("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED", "http2"),
    "buffered-grpcio": ("BUFFERED", "STREAMED", "grpcio"),
    "duplex-both-grpcio": ("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED", "grpcio"),
}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
async def routed(fleet: Any, request: pytest.FixtureRequest) -> Any:
    mode, response_mode, transport = request.param
    server = await fleet.start_picker(transport=transport)
    await fleet.start_envoy(f"127.0.0.1:{server.port}", mode=mode, response_mode=response_mode)
    return fleet


def header(answer: Any, name: str) -> list[str]:
    return [value for key, value in answer["headers"] if key == name]


async def test_an_unused_connection_to_a_model_server_is_closed_by_envoy(fleet: Any) -> None:
    """The other way round a request may be on its way when the model server closes it."""
    server = await fleet.start_picker()
    await fleet.start_envoy(f"127.0.0.1:{server.port}", engine_idle_s=0.3)
    assert (await fleet.post(b"{}"))[0] == 200

    async def closed() -> bool:
        return (await fleet.envoy.stat("cluster.fleet.upstream_cx_idle_timeout")) == 1

    await fleet.until(closed, "Envoy closes the idle connection")
    assert (await fleet.post(b"{}"))[0] == 200


# --- what clients get wrong


async def test_malformed_json_is_400_in_openais_shape(routed: Any) -> None:
    async with routed.session.post(routed.envoy.url + "/v1/completions", data=b'{"model": ') as response:
        assert response.status == 400
        assert response.content_type == "application/json"
        error = (await response.json())["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "invalid_json"
    assert sum(upstream.requests for upstream in routed.upstreams) == 0


async def test_a_client_cannot_choose_its_destination(routed: Any) -> None:
    other = routed.addresses[2]
    for _ in range(4):
        status, answer = await routed.post(
            test_epp_endpoint_selection=routed.addresses[0],
            x_gateway_destination_endpoint=other,
            x_prefiller_host_port=other,
        )
        assert status == 200
        assert answer["server"] == routed.addresses[0]
        assert header(answer, "x-gateway-destination-endpoint") == [routed.addresses[0]]
        assert header(answer, "x-prefiller-host-port") == []


async def test_several_destination_headers_of_a_client_are_all_replaced(fleet: Any) -> None:
    """Without Envoy's own stripping: what the picker answers must be enough."""

    def patch(bootstrap: Any) -> None:
        for listener in bootstrap["static_resources"]["listeners"]:
            manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
            assert manager["http_filters"].pop(0)["name"] == "envoy.filters.http.header_mutation"

    server = await fleet.start_picker()
    await fleet.start_envoy(f"127.0.0.1:{server.port}", patch=patch)
    spoofed = [("x-gateway-destination-endpoint", fleet.addresses[2]), ("x-gateway-destination-endpoint", "6.6.6.6:1")]
    headers = [*spoofed, ("test-epp-endpoint-selection", fleet.addresses[0])]
    async with fleet.session.post(fleet.envoy.url + "/v1/x", data=b"{}", headers=headers) as response:
        answer = await response.json()
    assert answer["server"] == fleet.addresses[0]
    assert header(answer, "x-gateway-destination-endpoint") == [fleet.addresses[0]]


async def test_a_body_above_the_pickers_limit_is_413(fleet: Any) -> None:
    server = await fleet.start_picker(max_body_bytes=100_000)
    await fleet.start_envoy(f"127.0.0.1:{server.port}", mode="FULL_DUPLEX_STREAMED")
    status, answer = await fleet.post(b'"' + b"x" * 200_000 + b'"')
    assert (status, answer["error"]["code"]) == (413, "request_too_large")


# --- routing


async def test_requests_go_where_the_picker_says(routed: Any) -> None:
    for address in [*routed.addresses, *reversed(routed.addresses)]:
        status, answer = await routed.post(b'{"a": 1}', test_epp_endpoint_selection=address)
        assert (status, answer["server"]) == (200, address)
        assert header(answer, "x-from-picker") == ["yes"]
    _, answer = await routed.post()
    assert (await routed.post())[1]["server"] != answer["server"], "round robin without the header"


async def test_get_is_routed(routed: Any) -> None:
    url = routed.envoy.url + "/v1/models?limit=3"
    headers = {"test-epp-endpoint-selection": routed.addresses[1]}
    async with routed.session.get(url, headers=headers) as response:
        answer = await response.json()
        assert response.headers["x-warmroute-endpoint"] == routed.addresses[1]
    assert (answer["server"], answer["path"]) == (routed.addresses[1], "/v1/models?limit=3")


async def test_a_post_without_a_body_is_routed(routed: Any) -> None:
    status, answer = await routed.post(b"", test_epp_endpoint_selection=routed.addresses[1])
    assert (status, answer["server"], answer["bytes"]) == (200, routed.addresses[1], 0)


@pytest.mark.parametrize("size", [1_000_000, 10_000_000])
async def test_large_bodies_arrive_intact(routed: Any, size: int) -> None:
    body = json.dumps({"prompt": "x" * size}).encode()
    status, answer = await routed.post(body)
    assert status == 200
    assert answer["md5"] == hashlib.md5(body).hexdigest()


async def test_a_body_is_replaced_when_the_decision_says_so(routed: Any) -> None:
    replaced = json.dumps({"longer": "than it was " * 20})
    status, answer = await routed.post(b'{"a": 1}', x_test_body=replaced)
    assert status == 200
    assert answer["md5"] == hashlib.md5(replaced.encode()).hexdigest()


async def test_a_chunked_body_is_routed(routed: Any) -> None:
    async def pieces() -> Any:
        for piece in (b'{"a":', b" 1", b"}"):
            yield piece
            await asyncio.sleep(0.02)

    headers = {"test-epp-endpoint-selection": routed.addresses[2]}
    async with routed.session.post(routed.envoy.url + "/v1/x", data=pieces(), headers=headers) as response:
        answer = await response.json()
    assert (answer["server"], answer["bytes"]) == (routed.addresses[2], 8)


async def test_the_first_member_of_the_list_is_taken_and_others_than_members_are_skipped(routed: Any) -> None:
    listed = f"203.0.113.1:8000,{routed.addresses[1]},{routed.addresses[0]}"
    for _ in range(3):
        status, answer = await routed.post(test_epp_endpoint_selection=listed)
        assert (status, answer["server"]) == (200, routed.addresses[1])
    status, answer = await routed.post(test_epp_endpoint_selection="203.0.113.1:8000")
    assert status == 200, "no member at all: round robin"


async def test_a_dead_member_is_passed_over_for_the_next_of_the_list(routed: Any) -> None:
    dead, second, third = routed.upstreams
    await dead.stop()
    for _ in range(3):
        status, answer = await routed.post(test_epp_endpoint_selection=f"{dead.address},{third.address}")
        assert (status, answer["server"]) == (200, third.address)
    request_id = header(answer, "x-request-id")[0]
    await routed.until(lambda: routed.decider.observed[request_id].ends, "the response is seen to end")
    assert routed.decider.observed[request_id].served == third.address, "the picker is told who served"
    status, answer = await routed.post(test_epp_endpoint_selection=dead.address)
    assert status == 200
    assert answer["server"] in (second.address, third.address)


async def test_many_requests_at_once(routed: Any) -> None:
    async def one(number: int) -> None:
        address = routed.addresses[number % 3]
        body = json.dumps({"n": number, "pad": "x" * (number * 50)}).encode()
        status, answer = await routed.post(body, test_epp_endpoint_selection=address)
        assert (status, answer["server"], answer["md5"]) == (200, address, hashlib.md5(body).hexdigest())

    await asyncio.gather(*(one(number) for number in range(200)))
    await routed.until(lambda: routed.server.service.open_streams == 0, "no open stream")
    assert routed.server.service.counts["finished"] == 200
    assert routed.server.service.counts["aborted"] == 0
    # The generated configuration ends streams without resetting them.
    assert await routed.envoy.stat("cluster.picker.upstream_rq_tx_reset") == 0


async def test_the_plain_listener_routes_without_the_picker(routed: Any) -> None:
    servers = []
    for _ in range(6):
        async with routed.session.post(routed.envoy.plain_url + "/v1/x", data=b"{}") as response:
            servers.append((await response.json())["server"])
    assert sorted(servers) == sorted(routed.addresses * 2)
    assert routed.server.service.counts["streams"] == 0


# --- subsets

HINT_HEADER = "x-test-subset"


def _hint_from_header(bootstrap: Any) -> None:
    """A header-to-metadata filter in front, as a gateway that knows its pools would set the hint."""
    for listener in bootstrap["static_resources"]["listeners"]:
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        manager["http_filters"].insert(
            0,
            {
                "name": "envoy.filters.http.header_to_metadata",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config",
                    "request_rules": [
                        {
                            "header": HINT_HEADER,
                            "on_header_present": {
                                "metadata_namespace": "envoy.lb.subset_hint",
                                "key": "x-gateway-destination-endpoint-subset",
                                "type": "STRING",
                            },
                            "remove": True,
                        }
                    ],
                },
            },
        )


@pytest.mark.parametrize("mode", MODES)
async def test_a_subset_hint_restricts_the_choice(fleet: Any, mode: str) -> None:
    server = await fleet.start_picker()
    await fleet.start_envoy(f"127.0.0.1:{server.port}", mode=mode, patch=_hint_from_header)
    allowed = fleet.addresses[1:]
    servers = {(await fleet.post(x_test_subset=",".join(allowed)))[1]["server"] for _ in range(6)}
    assert servers == set(allowed)
    async with fleet.session.post(
        fleet.envoy.url + "/v1/x", data=b"{}", headers={HINT_HEADER: "203.0.113.1:1"}
    ) as response:
        assert response.status == 503
        assert response.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
    status, answer = await fleet.post(x_test_subset=" , ")
    assert status == 503
    assert answer["error"]["type"] == "service_unavailable_error"


# --- responses


async def test_a_stream_is_forwarded_as_it_is_produced_and_observed(routed: Any) -> None:
    arrivals = []
    url = routed.envoy.url + "/v1/completions?events=5&gap=0.2"
    async with routed.session.post(url, data=b"{}", headers={"x-request-id": "stream-1"}) as response:
        assert response.headers["content-type"] == "text/event-stream"
        async for data in response.content.iter_any():
            arrivals.append((time.monotonic(), data))
    assert b"".join(data for _, data in arrivals) == b"".join(b"data: %d\n\n" % n for n in range(5))
    assert arrivals[-1][0] - arrivals[0][0] > 0.5, "not collected and sent at once"
    await routed.until(lambda: routed.decider.observed, "the decision is recorded")
    (seen,) = routed.decider.observed.values()
    await routed.until(lambda: seen.ends, "the response is seen to end")
    assert seen.ends == ["finished"]
    assert seen.body == b"".join(b"data: %d\n\n" % n for n in range(5))
    assert (seen.status, seen.served in routed.addresses) == (200, True)


async def test_a_client_that_goes_away_is_an_abort_and_reaches_the_model_server(routed: Any) -> None:
    url = routed.envoy.url + "/v1/completions?events=100&gap=0.1"
    async with routed.session.post(url, data=b"{}") as response:
        await response.content.readany()
        response.close()
    (seen,) = routed.decider.observed.values()
    await routed.until(lambda: seen.ends, "the abort is seen")
    assert seen.ends == ["ended-during-response"]
    await routed.until(lambda: sum(u.disconnects for u in routed.upstreams) == 1, "the model server is told")


async def test_a_client_that_goes_away_while_the_picker_decides_cancels_the_decision(routed: Any) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(routed.post(x_test_delay="30"), 0.5)
    await routed.until(lambda: routed.server.service.counts["decide_cancelled"] == 1, "the decision is cancelled")
    assert sum(upstream.requests for upstream in routed.upstreams) == 0
    ejections = await routed.envoy.stat("cluster.picker.outlier_detection.ejections_enforced_total")
    assert ejections == 0, "clients that give up must not look like a broken picker"


async def test_a_model_server_that_dies_in_its_answer_is_an_abort(routed: Any) -> None:
    url = routed.envoy.url + "/v1/completions?events=100&gap=0.1"
    headers = {"test-epp-endpoint-selection": routed.addresses[0]}
    async with routed.session.post(url, data=b"{}", headers=headers) as response:
        await response.content.readany()
        await routed.upstreams[0].stop()
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    (seen,) = routed.decider.observed.values()
    await routed.until(lambda: seen.ends, "the abort is seen")
    assert seen.ends == ["ended-during-response"]


async def test_a_response_that_need_not_be_seen_is_finished_when_it_is_over(
    routed: Any, request: pytest.FixtureRequest
) -> None:
    url = routed.envoy.url + "/v1/completions?events=3&gap=0.1"
    async with routed.session.post(url, data=b"{}", headers={"x-test-observe": "no"}) as response:
        (seen,) = routed.decider.observed.values()
        await routed.until(lambda: seen.status, "the headers are seen")
        assert seen.ends == []
        assert await response.read() == b"".join(b"data: %d\n\n" % n for n in range(3))
    await routed.until(lambda: seen.ends, "the end is seen")
    assert seen.ends == ["finished"]
    assert bool(seen.chunks) == ("duplex" in request.node.name), "Envoy overrides no mode where one is duplex"
