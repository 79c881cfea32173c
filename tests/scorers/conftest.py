"""A fleet and requests to score it with."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from fleet.plugin import Plugin, registered
from fleet.request import Match, Request

importlib.import_module("scorers")  # registers what is tested


@pytest.fixture
def fleet() -> Fleet:
    """Four endpoints e0..e3 in slots 0..3 and a clock that stands still at 100."""
    fleet = Fleet(clock=lambda: 100.0)
    for number in range(4):
        fleet.add(Endpoint(name=f"e{number}", address=f"10.0.0.{number}:8000"))
    return fleet


@pytest.fixture
def make() -> Callable[..., Any]:
    """make("queue-scorer", threshold=3): a plugin by type, its parameters by their Python names."""

    def build(type_: str, **parameters: Any) -> Plugin:
        kind = registered()[type_]
        return kind(type_, kind.Parameters(**parameters))

    return build


@pytest.fixture
def ask() -> Callable[..., Request]:
    """ask(1000, matched=[0, 512]): a request of so many tokens whose match per slot is given."""

    def build(tokens: int = 1024, matched: list[float] | None = None, block: int = 16, **fields: Any) -> Request:
        request = Request(id="r", model="m", target_model="m", path="/v1/completions", prompt_tokens=tokens, **fields)
        if matched is not None:
            vector = np.array(matched, float)
            total = tokens // block * block
            match = Match(tokens=vector, weighted_tokens=vector, total_tokens=total, block_tokens=block)
            request.matches, request.default_match = {"p": match}, "p"
        return request

    return build
