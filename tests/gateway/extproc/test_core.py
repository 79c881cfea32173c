"""The ext-proc core without sockets."""

import json
from typing import Any

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from gateway.extproc import effects as kinds
from gateway.extproc import messages as wire
from gateway.extproc.core import Exchange, ProtocolError
from gateway.extproc.decision import Decided, Rejected
from gateway.extproc.effects import Aborted, CancelDecide, Close, Decide, Finished, Send
from gateway.extproc.errors import error_body

TO_A = Decided(destination=["10.0.0.1:8000"])


def sent(effects: list[kinds.Effect]) -> list[Any]:
    return [effect.message for effect in effects if isinstance(effect, Send)]


def asked(effects: list[kinds.Effect]) -> Decide:
    (decide,) = [effect for effect in effects if isinstance(effect, Decide)]
    return decide


def set_headers(mutation: Any) -> dict[str, bytes]:
    assert all(option.append_action == 2 for option in mutation.set_headers), "every setting must overwrite"
    assert not any(option.header.value for option in mutation.set_headers), "Envoy wants raw_value"
    return {option.header.key: option.header.raw_value for option in mutation.set_headers}


def buffered(messages: Any, decision: Decided, **head: Any) -> tuple[Exchange, Any]:
    """An exchange in BUFFERED mode up to its routing, and that answer's CommonResponse and message."""
    exchange = Exchange()
    exchange.received(messages.head(**head))
    asked(exchange.received(messages.body(b"{}")))
    (answer,) = sent(exchange.decided(decision))
    return exchange, answer


# --- rejecting


def test_a_body_larger_than_the_limit_is_413_before_it_is_buffered_when_its_length_is_declared(messages: Any) -> None:
    exchange = Exchange(max_body_bytes=10)
    effects = exchange.received(messages.head(headers=[("content-length", "11")]))
    (answer,) = sent(effects)
    assert answer.immediate_response.status.code == 413
    assert isinstance(effects[-1], Close)


@pytest.mark.parametrize("mode", ["BUFFERED", "DUPLEX"])
def test_a_body_larger_than_the_limit_is_413_when_its_length_is_not_declared(messages: Any, mode: str) -> None:
    exchange = Exchange(max_body_bytes=10)
    exchange.received(messages.head(getattr(messages, mode)))
    effects = exchange.received(messages.body(b"x" * 11, end=False))
    assert sent(effects)[0].immediate_response.status.code == 413
    assert exchange.received(messages.body(b"x" * 11)) == [], "what Envoy had already sent is not answered"


def test_a_rejection_is_an_openai_error_with_the_dropped_reason(messages: Any) -> None:
    exchange = Exchange()
    exchange.received(messages.head(headers=[("x-request-id", "r1")]))
    exchange.received(messages.body(b"{}"))
    effects = exchange.decided(
        Rejected(status=429, message="full", reason="rejected-saturated", headers={"Retry-After": "1"})
    )
    (answer,) = sent(effects)
    assert answer.immediate_response.status.code == 429
    assert json.loads(answer.immediate_response.body) == {
        "error": {"message": "full", "type": "rate_limit_error", "param": None, "code": None}
    }
    assert set_headers(answer.immediate_response.headers) == {
        "content-type": b"application/json",
        "retry-after": b"1",
        "x-request-id": b"r1",
        "x-llm-d-request-dropped-reason": b"rejected-saturated",
    }
    assert isinstance(effects[-1], Close)


def test_a_status_that_envoy_does_not_know_becomes_500() -> None:
    assert wire.immediate(Rejected(status=799, message="?")).immediate_response.status.code == 500


@pytest.mark.parametrize("hint", [[], "", " , ", 7, None, {"a": 1}, [3]])
def test_a_subset_hint_that_names_no_endpoint_is_503(messages: Any, hint: Any) -> None:
    message = messages.head(subset=[])
    namespace = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    namespace.update({"x-gateway-destination-endpoint-subset": hint})
    effects = Exchange().received(message)
    (answer,) = sent(effects)
    assert answer.immediate_response.status.code == 503
    headers = set_headers(answer.immediate_response.headers)
    assert headers["x-llm-d-request-dropped-reason"] == b"rejected-no-endpoints"


