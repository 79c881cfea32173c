"""Messages as Envoy sends them, and a decider to inject."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from gateway.extproc.decision import Decided, Head, Rejected

BUFFERED = ProcessingMode.BodySendMode.BUFFERED
DUPLEX = ProcessingMode.BodySendMode.FULL_DUPLEX_STREAMED
STREAMED = ProcessingMode.BodySendMode.STREAMED


class Messages:
    """ProcessingRequest builders."""

    BUFFERED, DUPLEX, STREAMED = BUFFERED, DUPLEX, STREAMED
    NONE = ProcessingMode.BodySendMode.NONE
    BUFFERED_PARTIAL = ProcessingMode.BodySendMode.BUFFERED_PARTIAL

    @staticmethod
    def _header_map(target: Any, headers: Sequence[tuple[str, str]]) -> None:
        for name, value in headers:
            target.headers.add(key=name, raw_value=value.encode())

    def head(
        self,
        mode: int | None = BUFFERED,
        *,
        end: bool = False,
        method: str = "POST",
        path: str = "/v1/completions",
        headers: Sequence[tuple[str, str]] = (),
        subset: Any = None,
        response_mode: int = STREAMED,
    ) -> Any:
        message = pb.ProcessingRequest()
        pseudo = [(":method", method), (":path", path), (":authority", "models.example")]
        self._header_map(message.request_headers.headers, [*pseudo, *headers])
        message.request_headers.end_of_stream = end
        if mode is not None:
            message.protocol_config.request_body_mode = mode
            message.protocol_config.response_body_mode = response_mode
        if subset is not None:
            namespace = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            namespace.update({"x-gateway-destination-endpoint-subset": subset})
        return message

    def body(self, data: bytes, end: bool = True) -> Any:
        return pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=end))

    def trailers(self) -> Any:
        return pb.ProcessingRequest(request_trailers={})

    def response(
        self, status: int = 200, *, end: bool = False, attribute: str | None = None, metadata: str | None = None
    ) -> Any:
        message = pb.ProcessingRequest()
        self._header_map(message.response_headers.headers, [(":status", str(status)), ("content-type", "a/b")])
        message.response_headers.end_of_stream = end
        if attribute is not None:
            message.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": attribute})
        if metadata is not None:
            message.metadata_context.filter_metadata["envoy.lb"].update(
                {"x-gateway-destination-endpoint-served": metadata}
            )
        return message

    def response_body(self, data: bytes, end: bool = False) -> Any:
        return pb.ProcessingRequest(response_body=pb.HttpBody(body=data, end_of_stream=end))

    def response_trailers(self) -> Any:
        return pb.ProcessingRequest(response_trailers={})


class Recorder:
    """A ResponseObserver that writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def response_headers(self, status: int, headers: Mapping[str, str], served: str | None) -> None:
        self.calls.append(("headers", status, dict(headers), served))

    def response_chunk(self, data: bytes) -> None:
        self.calls.append(("chunk", data))

    def finished(self) -> None:
        self.calls.append(("finished",))

    def aborted(self, reason: str) -> None:
        self.calls.append(("aborted", reason))

    @property
    def ends(self) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] in ("finished", "aborted")]


class ScriptedDecider:
    """Answers with what the test's function returns."""

    def __init__(self, answer: Callable[[Head, bytes], Awaitable[Decided | Rejected]]) -> None:
        self._answer = answer
        self.seen: list[tuple[Head, bytes]] = []

    async def decide(self, head: Head, body: bytes) -> Decided | Rejected:
        self.seen.append((head, body))
        return await self._answer(head, body)


@pytest.fixture
def messages() -> Messages:
    return Messages()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def scripted() -> type[ScriptedDecider]:
    return ScriptedDecider
