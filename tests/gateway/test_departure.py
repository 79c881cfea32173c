"""What a body becomes on its way out, and that nothing here ever costs a request."""

import json
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from fleet.request import Request
from gateway.commands.envoy import parameters
from gateway.config import DECISION_MARGIN_S, load_text
from gateway.cycle import Decision
from gateway.departure import LARGE_PROMPT, Departures, Placed
from gateway.extproc.decision import Decided, Head
from gateway.metrics import Metrics
from tokenization.tokenized import Tokenized

BODY = b'{"model": "m", "temperature": 1.10, "messages": []}'
HEAD = Head(method="POST", path="/v1/chat/completions", headers={}, request_id="r")


def prompt(tokens: int = 3, **changes: Any) -> Tokenized:
    return Tokenized(**{"token_ids": np.arange(tokens, dtype=np.uint32), "api": "chat", **changes})


def placed(**changes: Any) -> Placed:
    decision = Decision(
        primary="p", slots=(0,), destinations=("10.0.0.1:8000",), headers={}, response_headers={}, picks={}, runs={},
        verdicts={},
    )  # fmt: skip
    request = Request(id="r", model="m", target_model="m", path=HEAD.path)
    return Placed(request=request, decision=decision, destination=decision.destinations, **changes)


async def leave(body: bytes, tokens: Tokenized | None, start: Placed, parsed: Any = None) -> tuple[Decided, float]:
    metrics = Metrics(CollectorRegistry())
    departures = Departures(metrics, forward_token_ids=True)
    left = await departures.leave(HEAD, body, json.loads(body) if parsed is None else parsed, tokens, start)
    labels = {"forwarded": "yes"}
    return left, metrics.registry.get_sample_value("warmroute_token_ids_forwarded_total", labels) or 0.0


@pytest.mark.parametrize(
    "tokens",
    [
        None,
        prompt(source="estimate"),
        prompt(api="completions"),
        prompt(complete=False),
        prompt(batch=(np.arange(2, dtype=np.uint32),)),
    ],
)
async def test_ids_that_the_engine_would_not_use_are_not_sent(tokens: Tokenized | None) -> None:
    start = placed()
    assert await leave(BODY, tokens, start) == (start, 0.0)


async def test_a_body_that_only_python_can_read_leaves_as_it_came() -> None:
    body = b'{"model": "m", "messages": [], "seed": NaN}'
    start = placed()
    left, _ = await leave(body, prompt(), start)
    assert left is start


async def test_without_options_nothing_is_even_looked_at() -> None:
    start = placed()
    assert await Departures(Metrics(CollectorRegistry())).leave(HEAD, b"\xff", None, prompt(), start) is start


@pytest.mark.parametrize("tokens", [3, LARGE_PROMPT + 1])
async def test_ids_go_along_and_the_rest_keeps_its_bytes(tokens: int) -> None:
    left, counted = await leave(BODY, prompt(tokens), placed())
    assert left.body is not None
    assert json.loads(left.body)["kv_transfer_params"] == {"prompt_token_ids": list(range(tokens))}
    assert b"1.10" in left.body
    assert counted == 1


async def test_what_was_already_made_of_the_body_stays() -> None:
    renamed = BODY.replace(b'"m"', b'"other"')
    left, _ = await leave(renamed, prompt(), placed(body=renamed))
    assert left.body is not None
    assert json.loads(left.body)["model"] == "other"


def test_whoever_waits_for_a_decision_waits_for_its_prefill_leg_too() -> None:
    text = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: queue-scorer}]
warmroute: {handoff: {mode: %s, timeout: 30s}}
"""
    alone, gateway = load_text(text % "sidecar"), load_text(text % "gateway")
    assert gateway.decision_limit_s == alone.decision_limit_s + 30.0
    assert gateway.decision_limit_s >= DECISION_MARGIN_S + 30.0
    assert parameters(gateway, []).message_timeout_s > gateway.decision_limit_s