@pytest.mark.parametrize("hint", [["10.0.0.1:80", "10.0.0.2:80"], "10.0.0.1:80, 10.0.0.2:80,"])
def test_a_subset_hint_is_read_as_list_and_as_string(messages: Any, hint: Any) -> None:
    head = asked(Exchange().received(messages.head(subset=hint, end=True))).head
    assert head.subset == ("10.0.0.1:80", "10.0.0.2:80")


def test_without_a_subset_hint_every_endpoint_is_allowed(messages: Any) -> None:
    assert asked(Exchange().received(messages.head(end=True))).head.subset is None


def test_messages_that_cannot_come_are_protocol_errors(messages: Any) -> None:
    with pytest.raises(ProtocolError):
        Exchange().received(messages.body(b""))
    with pytest.raises(ProtocolError):
        Exchange().received(messages.trailers())
    exchange = Exchange()
    exchange.received(messages.head())
    with pytest.raises(ProtocolError):
        exchange.received(messages.head())
    with pytest.raises(ProtocolError, match="newer"):
        Exchange().received(pb.ProcessingRequest())


# --- routing


def test_buffered_routes_with_the_answer_to_the_body_and_leaves_its_bytes_alone(messages: Any) -> None:
    exchange = Exchange()
    (answer,) = sent(exchange.received(messages.head()))
    assert answer.WhichOneof("response") == "request_headers"
    decide = asked(exchange.received(messages.body(b'{"model": "m"}')))
    assert decide.body == b'{"model": "m"}'
    (answer,) = sent(exchange.decided(Decided(destination=["10.0.0.1:8000", "10.0.0.2:8000"], scores={"a": 0.5})))
    common = answer.request_body.response
    assert common.clear_route_cache
    assert not common.HasField("body_mutation")
    assert set_headers(common.header_mutation)["x-gateway-destination-endpoint"] == b"10.0.0.1:8000,10.0.0.2:8000"
    metadata = answer.dynamic_metadata["envoy.lb"]
    assert metadata["x-gateway-destination-endpoint"] == "10.0.0.1:8000,10.0.0.2:8000"
    assert metadata["x-gateway-destination-endpoint-scores"]["a"] == 0.5


def test_a_changed_body_gets_its_new_length_in_buffered_mode(messages: Any) -> None:
    _, answer = buffered(messages, Decided(destination=["a:1"], body=b"12345"))
    common = answer.request_body.response
    assert common.body_mutation.body == b"12345"
    assert set_headers(common.header_mutation)["content-length"] == b"5"


def test_duplex_answers_nothing_before_the_whole_body_and_then_headers_first(messages: Any) -> None:
    exchange = Exchange()
    assert exchange.received(messages.head(messages.DUPLEX)) == []
    assert exchange.received(messages.body(b"x" * 100_000, end=False)) == []
    decide = asked(exchange.received(messages.body(b"y" * 50_000)))
    assert decide.body == b"x" * 100_000 + b"y" * 50_000
    first, *pieces = sent(exchange.decided(TO_A))
    assert set_headers(first.request_headers.response.header_mutation) == {
        "x-gateway-destination-endpoint": b"10.0.0.1:8000",
        "x-request-id": decide.head.request_id.encode(),
    }
    echoed = [piece.request_body.response.body_mutation.streamed_response for piece in pieces]
    assert b"".join(piece.body for piece in echoed) == decide.body
    assert [len(piece.body) for piece in echoed] == [62_000, 62_000, 26_000]
    assert [piece.end_of_stream for piece in echoed] == [False, False, True]


@given(size=st.integers(0, 200_000), trailers=st.booleans())
def test_an_echo_is_complete_in_pieces_of_at_most_62000_bytes_with_one_end(size: int, trailers: bool) -> None:
    data = bytes(size)
    pieces = [
        m.request_body.response.body_mutation.streamed_response for m in wire.echo("request_body", data, not trailers)
    ]
    assert b"".join(p.body for p in pieces) == data
    assert all(len(p.body) <= 62_000 for p in pieces)
    assert [p.end_of_stream for p in pieces] == [False] * (len(pieces) - 1) + [not trailers]


