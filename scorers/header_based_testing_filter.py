import numpy as np

from fleet.fleet import Fleet, Mask, Slots
from fleet.plugin import Filter
from fleet.request import Request

HEADER = "test-epp-endpoint-selection"


class HeaderBasedTestingFilter(Filter, type="header-based-testing-filter"):
    """For conformance tests only: keep the endpoints that the header `test-epp-endpoint-selection` names.

    With it a client chooses its destination; never configure it where clients are not trusted. The header holds ips or
    ip:port, separated by commas; without the header, or with an empty one, nothing is kept.
    Source: llm-d-router header-based-testing-filter.
    """

    def keep(self, request: Request, candidates: Slots, fleet: Fleet) -> Mask:
        wanted = {part.strip() for part in request.headers.get(HEADER, "").split(",") if part.strip()}
        addresses = [fleet.endpoint(slot).address for slot in candidates.tolist()]
        named = (address in wanted or address.rpartition(":")[0] in wanted for address in addresses)
        return np.fromiter(named, np.bool_, len(addresses))
