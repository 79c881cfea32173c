import math
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from deciders.step_cost import POINTS, TABLES, StepCost
from fleet import plugin
from fleet.endpoint import Role
from fleet.extremes import smallest
from fleet.fleet import Fleet
from fleet.plugin import Decider, Verdict
from fleet.request import Request
from fleet.work import cached_tokens

PREFILLS = frozenset({Role.PREFILL, Role.ENCODE_PREFILL, Role.PREFILL_DECODE, Role.BOTH, Role.ENCODE_PREFILL_DECODE})
TPOT_HEADERS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")


class CostPdDecider(Decider, type="cost-pd-decider"):
    """Prefill where the first token comes sooner, as long as the decode endpoint's other requests can bear it.

    The recommended decider. Local cost: the decode endpoint's own backlog and
    delta = LIN(n + b) - LIN(b) + attention(n, h) for n missing tokens after h held ones in a batch of b decodes; every
    decode of the batch waits for delta once. Remote cost: the least over prefill endpoints of backlog + the prefill of what
    that one lacks, then set-up and the transfer of the n tokens.
    Rule: missing <= floorTokens stays. If delta exceeds the slack, prefill elsewhere, unless that takes patienceMs longer.
    Otherwise whichever is sooner. Slack is what the reply's token time leaves (header x-llm-d-slo-tpot-ms, else
    tpotTargetMs) after the batch's present step, or tpotSlackMs where no target is known.
    Where the chat template rewrites history a short tail does not mean a continued conversation: no floor then.
    Reads: the match of `prefixMatchInfoProducerName` with prompts on their way, the books.
    Source: measured tables in deciders/step_cost.py; ours.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        model: Annotated[
            Literal["8b-h100-tp1", "70b-h100-tp4", "70b-h100-tp8", "8b-h200-tp1"],
            Meta(description="The table of constants to start from."),
        ] = "8b-h100-tp1"
        linear_ms: Annotated[
            dict[int, float] | None, Meta(description="Your own table: tokens of a step -> ms, attention aside.")
        ] = None
        layers: Annotated[int | None, Meta(gt=0, description="Layers of the model; the table's unless given.")] = None
        heads: Annotated[int | None, Meta(gt=0, description="Query heads per GPU; the table's unless given.")] = None
        kv_bytes_per_token: Annotated[
            int | None, Meta(gt=0, description="Over all GPUs; the table's unless given.")
        ] = None
        bandwidth_gigabytes: Annotated[
            float, Meta(gt=0, description="KV transfer, GB/s: NVLink 600, NDR 40, RoCE-200 20, 100 GbE 10.")
        ] = 40.0
        setup_ms: Annotated[float, Meta(ge=0, description="Per hand-off: handshake and the second request.")] = 1.0
        tpot_slack_ms: Annotated[
            float, Meta(ge=0, description="By how much the decode batch may be delayed once, without a target.")
        ] = 5.0
        tpot_target_ms: Annotated[
            float | None, Meta(gt=0, description="Time per output token to keep; the request's header overrides it.")
        ] = None
        patience_ms: Annotated[
            float, Meta(ge=0, description="How much later a first token may come to spare the decode batch.")
        ] = 2000.0
        floor_tokens: Annotated[int, Meta(ge=0, description="So few missing tokens are never handed off.")] = 64
        prefix_match_info_producer_name: Annotated[
            str | None, Meta(description="Whose match to read; without it the default producer's.")
        ] = None

        def __post_init__(self) -> None:
            if self.linear_ms is not None:
                tokens = list(self.linear_ms)
                if len(tokens) < 2 or tokens != sorted(tokens) or tokens[0] < 1 or min(self.linear_ms.values()) <= 0:
                    raise ValueError(
                        "linearMs: expected at least two points with rising tokens and positive milliseconds, such as "
                        f"{{1: 5.0, {POINTS[-1]}: 308}}"
                    )

        def constants(self) -> StepCost:
            """The table with what is overridden."""
            table = TABLES[self.model]
            return StepCost(
                points=tuple(self.linear_ms or table.points),
                linear_ms=tuple(self.linear_ms.values()) if self.linear_ms else table.linear_ms,
                layers=self.layers or table.layers,
                heads=self.heads or table.heads,
                decode_ms=table.decode_ms,
                other_ms=table.other_ms,
                kv_bytes=self.kv_bytes_per_token or table.kv_bytes,
            )

    parameters: Parameters

    def __init__(self, name: str, parameters: Parameters) -> None:
        super().__init__(name, parameters)
        self._cost = parameters.constants()
        self._prefill = self._cost.prefill
        self._transfer_ms = self._cost.kv_bytes / (parameters.bandwidth_gigabytes * 1e9) * 1e3

    def decide(self, request: Request, decode: int, fleet: Fleet) -> Verdict:
        prompt, limits, cost = float(request.prompt_tokens), self.parameters, self._cost
        if not prompt:
            return Verdict(False, "no-tokens")
        if decode < 0:
            return Verdict(True, "nothing-picked")
        # Over all slots, as they stand in the books: reading a few out is dearer than arithmetic on all.
        cached = cached_tokens(request, None, fleet, limits.prefix_match_info_producer_name)
        held = cached.item(decode)
        missing = prompt - held
        numbers = {"prompt_tokens": prompt, "missing_tokens": missing}
        if missing <= limits.floor_tokens and not request.rewrites_history:
            return Verdict(False, "few-tokens", numbers)

        backlog = self._prefill.backlog(fleet, None, fleet.clock())
        remote = backlog + self._prefill.of_prompt(prompt, cached)
        remote[decode] = np.inf  # also where it prefills too: nothing would be handed over
        # Those that the prefill profile may choose from: endpoints of other models, say, are no alternative.
        allowed = fleet.available() if request.candidates is None else request.candidates
        prefills = allowed[fleet.role_mask(PREFILLS)[allowed]]
        soonest = smallest(remote[prefills]) if len(prefills) else np.inf
        if soonest == np.inf:
            return Verdict(False, "no-prefill-endpoint", numbers)
        batch = fleet.decoding.item(decode)
        delta = cost.append(missing, held, batch)
        local = backlog.item(decode) * 1e3 + delta
        transfer = limits.setup_ms + missing * self._transfer_ms
        best = soonest * 1e3 + transfer
        slack = self._slack(request, batch, fleet.decode_tokens.item(decode))
        numbers |= {
            "batch": batch,
            "delta_ms": delta,
            "slack_ms": slack,
            "local_ms": local,
            "remote_ms": best,
            "transfer_ms": transfer,
        }
        if batch and delta > slack:
            if best - local > limits.patience_ms:
                return Verdict(False, "prefill-pool-behind", numbers)
            return Verdict(True, "spares-decodes", numbers)
        return Verdict(True, "sooner-elsewhere", numbers) if best < local else Verdict(False, "sooner-here", numbers)

    def _slack(self, request: Request, batch: float, context: float) -> float:
        target = self.parameters.tpot_target_ms
        for header in TPOT_HEADERS:
            if (said := request.headers.get(header)) is None:
                continue
            try:
                asked = float(said)
            except ValueError:
                continue  # the client's header, not ours to trip over; the configured target stands
            if 0 < asked < math.inf:
                target = asked
                break
        if target is None:
            return self.parameters.tpot_slack_ms
        return max(0.0, target - self._cost.decode_step(batch, context))