def test_a_changed_body_in_duplex_loses_its_content_length(messages: Any) -> None:
    exchange = Exchange()
    exchange.received(messages.head(messages.DUPLEX))
    exchange.received(messages.body(b"old"))
    head, piece = sent(exchange.decided(Decided(destination=["a:1"], body=b"new!")))
    mutation = head.request_headers.response.header_mutation
    assert "content-length" in mutation.remove_headers
    assert "content-length" not in set_headers(mutation)
    assert piece.request_body.response.body_mutation.streamed_response.body == b"new!"


def test_duplex_with_trailers_ends_the_body_with_the_trailers(messages: Any) -> None:
    exchange = Exchange()
    exchange.received(messages.head(messages.DUPLEX))
    exchange.received(messages.body(b"abc", end=False))
    asked(exchange.received(messages.trailers()))
    head, piece, trailers = sent(exchange.decided(TO_A))
    assert head.WhichOneof("response") == "request_headers"
    assert not piece.request_body.response.body_mutation.streamed_response.end_of_stream
    assert trailers.WhichOneof("response") == "request_trailers"


def test_an_empty_body_in_duplex_is_echoed_as_one_empty_piece(messages: Any) -> None:
    exchange = Exchange()
    exchange.received(messages.head(messages.DUPLEX))
    assert asked(exchange.received(messages.body(b""))).body == b""
    _, piece = sent(exchange.decided(TO_A))
    assert piece.request_body.response.body_mutation.streamed_response.end_of_stream


@pytest.mark.parametrize("mode", ["BUFFERED", "DUPLEX"])
def test_a_get_is_decided_on_its_headers(messages: Any, mode: str) -> None:
    exchange = Exchange()
    head = messages.head(getattr(messages, mode), end=True, method="GET", path="/v1/models?x=1")
    decide = asked(exchange.received(head))
    assert (decide.head.method, decide.head.path, decide.head.authority) == ("GET", "/v1/models?x=1", "models.example")
    assert decide.body == b""
    assert decide.head.body_complete
    (answer,) = sent(exchange.decided(TO_A))
    assert answer.request_headers.response.clear_route_cache


def test_a_body_for_a_request_that_has_none_is_refused(messages: Any) -> None:
    exchange = Exchange()
    exchange.received(messages.head(end=True))
    with pytest.raises(ValueError, match="changes a body"):
        exchange.decided(Decided(destination=["a:1"], body=b"x"))


@pytest.mark.parametrize("mode", ["NONE", "STREAMED"])
def test_modes_that_show_no_body_in_time_are_decided_by_head_and_wave_the_body_through(
    messages: Any, mode: str
) -> None:
    exchange = Exchange()
    decide = asked(exchange.received(messages.head(getattr(messages, mode))))
    assert not decide.head.body_complete
    assert exchange.received(messages.body(b"early", end=False)) == [], "answers keep their order"
    routing, early = sent(exchange.decided(TO_A))
    assert routing.WhichOneof("response") == "request_headers"
    assert early == pb.ProcessingResponse(request_body={})
    (late,) = sent(exchange.received(messages.body(b"late")))
    assert late == pb.ProcessingResponse(request_body={})


def test_a_prefix_of_a_body_is_marked_as_incomplete(messages: Any) -> None:
    exchange = Exchange()
    exchange.received(messages.head(messages.BUFFERED_PARTIAL))
    assert not asked(exchange.received(messages.body(b'{"mod', end=False))).head.body_complete


def test_a_buffered_body_before_trailers_is_complete_without_end_of_stream(messages: Any) -> None:
    exchange = Exchange()
    exchange.received(messages.head())
    assert asked(exchange.received(messages.body(b"{}", end=False))).head.body_complete
    exchange.decided(TO_A)
    (answer,) = sent(exchange.received(messages.trailers()))
    assert answer.WhichOneof("response") == "request_trailers"


