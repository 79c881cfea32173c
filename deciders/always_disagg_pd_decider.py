from fleet.fleet import Fleet
from fleet.plugin import Decider, Verdict
from fleet.request import Request


class AlwaysDisaggPdDecider(Decider, type="always-disagg-pd-decider"):
    """Always prefill elsewhere.

    Use it to measure the prefill pool, or where decode endpoints must not prefill at all.
    Source: llm-d-router always-disagg-pd-decider.
    """

    def decide(self, request: Request, decode: int, fleet: Fleet) -> Verdict:
        return Verdict(True, "always")
