from fleet.fleet import Fleet
from fleet.plugin import Decider, Verdict
from fleet.request import Request


class AlwaysDisaggMultimodalDecider(Decider, type="always-disagg-multimodal-decider"):
    """Encode elsewhere whatever has images, audio or video.

    Use it as `deciders.encode`. A prompt that could not be tokenized counts as text.
    Source: llm-d-router always-disagg-multimodal-decider.
    """

    def decide(self, request: Request, decode: int, fleet: Fleet) -> Verdict:
        if request.prompt_tokens and request.multimodal:
            return Verdict(True, "multimodal")
        return Verdict(False, "text" if request.prompt_tokens else "no-tokens")
