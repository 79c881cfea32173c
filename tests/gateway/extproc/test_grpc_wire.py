"""gRPC's own bytes: whatever is cut anywhere comes out whole, and what is wrong is refused with gRPC's word for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.extproc.grpc_wire import MessageReader, Refused, Status, framed, timeout_s, trailers


def refused(reader: MessageReader, data: bytes) -> Status:
    with pytest.raises(Refused) as why:
        reader.feed(data)
    return why.value.status


def test_a_message_over_the_limit_is_refused_by_its_prefix_alone() -> None:
    assert refused(MessageReader(10), framed(b"x" * 11)[:5]) is Status.RESOURCE_EXHAUSTED
    assert MessageReader(10).feed(framed(b"x" * 10)) == [b"x" * 10]


def test_compression_that_nobody_announced_is_the_peers_fault_and_an_announced_one_is_not_supported() -> None:
    compressed = b"\1" + framed(b"abc")[1:]
    assert refused(MessageReader(10), compressed) is Status.INTERNAL
    assert refused(MessageReader(10, "gzip"), compressed) is Status.UNIMPLEMENTED
    assert MessageReader(10, "gzip").feed(framed(b"abc")) == [b"abc"], "not every message has to be compressed"


@given(st.lists(st.binary(max_size=300), max_size=8), st.data())
def test_messages_cut_anywhere_come_out_whole_and_in_order(messages: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(framed, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    reader = MessageReader(300)
    found: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += reader.feed(stream[start:end])
    assert found == messages
    assert not reader.inside


@given(st.binary(min_size=1, max_size=40), st.integers(1, 44))
def test_a_stream_that_ends_within_a_message_is_seen(message: bytes, missing: int) -> None:
    whole = framed(message)
    part = whole[: max(1, len(whole) - missing)]
    reader = MessageReader(100)
    assert reader.feed(part) == []
    assert reader.inside


@pytest.mark.parametrize(("text", "seconds"), [(b"1S", 1), (b"250m", 0.25), (b"2M", 120), (b"1H", 3600), (b"5u", 5e-6)])
def test_timeouts_are_read(text: bytes, seconds: float) -> None:
    assert timeout_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", [b"", b"1", b"S", b"123456789S", b"-1S", b"1.5S", b"1s"])
def test_what_is_no_timeout_is_refused(text: bytes) -> None:
    with pytest.raises(Refused, match="grpc-timeout"):
        timeout_s(text)


def test_messages_of_a_status_are_percent_encoded() -> None:
    assert trailers(Status.OK) == [(b"grpc-status", b"0")]
    fields = dict(trailers(Status.INTERNAL, "5 % of Käse\n, really"))
    assert fields == {b"grpc-status": b"13", b"grpc-message": b"5 %25 of K%C3%A4se%0A, really"}
