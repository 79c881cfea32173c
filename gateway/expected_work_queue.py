"""The plugin `expected-work-queue`: the router queue's parameters, and which scorer prices its prompts."""

from typing import Annotated

from msgspec import Meta

from fleet import plugin
from fleet.fleet import Fleet
from fleet.plugin import Plugin
from gateway.config_decode import Duration
from gateway.work_queue import Limits, Order, WorkQueue
from scorers.expected_work_scorer import ExpectedWorkScorer


class ExpectedWorkQueue(Plugin, type="expected-work-queue"):
    """Let prompts wait in the router while the endpoint that suits them best has no room.

    If the best endpoint already has 0.3 s of prefill waiting, or its KV memory would pass 90%, the prompt waits in the router,
    and the first in line that fits goes next. While the fleet keeps up nothing ever waits; in overload a prompt that does
    not fit no longer blocks those that do, and time to first token falls by half or more.
    Naming it in `plugins:` switches it on; profiles do not refer to it. It needs an `expected-work-scorer`, whose constants
    price the prompts; both are on where neither profiles nor scorers are written.
    Order: higher priority first, then the flow (fairness id) that was served least, then the oldest that fits (`backfill`) or
    the one with the least work, less `alpha` seconds per second waited (`shortest`: better means, longer worst waits).
    Clients see 429 with Retry-After where the queue is full (`rejected-saturated`, `evicted-queue-pressure`) or `maxWait` is
    over (`rejected-ttl-expired`), and 503 `rejected-shutting-down`. Prompts of unknown length never wait. Envoy must wait
    longer than `maxWait`: generate its configuration again after a change.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        open_threshold: Annotated[
            Duration, Meta(gt=0, description="An endpoint that owes less prefill takes the next prompt.")
        ] = 0.3
        kv_limit: Annotated[
            float, Meta(gt=0, le=2, description="Share of an endpoint's KV cache that may be promised to requests.")
        ] = 0.9
        order: Annotated[Order, Meta(description="Who goes first of those that fit.")] = "backfill"
        alpha: Annotated[
            float, Meta(ge=0, description="For `shortest`: seconds of work that a second of waiting outweighs.")
        ] = 0.05
        max_requests: Annotated[int, Meta(gt=0, description="Requests that may wait.")] = 1024
        max_wait: Annotated[Duration, Meta(gt=0, description="How long a request may wait.")] = 30.0
        expected_output_tokens: Annotated[
            int, Meta(gt=0, description="Assumed length of a reply; a smaller limit of the client's counts instead.")
        ] = 400
        fairness: Annotated[
            bool, Meta(description="Share fairly between flows (fairness id), by seconds of prefill.")
        ] = True
        scorer_name: Annotated[
            str | None, Meta(description="Which expected-work-scorer prices prompts; needed where there are several.")
        ] = None

    parameters: Parameters

    def queue(self, fleet: Fleet, scorer: ExpectedWorkScorer) -> WorkQueue:
        """An empty queue with these parameters."""
        given = self.parameters
        limits = Limits(
            open_s=given.open_threshold,
            kv_limit=given.kv_limit,
            order=given.order,
            alpha=given.alpha,
            max_requests=given.max_requests,
            max_wait_s=given.max_wait,
            expected_output=float(given.expected_output_tokens),
            fairness=given.fairness,
        )
        return WorkQueue(fleet, scorer, limits)
