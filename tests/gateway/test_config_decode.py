from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config_decode import Decoder, Duration, Path, Quantity, amount, seconds
from gateway.config_source import read


class Inner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    size: Annotated[int, msgspec.Meta(ge=1)] = 1
    name: str


class Outer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    max_ttft: float = msgspec.field(name="maxTTFT", default=0.0)
    timeout: Duration = 1.0
    bytes: Quantity | None = None
    mode: Literal["fast", "slow"] = "fast"
    inner: list[Inner] = []
    by_name: dict[str, Inner] = {}
    file: Path | None = None
    either: int | str = 0

    def __post_init__(self) -> None:
        if self.mode == "slow" and self.timeout < 1:
            raise ValueError("slow needs a timeout of at least 1s")


def decode(text: str, any_case: bool = False) -> tuple[Outer | None, list[str]]:
    source = read(text, "dir/a.yaml")
    decoder = Decoder(source)
    return decoder.decode(source.value, Outer, (), any_case=any_case), [str(problem) for problem in decoder.problems]


def test_every_problem_is_reported_with_its_own_line() -> None:
    value, problems = decode("timeuot: 1s\nbytes: 10Xi\nmode: fats\ninner:\n- {size: 0, name: a}\n- {}\neither: []\n")
    assert value is None
    assert problems == [
        "dir/a.yaml:1: timeuot: not a known key; did you mean 'timeout'?",
        "dir/a.yaml:2: bytes: expected a quantity such as '10Gi', '5k' or 5000, got '10Xi'",
        "dir/a.yaml:3: mode: expected one of 'fast', 'slow', got 'fats'; did you mean 'fast'?",
        "dir/a.yaml:5: inner[0].size: expected int >= 1: 0",
        "dir/a.yaml:6: inner[1]: 'name' is missing",
        "dir/a.yaml:7: either: expected a whole number or text, got a list",
    ]


def test_a_wrong_shape_says_what_was_expected() -> None:
    assert decode("[1]")[1] == ["dir/a.yaml:1: expected a mapping, got a list"]
    assert decode("inner: 3")[1] == ["dir/a.yaml:1: inner: expected a list, got 3"]
    assert decode("byName: [1]")[1] == ["dir/a.yaml:1: byName: expected a mapping, got a list"]


def test_a_structs_own_rule_is_a_problem_at_the_struct() -> None:
    assert decode("mode: slow\ntimeout: 10ms")[1] == ["dir/a.yaml:1: slow needs a timeout of at least 1s"]


class Limits(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    window_ms: int = 1
    port: int | None = None
    share: float = 0.0
    safe: bool = True
    seed: str | None = None
    names: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("a",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("windowMs: 100ms", "windowMs: expected a whole number of milliseconds, without a unit, got '100ms'"),
        ("port: '9090'", "port: expected a whole number, got '9090'; write it without quotes"),
        ("port: 1.5", "port: expected a whole number, got 1.5"),
        ("share: half", "share: expected a number, got 'half'"),
        ("safe: yes", "safe: expected true or false, got 'yes'"),
        ("seed: 42", "seed: expected text, got 42; write it in quotes"),
        ("names: []", "names: expected a list of at least 1, got an empty one"),
    ],
)
def test_a_value_of_another_type_is_told_in_words_and_with_its_unit(text: str, message: str) -> None:
    decoder = Decoder(source := read(text, "a.yaml"))
    assert decoder.decode(source.value, Limits, ()) is None
    assert [str(problem) for problem in decoder.problems] == [f"a.yaml:1: {message}"]


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    items: list[dict[str, int]]

    def __post_init__(self) -> None:
        raise ValueError("items[1].port: already taken\nitems[0]: odd\nitems are: no path")


def test_what_a_structs_own_rule_says_of_a_key_is_a_problem_on_the_line_of_that_key() -> None:
    decoder = Decoder(source := read("items:\n- {port: 1}\n- name: 3\n  port: 1\n", "a.yaml"))
    assert decoder.decode(source.value, Pair, ()) is None
    assert [str(problem) for problem in decoder.problems] == [
        "a.yaml:4: items[1].port: already taken",
        "a.yaml:2: items[0]: odd",
        "a.yaml:1: items are: no path",
    ]


def test_numbers_do_not_pass_for_durations() -> None:
    assert "expected a duration" in decode("timeout: 5")[1][0]


