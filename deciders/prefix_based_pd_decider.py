from typing import Annotated

from msgspec import Meta

from deciders.held import held_tokens
from fleet import plugin
from fleet.fleet import Fleet
from fleet.plugin import Decider, Verdict
from fleet.request import Request


class PrefixBasedPdDecider(Decider, type="prefix-based-pd-decider"):
    """Prefill elsewhere when the decode endpoint lacks at least so many tokens of the prompt.

    For compatibility. A fixed threshold is the wrong shape of decision: 16 splits far too early, and what is right depends
    on batch, history and the prefill pool's queue. `cost-pd-decider` computes it.
    Reads: the match of `prefixMatchInfoProducerName`, unweighted.
    Rule: prompt - held >= nonCachedTokens, unless nonCachedTokens is 0 or the prompt is shorter than promptTokens or
    nonCachedTokens; never without tokens or without a match.
    Source: llm-d-router prefix-based-pd-decider, same rule; there it reads the approximate match only.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        non_cached_tokens: Annotated[
            int, Meta(ge=0, description="Missing tokens from which on to prefill elsewhere; 0: never.")
        ] = 0
        prompt_tokens: Annotated[int, Meta(ge=0, description="Shorter prompts stay; 0: no such limit.")] = 0
        prefix_match_info_producer_name: Annotated[
            str | None, Meta(description="Whose match to read; without it the default producer's.")
        ] = None

    parameters: Parameters

    def decide(self, request: Request, decode: int, fleet: Fleet) -> Verdict:
        limit, prompt = self.parameters.non_cached_tokens, request.prompt_tokens
        if not limit:
            return Verdict(False, "switched-off")
        if not prompt:
            return Verdict(False, "no-tokens")
        if prompt < self.parameters.prompt_tokens or prompt < limit:
            return Verdict(False, "short-prompt", {"prompt_tokens": prompt})
        held = held_tokens(request, decode, self.parameters.prefix_match_info_producer_name)
        if held is None:
            return Verdict(False, "no-match-data", {"prompt_tokens": prompt})
        numbers = {"prompt_tokens": prompt, "held_tokens": held, "threshold": limit}
        return Verdict(True, "uncached", numbers) if prompt - held >= limit else Verdict(False, "cached", numbers)
