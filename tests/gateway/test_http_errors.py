"""What failed connections are called, and how commands say it."""

import socket
import threading
from collections.abc import Callable, Iterator

import aiohttp
import pytest
from click.testing import CliRunner

from gateway.cli import cli
from gateway.http_errors import reason


async def failed(url: str) -> str:
    with pytest.raises(aiohttp.ClientError) as caught:
        async with aiohttp.ClientSession() as session, session.get(url):
            pass
    return reason(caught.value)


async def test_a_refused_plain_connection_says_nothing_of_tls(free_port: Callable[[], int]) -> None:
    assert await failed(f"http://127.0.0.1:{free_port()}/metrics") == "connection refused"


async def test_a_host_without_an_address_is_named() -> None:
    assert await failed("http://nowhere.invalid/metrics") == "no address is known for the host 'nowhere.invalid'"


@pytest.fixture
def answers() -> Iterator[Callable[[bytes], str]]:
    """Start something that answers every connection with given bytes; its host:port."""
    listeners: list[socket.socket] = []

    def start(answer: bytes) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve() -> None:
            connection, _ = listener.accept()
            connection.recv(65536)
            connection.sendall(answer)
            connection.close()

        threading.Thread(target=serve, daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        listener.close()


def top(*options: str) -> str:
    result = CliRunner().invoke(cli, ["top", "--once", *options])
    assert result.exit_code == 1
    return result.output


def test_top_at_somebody_elses_metrics_says_so_instead_of_showing_an_empty_fleet(
    answers: Callable[[bytes], str],
) -> None:
    page = b"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting 0\n"
    where = answers(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(page), page))
    said = top("--metrics", where)
    assert "not a gateway's metrics page" in said
    assert "warmroute.metricsPort" in said


def test_top_at_the_grpc_port_says_that_this_is_no_http(answers: Callable[[bytes], str]) -> None:
    said = top("--metrics", answers(b"\x00\x00\x18\x04\x00\x00\x00\x00\x00"))
    assert "does not speak HTTP/1.1" in said
    assert "\\x00" not in said


def test_top_where_nobody_listens_says_which_port_is_meant(free_port: Callable[[], int]) -> None:
    said = top("--metrics", f"127.0.0.1:{free_port()}")
    assert "connection refused; give --metrics the warmroute.metricsPort" in said
    assert "ssl" not in said
