from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest

from fleet.fleet import Fleet
from fleet.request import Request

Make = Callable[..., Any]
Ask = Callable[..., Request]


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ({}, None),
        ({"x-claude-code-session-id": "  ", "authorization": "Bearer x"}, None),
        ({"session_id": "d"}, "d"),
        ({"session-id": "c", "session_id": "d"}, "c"),
        ({"x-session-affinity": " b ", "session-id": "c"}, "b"),
        ({"x-claude-code-session-id": "a", "x-session-affinity": "b"}, "a"),
        ({"x-claude-code-session-id": "", "x-session-affinity": "b"}, "b"),
    ],
)
def test_the_first_header_that_says_something_is_the_agent(
    make: Make, headers: Mapping[str, str], found: str | None
) -> None:
    assert make("agent-identity").read(headers) == found


def test_additional_headers_come_first_in_their_order_and_any_capitalisation(make: Make) -> None:
    reader = make("agent-identity", additional_session_headers=("X-Run", "x-Team"))
    assert reader.read({"x-team": "t", "x-run": "r", "x-claude-code-session-id": "a"}) == "r"
    assert reader.read({"x-team": "t", "x-claude-code-session-id": "a"}) == "t"
    assert reader.read({"x-claude-code-session-id": "a"}) == "a"


@pytest.mark.parametrize("type_", ["session-affinity-scorer", "session-affinity-filter"])
def test_session_affinity_goes_by_the_agent_where_it_is_told_to(fleet: Fleet, make: Make, ask: Ask, type_: str) -> None:
    kind = type(make(type_)).Parameters
    config = {"sources": [{"attribute": "agent-identity"}, {"header": "x-session-id"}]}
    parameters = {"strategy": "session_id", "sessionIdConfig": config}
    plugin = type(make(type_))("a", msgspec.convert(parameters, kind))
    agent = ask(attributes={"agent-identity": "claude-1"})
    plugin.picked(agent, {"default": np.array([2])}, fleet)
    assert plugin.bound(agent, fleet.slots(), fleet).tolist() == [False, False, True, False]
    assert not plugin.bound(ask(attributes={"agent-identity": "claude-2"}), fleet.slots(), fleet).any()
    assert not plugin.bound(ask(), fleet.slots(), fleet).any()
    assert plugin.bound(ask(headers={"x-session-id": "claude-1"}), fleet.slots(), fleet).any(), "the next source"
