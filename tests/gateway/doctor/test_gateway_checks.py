"""What the checks make of a gateway's page, without a gateway."""

import pytest

from fleet.endpoint import Endpoint
from gateway.doctor.facts import Gateway, Heard, Sample, Stream
from gateway.doctor.gateway_checks import _deaf

HERE = Endpoint(name="e", address="10.0.0.1:8000")
LABELS = {"endpoint": HERE.address, "rank": "0"}


def page(sequence: float) -> list[Sample]:
    return [Sample(name="warmroute_stream_sequence", labels=LABELS, value=sequence)]


class Looked:
    """Facts of one stream: what was heard, and the gateway's sequence before and after."""

    def __init__(self, newest: int, before: float | None, after: float) -> None:
        self.gateway = Gateway(
            where="", running=True, before=page(before) if before is not None else (), after=page(after)
        )
        self._stream = Stream(endpoint=HERE, heard=[Heard(topic="", seq=seq, batch=None) for seq in (1, newest)])

    def stream_of(self, endpoint: Endpoint) -> Stream:
        return self._stream


@pytest.mark.parametrize(
    ("newest", "before", "after"),
    [(5, 3, 3), (5, None, 3), (200, 10, 40)],
    ids=["it hears nothing", "nobody knows what it had", "it falls behind"],
)
def test_a_gateway_that_does_not_follow_is_said_to_lag(newest: int, before: float | None, after: float) -> None:
    (finding,) = _deaf(Looked(newest, before, after), HERE)  # type: ignore[arg-type]
    assert (finding.id, finding.where) == ("gateway-lags", "e")
    assert f"batch {newest} was heard here, the gateway has applied up to {after}" in finding.evidence


@pytest.mark.parametrize(
    ("newest", "before", "after"), [(169, 40, 166), (5, 3, 5)], ids=["a few are under way", "it has all"]
)
def test_a_gateway_that_follows_is_not_blamed_for_what_is_under_way(newest: int, before: float, after: float) -> None:
    assert list(_deaf(Looked(newest, before, after), HERE)) == []  # type: ignore[arg-type]
