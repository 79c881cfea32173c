"""The sockets of the grpc.aio transport: a peer that falls silent."""

import asyncio

import ngh2

from gateway.extproc.calls import Answers
from gateway.extproc.grpcio_transport import GrpcioTransport

PATH = "/test.Service/Listen"
HEADERS = [
    *((b":method", b"POST"), (b":scheme", b"http"), (b":path", PATH.encode()), (b":authority", b"x")),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
]


class Listener:
    def __init__(self, answers: Answers) -> None:
        self.over = asyncio.Event()

    def message(self, data: bytes) -> None:
        raise AssertionError("nobody says anything")

    def ended(self) -> None:
        self.over.set()

    def aborted(self) -> None:
        self.over.set()


async def test_a_silent_peer_is_given_up_with_its_calls() -> None:
    calls: asyncio.Queue[Listener] = asyncio.Queue()

    def service(answers: Answers) -> Listener:
        listener = Listener(answers)
        calls.put_nowait(listener)
        return listener

    transport = GrpcioTransport(
        {PATH: service}, max_message_bytes=1 << 20, max_concurrent_streams=100, ask_s=1.0, answer_s=0.5
    )
    port = await transport.start("127.0.0.1:0", None)
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        client = ngh2.Connection(ngh2.Role.CLIENT)
        client.initiate_connection()
        client.send_request(HEADERS)
        writer.write(client.data_to_send())
        call = await asyncio.wait_for(calls.get(), 5)
        assert not call.over.is_set()
        await asyncio.wait_for(call.over.wait(), 10)  # no ping is answered
        writer.close()
    finally:
        await transport.stop(0)