def test_key_case_matters_in_the_document_and_not_in_parameters() -> None:
    assert decode("maxttft: 1.5")[1] == ["dir/a.yaml:1: maxttft: not a known key; did you mean 'maxTTFT'?"]
    value, problems = decode("maxttft: 1.5\nINNER: [{Name: x}]", any_case=True)
    assert not problems
    assert value is not None
    assert (value.max_ttft, value.inner[0].name) == (1.5, "x")


def test_one_field_spelled_in_two_ways_is_an_error() -> None:
    assert "already given as 'mode'" in decode("mode: fast\nMode: slow", any_case=True)[1][0]


def test_null_leaves_the_default() -> None:
    value, problems = decode("timeout:\ninner:\nbytes:\n")
    assert not problems
    assert value == Outer()


def test_formats_are_read() -> None:
    value, _ = decode("timeout: 1m30s\nbytes: 10Gi\nfile: ../models\neither: x\nbyName: {a: {name: b}}")
    assert value is not None
    assert (value.timeout, value.bytes, value.file, value.either) == (90.0, 10 * 2**30, "models", "x")
    assert value.by_name["a"].name == "b"


def test_salvaging_keeps_what_is_fine_and_reports_the_rest() -> None:
    source = read("timeout: 3\nmode: slow\ninner:\n- {name: a, size: 0}\n- {size: 1}\n- {name: c}\n", "a.yaml")
    decoder = Decoder(source)
    value = decoder.salvage(source.value, Outer, ())
    assert len(decoder.problems) == 3
    assert value is not None
    assert value.mode == "slow"
    assert value.timeout == 1.0
    assert [item and item.name for item in value.inner] == ["a", None, "c"]


@pytest.mark.parametrize("text", ["", "5", "5x", "s", "1s1", "1 s", "--1s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a duration"):
        seconds(text)


@pytest.mark.parametrize(
    ("text", "value"), [("0", 0), ("200ms", 0.2), ("1.5s", 1.5), ("1h2m3s", 3723), ("10us", 1e-5), ("-1s", -1)]
)
def test_durations_are_read_as_go_reads_them(text: str, value: float) -> None:
    assert seconds(text) == pytest.approx(value)


@given(st.integers(0, 10**12), st.sampled_from(["", "k", "M", "Ki", "Gi"]))
def test_quantities_multiply(number: int, unit: str) -> None:
    factor = {"": 1, "k": 1000, "M": 10**6, "Ki": 1024, "Gi": 2**30}[unit]
    assert amount(f"{number}{unit}") == pytest.approx(number * factor)


@pytest.mark.parametrize("text", ["-1", "1e3", "Gi", "1Zi", True])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a quantity"):
        amount(text)


class Numbers(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    share: float = 0.5
    shares: dict[str, float] = {}
    points: tuple[float, ...] = ()
    count: int = 1
    size: Quantity = 1
    wait: Duration = 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("share: .nan", "share: expected a finite number, got nan"),
        ("share: 1e999", "share: expected a finite number, got inf"),
        ("shares: {a: -.inf}", "shares.a: expected a finite number, got -inf"),
        ("points: [1, .inf]", "points[1]: expected a finite number, got inf"),
        (f"count: {2**63}", "count: expected a number of at most 64 bits"),
        (f"size: {'9' * 400}", "size: expected a number of at most 64 bits"),
        (f"size: '{'9' * 400}.5'", "size: expected a number of at most 64 bits"),
        ("size: 9999999Ti", "size: expected a number of at most 64 bits"),
        (f"wait: {'9' * 400}s", "wait: expected a finite number, got inf"),
        ("wait: -5s", "wait: expected a duration that is not negative, got '-5s'"),
    ],
)
def test_numbers_that_nothing_can_be_done_with_are_refused(text: str, message: str) -> None:
    source = read(text, "a.yaml")
    decoder = Decoder(source)
    assert decoder.decode(source.value, Numbers, ()) is None
    assert [str(problem) for problem in decoder.problems] == [f"a.yaml:1: {message}"]


def test_large_quantities_are_exact() -> None:
    assert amount("9007199254740993") == 2**53 + 1


def test_an_empty_duration_is_the_default_in_parameters_only() -> None:
    source = read("wait: ''\n", "a.yaml")
    assert Decoder(source).decode(source.value, Numbers, (), any_case=True) == Numbers()
    assert Decoder(source).decode(source.value, Numbers, ()) is None
    source = read("share: ''\n", "a.yaml")
    assert Decoder(source).decode(source.value, Numbers, (), any_case=True) is None
