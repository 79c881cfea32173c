"""The samples that are there only with a part."""

from collections import Counter

from fleet.books import Books
from fleet.breaker import Breaker
from fleet.fleet import Fleet
from gateway.parts import GatewayParts
from indexer.block_key import block_keys
from tokenization.segments import KeyChainCache


def transports(transport: tuple[str, str] | None) -> list[tuple[tuple[str, ...], float]]:
    fleet = Fleet()
    parts = GatewayParts(
        books=Books(fleet),
        breaker=Breaker(fleet),
        chains=KeyChainCache(block_keys),
        backends=dict,
        scraper=lambda: None,
        extproc=Counter,
        transport=lambda: transport,
        event_errors=lambda: 0,
    )
    return [(labels, value) for key, labels, value in parts.samples() if key == "extproc_transport"]


def test_before_the_server_is_there_nothing_is_said_of_a_transport() -> None:
    assert transports(None) == []


def test_the_transport_is_named_beside_the_one_that_is_configured() -> None:
    assert transports(("grpcio", "auto")) == [(("grpcio", "auto"), 1)]