def test_a_proxy_that_does_not_say_its_mode_gets_the_default(messages: Any) -> None:
    exchange = Exchange(default_mode=messages.DUPLEX)
    assert exchange.received(messages.head(None)) == []


# --- headers


def test_a_client_never_sees_its_own_destination_used(messages: Any) -> None:
    spoofed = [("x-gateway-destination-endpoint", "6.6.6.6:1"), ("x-prefiller-host-port", "6.6.6.6:2")]
    exchange = Exchange()
    (first,) = sent(exchange.received(messages.head(headers=spoofed)))
    removed = first.request_headers.response.header_mutation.remove_headers
    assert set(removed) == {"x-gateway-destination-endpoint", "x-prefiller-host-port"}
    decide = asked(exchange.received(messages.body(b"{}")))
    assert "6.6.6.6" not in str(decide.head)
    (answer,) = sent(exchange.decided(Decided(destination=[])))
    mutation = answer.request_body.response.header_mutation
    assert {"x-gateway-destination-endpoint", "x-prefiller-host-port"} <= set(mutation.remove_headers)
    assert not answer.HasField("dynamic_metadata")


def test_removals_do_not_undo_what_the_decision_sets(messages: Any) -> None:
    decision = Decided(
        destination=["a:1"],
        set_headers={"X-Prefiller-Host-Port": "b:2", "x-gateway-destination-endpoint": "ignored:1"},
        remove_headers=["X-Own"],
    )
    _, answer = buffered(messages, decision)
    mutation = answer.request_body.response.header_mutation
    named = set_headers(mutation)
    assert named["x-prefiller-host-port"] == b"b:2"
    assert named["x-gateway-destination-endpoint"] == b"a:1"
    assert not set(named) & set(mutation.remove_headers)
    assert "x-own" in mutation.remove_headers


def test_control_headers_are_read_but_not_forwarded(messages: Any) -> None:
    exchange = Exchange()
    head = messages.head(end=True, headers=[("x-llm-d-inference-objective", "batch"), ("traceparent", "00-a-b-01")])
    decide = asked(exchange.received(head))
    assert decide.head.headers["x-llm-d-inference-objective"] == "batch"
    assert decide.head.headers["traceparent"] == "00-a-b-01"
    (answer,) = sent(exchange.decided(TO_A))
    mutation = answer.request_headers.response.header_mutation
    assert "x-llm-d-inference-objective" in mutation.remove_headers
    assert "traceparent" not in mutation.remove_headers


def test_a_missing_request_id_is_generated_and_forwarded_and_a_present_one_is_kept(messages: Any) -> None:
    exchange, answer = buffered(messages, TO_A)
    named = set_headers(answer.request_body.response.header_mutation)
    assert named["x-request-id"].decode() == exchange.request_id != ""
    exchange, answer = buffered(messages, TO_A, headers=[("x-request-id", "mine")])
    assert exchange.request_id == "mine"
    assert "x-request-id" not in set_headers(answer.request_body.response.header_mutation)


def test_repeated_headers_are_joined_and_broken_bytes_do_not_raise(messages: Any) -> None:
    message = messages.head(end=True, headers=[("accept", "a"), ("Accept", "b")])
    message.request_headers.headers.headers.add(key="x-bytes", raw_value=b"\xff")
    head = asked(Exchange().received(message)).head
    assert head.headers["accept"] == "a, b"
    assert head.headers["x-bytes"] == "\ufffd"


# --- the response


def observed(messages: Any, recorder: Any, **decision: Any) -> Exchange:
    exchange, _ = buffered(messages, Decided(destination=["a:1"], observer=recorder, **decision))
    return exchange


def test_only_end_of_stream_finishes(messages: Any, recorder: Any) -> None:
    exchange = observed(messages, recorder, response_headers={"X-Warmroute-Endpoint": "a:1"})
    answer, seen = exchange.received(messages.response(attribute="a:1"))
    assert isinstance(answer, Send)
    assert isinstance(seen, kinds.ResponseHeaders)
    assert set_headers(answer.message.response_headers.response.header_mutation) == {"x-warmroute-endpoint": b"a:1"}
    assert (seen.status, seen.served) == (200, "a:1")
    answer, chunk = exchange.received(messages.response_body(b"data"))
    assert answer == Send(pb.ProcessingResponse(response_body={}))
    assert chunk == kinds.ResponseChunk(recorder, b"data")
    _, end = exchange.received(messages.response_body(b"", end=True))
    assert end == Finished(recorder)
    assert exchange.ended() == []


