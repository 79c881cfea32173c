import json
from collections.abc import Mapping

import pytest

from gateway import control_headers as control
from gateway.extproc.headers import CONTROL


def test_every_header_that_is_read_is_kept_from_the_engines() -> None:
    for names in (control.OBJECTIVE, control.FAIRNESS, control.REWRITE):
        assert set(names) <= set(CONTROL)


@pytest.mark.parametrize(
    ("headers", "objective"),
    [
        ({}, ""),
        ({"x-gateway-inference-objective": "old"}, "old"),
        ({"x-gateway-inference-objective": "old", "x-llm-d-inference-objective": " new "}, "new"),
        ({"x-gateway-inference-objective": "old", "x-llm-d-inference-objective": " "}, "old"),
    ],
)
def test_the_current_name_comes_before_its_alias(headers: Mapping[str, str], objective: str) -> None:
    assert control.objective(headers) == objective


def test_requests_without_a_fairness_id_are_one_flow() -> None:
    assert control.fairness_id({}) == "default-flow"
    assert control.fairness_id({"x-gateway-inference-fairness-id": "team-a"}) == "team-a"
    assert control.fairness_id({"x-gateway-inference-fairness-id": "team-a"}, "agent-1") == "team-a"
    assert control.fairness_id({}, "agent-1") == "agent-1"


@pytest.mark.parametrize(
    ("prefer", "wanted"),
    [("if-available", True), ("respond-async, If-Available", True), ("", False), ("not-if-available", False)],
)
def test_prefer_is_a_list_of_words(prefer: str, wanted: bool) -> None:
    assert control.wants_prefix({"prefer": prefer}) is wanted


def test_another_model_leaves_every_other_byte_as_it_was() -> None:
    body = b'{"messages": [ {"content":"\\u00e9 1.0e2"} ],"model" : "a", "temperature":1.0}'
    changed = control.with_model(body, 'b"c')
    assert changed is not None
    assert b'[ {"content":"\\u00e9 1.0e2"} ]' in changed
    assert json.loads(changed) == {**json.loads(body), "model": 'b"c'}


def test_a_body_without_a_model_gets_one() -> None:
    assert control.with_model(b"{}", "m") == b'{"model":"m"}'


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"text"', b"\xff"])
def test_what_is_no_object_is_left_to_whoever_parses_it(body: bytes) -> None:
    assert control.with_model(body, "m") is None
