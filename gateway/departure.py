"""How a decided request leaves: as it came, or with what the engine is to be told in its body.

    decided --router's token ids?--> body --prefill leg?--> body with transfer parameters --> Envoy

Everything here happens after the books were charged, and may wait for a prefill leg: whoever gives up meanwhile (the
client, the deadline) releases what was reserved. A body that cannot be changed costs the change, never the request.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from deciders.handoff import NotAnObject, with_transfer, without_transfer
from fleet.request import Request
from gateway.cycle import Decision
from gateway.extproc.decision import ABORTED_UNSENT, Decided, Head
from gateway.handoff import Handoffs
from gateway.metrics import Metrics
from tokenization.handover import with_token_ids
from tokenization.tokenized import Tokenized

log = logging.getLogger(__name__)

LARGE_PROMPT = 32 * 1024
"""Tokens from which ids are written into a body in a worker thread."""


class Placed(Decided, frozen=True, kw_only=True):
    """A decision with what it was made from."""

    request: Request
    decision: Decision


class Departures:
    """Changes bodies. The event loop's thread owns it; replace `handoffs` and `forward_token_ids` to reconfigure."""

    def __init__(self, metrics: Metrics, handoffs: Handoffs | None = None, *, forward_token_ids: bool = False) -> None:
        self.handoffs = handoffs
        """None: sidecars do it, told by the decision's headers."""
        self.forward_token_ids = forward_token_ids
        self._metrics = metrics

    async def leave(
        self, head: Head, body: bytes, parsed: Mapping[str, Any] | None, prompt: Tokenized | None, placed: Placed
    ) -> Decided:
        """The decision as Envoy gets it. `parsed`: the body, None where it was not seen or is not JSON."""
        if self.handoffs is None and not self.forward_token_ids:
            return placed
        leaving: Decided = placed
        try:
            if self.forward_token_ids and parsed is not None and prompt is not None:
                leaving = await self._with_ids(body, parsed, prompt, placed)
            if self.handoffs is None:
                return leaving
            current = body if leaving.body is None else leaving.body
            if placed.decision.prefill is not None:
                whole = parsed is not None and not (prompt and prompt.batch)
                return await self.handoffs.carry_out(
                    head, current if whole else None, placed.request, placed.decision, leaving
                )
            clean = without_transfer(current) if parsed is not None else current
            return leaving if clean is current else msgspec.structs.replace(leaving, body=clean)
        except asyncio.CancelledError:
            if placed.observer is not None:
                placed.observer.aborted(ABORTED_UNSENT)
            raise
        except NotAnObject as error:  # JSON that Python's decoder takes and ours does not, such as NaN
            log.warning("body_unchanged request_id=%s error=%r", placed.request.id, str(error))
        except Exception:
            log.exception("body_unchanged request_id=%s", placed.request.id)
            if placed.decision.prefill is not None:
                self._metrics.handoffs.labels("local", "internal").inc()
        return leaving

    async def _with_ids(self, body: bytes, parsed: Mapping[str, Any], prompt: Tokenized, placed: Placed) -> Decided:
        told = with_token_ids(parsed, prompt)
        self._metrics.token_ids.labels("yes" if told else "no").inc()
        if told is None:
            return placed
        current, params = body if placed.body is None else placed.body, told["kv_transfer_params"]
        if len(prompt.token_ids) > LARGE_PROMPT:
            changed = await asyncio.to_thread(with_transfer, current, params)
        else:
            changed = with_transfer(current, params)
        return msgspec.structs.replace(placed, body=changed)
