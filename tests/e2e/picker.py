"""A small endpoint picker for the end-to-end tests: round robin, or whatever the request's headers ask for.

Run as a program (`python picker.py PORT ENDPOINT...`) it is the picker that a test may kill.
"""

import asyncio
import itertools
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.extproc.decision import NO_ENDPOINTS, Decided, Head, Rejected
from gateway.extproc.grpc_server import Server, ServerSettings
from gateway.extproc.server_tls import TlsFiles


class Observed:
    """What one response's observer was told."""

    def __init__(self) -> None:
        self.status = 0
        self.served: str | None = None
        self.body = b""
        self.chunks = 0
        self.ends: list[str] = []

    def response_headers(self, status: int, headers: Mapping[str, str], served: str | None) -> None:
        self.status, self.served = status, served

    def response_chunk(self, data: bytes) -> None:
        self.body += data
        self.chunks += 1

    def finished(self) -> None:
        self.ends.append("finished")

    def aborted(self, reason: str) -> None:
        self.ends.append(reason)


class HeaderDecider:
    """Obeys `test-epp-endpoint-selection` (the conformance suite's header) and x-test-*; else round robin."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self.endpoints = list(endpoints)
        self.heads: dict[str, Head] = {}
        self.observed: dict[str, Observed] = {}
        self._turns = itertools.count()

    async def decide(self, head: Head, body: bytes) -> Decided | Rejected:
        self.heads[head.request_id] = head
        if delay := head.headers.get("x-test-delay"):
            await asyncio.sleep(float(delay))
        if body:
            try:
                json.loads(body)
            except ValueError as error:
                return Rejected(status=400, message=f"the body is not JSON: {error}", code="invalid_json")
        allowed = [name for name in self.endpoints if head.subset is None or name in head.subset]
        if not allowed:
            return Rejected(status=503, message="no endpoint is allowed and known", reason=NO_ENDPOINTS)
        if named := head.headers.get("test-epp-endpoint-selection"):
            destination = named.split(",")
        else:
            destination = [allowed[next(self._turns) % len(allowed)]]
        observer = self.observed[head.request_id] = Observed()
        return Decided(
            destination=destination,
            body=head.headers["x-test-body"].encode() if "x-test-body" in head.headers else None,
            set_headers={"x-from-picker": "yes"},
            response_headers={"x-warmroute-endpoint": destination[0]},
            observe_response=head.headers.get("x-test-observe") != "no",
            observer=observer,
        )


async def main(port: int, endpoints: Sequence[str], **changes: Any) -> None:
    """Serve until SIGTERM, then drain."""
    settings = ServerSettings(address=f"127.0.0.1:{port}", drain_s=2.5, grace_s=10.0, **changes)
    server = Server(HeaderDecider(endpoints), settings)
    await server.start()
    await server.set_serving(True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.drain()


if __name__ == "__main__":
    changes: dict[str, Any] = {"transport": sys.argv.pop(1)}
    if sys.argv[1] == "--tls":
        directory = Path(sys.argv[2])
        changes["tls"] = TlsFiles(certificate=directory / "tls.crt", key=directory / "tls.key")
        del sys.argv[1:3]
    asyncio.run(main(int(sys.argv[1]), sys.argv[2:], **changes))