def test_a_stream_that_ends_earlier_is_an_abort_once(messages: Any, recorder: Any) -> None:
    exchange = observed(messages, recorder)
    assert exchange.ended() == [Aborted(recorder, "ended-before-response")]
    assert exchange.ended() == []
    exchange = observed(messages, recorder)
    exchange.received(messages.response())
    exchange.received(messages.response_body(b"x"))
    assert exchange.ended() == [Aborted(recorder, "ended-during-response")]


def test_trailers_and_headers_alone_can_end_a_response(messages: Any, recorder: Any) -> None:
    exchange = observed(messages, recorder)
    assert exchange.received(messages.response(end=True))[-1] == Finished(recorder)
    exchange = observed(messages, recorder)
    exchange.received(messages.response())
    assert exchange.received(messages.response_trailers())[-1] == Finished(recorder)


def test_the_client_is_told_who_answered_where_the_gateway_went_on_to_a_fallback(messages: Any, recorder: Any) -> None:
    exchange = observed(messages, recorder, response_headers={"X-Warmroute-Endpoint": "a:1"})
    answer = exchange.received(messages.response(attribute="b:2"))[0]
    assert isinstance(answer, Send)
    told = set_headers(answer.message.response_headers.response.header_mutation)
    assert told == {"x-warmroute-endpoint": b"a:1", "x-warmroute-served-by": b"b:2"}


def test_nobody_is_told_who_answered_where_response_headers_are_off(messages: Any, recorder: Any) -> None:
    answer = observed(messages, recorder).received(messages.response(attribute="b:2"))[0]
    assert isinstance(answer, Send)
    assert set_headers(answer.message.response_headers.response.header_mutation) == {}


def test_a_response_that_is_not_observed_is_finished_when_its_stream_ends(messages: Any, recorder: Any) -> None:
    exchange = observed(messages, recorder, observe_response=False)
    answer, begun = exchange.received(messages.response())
    assert answer.message.mode_override.response_body_mode == messages.NONE
    assert isinstance(begun, kinds.ResponseHeaders)
    assert exchange.ended() == [Finished(recorder)]
    assert exchange.ended() == []


def test_a_response_that_is_not_observed_and_has_no_body_is_finished_with_its_headers(
    messages: Any, recorder: Any
) -> None:
    exchange = observed(messages, recorder, observe_response=False)
    assert exchange.received(messages.response(end=True))[-1] == Finished(recorder)


def test_nobody_to_observe_or_an_error_of_ours_is_an_abort_all_the_same(messages: Any, recorder: Any) -> None:
    exchange = observed(messages, recorder, observe_response=False)
    assert exchange.ended() == [Aborted(recorder, "ended-before-response")]
    exchange = observed(messages, recorder, observe_response=False)
    exchange.received(messages.response())
    assert exchange.ended("internal-error") == [Aborted(recorder, "internal-error")]


def test_a_gateway_that_ignores_the_override_is_answered_and_what_it_shows_is_observed(
    messages: Any, recorder: Any
) -> None:
    exchange = observed(messages, recorder, observe_response=False)
    exchange.received(messages.response())
    answer, chunk = exchange.received(messages.response_body(b"x"))
    assert isinstance(answer, Send)
    assert chunk == kinds.ResponseChunk(recorder, b"x")
    assert exchange.ended() == [Aborted(recorder, "ended-during-response")]


def test_a_duplex_response_is_echoed(messages: Any, recorder: Any) -> None:
    exchange, _ = buffered(messages, Decided(destination=["a:1"], observer=recorder), response_mode=messages.DUPLEX)
    exchange.received(messages.response())
    *pieces, chunk, end = exchange.received(messages.response_body(b"z" * 70_000, end=True))
    echoed = [piece.message.response_body.response.body_mutation.streamed_response for piece in pieces]
    assert [len(piece.body) for piece in echoed] == [62_000, 8_000]
    assert [piece.end_of_stream for piece in echoed] == [False, True]
    assert chunk.data == b"z" * 70_000
    assert end == Finished(recorder)


