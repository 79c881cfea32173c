from typing import Annotated

from msgspec import Meta

from deciders.held import held_tokens
from fleet import plugin
from fleet.fleet import Fleet
from fleet.plugin import Decider, Verdict
from fleet.request import Request


class IslBoundingPdDecider(Decider, type="isl-bounding-pd-decider"):
    """Decode endpoints prefill what is short, both in tokens and as a share of the prompt.

    Use it to move from Dynamo's conditional disaggregation with the same behaviour.
    Reads: the match of `prefixMatchInfoProducerName`; with `decodeBusyThreshold` the books and the KV capacity.
    Rule: missing = prompt - held; stay if missing < effIslThreshold and missing / prompt < effIslRatioThreshold. A decode
    endpoint whose reserved tokens with this request exceed decodeBusyThreshold of its capacity prefills nothing; an unknown
    capacity counts as calm.
    Source: Dynamo's policy `isl_bounding`, same rule and defaults.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        eff_isl_threshold: Annotated[int, Meta(ge=0, description="Missing tokens below which to stay.")] = 2048
        eff_isl_ratio_threshold: Annotated[
            float, Meta(ge=0, le=1, description="Missing share of the prompt below which to stay.")
        ] = 0.7
        decode_busy_threshold: Annotated[
            float | None,
            Meta(gt=0, description="Share of the KV capacity above which never to stay; off unless given."),
        ] = None
        prefix_match_info_producer_name: Annotated[
            str | None, Meta(description="Whose match to read; without it the default producer's.")
        ] = None

    parameters: Parameters

    def decide(self, request: Request, decode: int, fleet: Fleet) -> Verdict:
        prompt, limits = request.prompt_tokens, self.parameters
        if not prompt:
            return Verdict(False, "no-tokens")
        missing = prompt - (held_tokens(request, decode, limits.prefix_match_info_producer_name) or 0.0)
        numbers = {"prompt_tokens": float(prompt), "missing_tokens": missing, "missing_share": missing / prompt}
        if missing >= limits.eff_isl_threshold:
            return Verdict(True, "long", numbers)
        if missing / prompt >= limits.eff_isl_ratio_threshold:
            return Verdict(True, "mostly-uncached", numbers)
        if limits.decode_busy_threshold is not None and decode >= 0 and fleet.kv_capacity_tokens[decode] > 0:
            load = float((fleet.reserved_tokens[decode] + prompt) / fleet.kv_capacity_tokens[decode])
            numbers["decode_load"] = load
            if load > limits.decode_busy_threshold:
                return Verdict(True, "decode-busy", numbers)
        return Verdict(False, "short", numbers)