def test_the_gateways_word_on_who_served_wins_over_envoys_attribute(messages: Any, recorder: Any) -> None:
    exchange = observed(messages, recorder)
    _, seen = exchange.received(messages.response(attribute="b:2", metadata="c:3"))
    assert seen.served == "c:3"
    exchange = observed(messages, recorder)
    _, seen = exchange.received(messages.response())
    assert seen.served is None


# --- the end while deciding


def test_a_stream_that_ends_while_deciding_cancels_and_a_late_decision_is_aborted(messages: Any, recorder: Any) -> None:
    exchange = Exchange()
    exchange.received(messages.head(end=True))
    assert exchange.ended() == [CancelDecide()]
    late = Decided(destination=["a:1"], observer=recorder)
    assert exchange.decided(late) == [Aborted(recorder, "ended-before-forwarding")]
    assert exchange.decided(Rejected(status=503, message="")) == []


def test_a_response_of_the_proxys_own_ends_the_deciding(messages: Any) -> None:
    exchange = Exchange()
    exchange.received(messages.head(end=True))
    effects = exchange.received(messages.response(504))
    assert effects[0] == CancelDecide()
    assert effects[1] == Send(pb.ProcessingResponse(response_headers={}))
    assert exchange.decided(TO_A) == []


# --- any order of events


@given(st.data())
def test_whatever_the_proxy_sends_every_decision_gets_exactly_one_end(data: st.DataObject) -> None:
    mode = data.draw(st.sampled_from([0, 1, 2, 3, 4]))
    make = pb.ProcessingRequest

    def head() -> Any:
        message = make(request_headers={"end_of_stream": data.draw(st.booleans())})
        message.protocol_config.request_body_mode = mode
        message.protocol_config.response_body_mode = data.draw(st.sampled_from([0, 1, 4]))
        return message

    builders = {
        "head": head,
        "body": lambda: make(request_body={"body": b"{}", "end_of_stream": data.draw(st.booleans())}),
        "trailers": lambda: make(request_trailers={}),
        "response": lambda: make(response_headers={"end_of_stream": data.draw(st.booleans())}),
        "response_body": lambda: make(response_body={"body": b"r", "end_of_stream": data.draw(st.booleans())}),
        "response_trailers": lambda: make(response_trailers={}),
    }
    exchange, handed_over, ends = Exchange(), 0, 0
    wanted = False
    for step in data.draw(st.lists(st.sampled_from([*builders, "decide", "reject", "end"]), max_size=12)):
        try:
            if step == "decide":
                if not wanted:
                    continue
                wanted = False
                handed_over += 1
                effects = exchange.decided(Decided(destination=["a:1"], observer=object()))  # type: ignore[arg-type]
            elif step == "reject":
                wanted = False
                effects = exchange.decided(Rejected(status=503, message=""))
            elif step == "end":
                effects = exchange.ended()
            else:
                effects = exchange.received(builders[step]())
        except ProtocolError:
            effects = exchange.ended("protocol-error")
        wanted = wanted or any(isinstance(effect, Decide) for effect in effects)
        ends += sum(isinstance(effect, Aborted | Finished) for effect in effects)
    ends += sum(isinstance(effect, Aborted | Finished) for effect in exchange.ended())
    assert ends == handed_over


def test_an_answer_that_cannot_be_written_leaves_room_for_one_that_can(messages: Any) -> None:
    exchange = Exchange()
    asked(exchange.received(messages.head(end=True)))
    with pytest.raises(UnicodeEncodeError):
        exchange.decided(Rejected(status=404, message="x", headers={"x": "\ud800"}))
    assert exchange.decided(Rejected(status=500, message="internal error"))


def test_a_message_with_lone_surrogates_is_still_an_answer() -> None:
    assert b"no model ?" in error_body(404, "no model \ud800")
