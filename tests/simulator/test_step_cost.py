import pytest

from simulator.step_cost import profile


def test_an_unknown_profile_is_refused_with_the_valid_names() -> None:
    with pytest.raises(ValueError, match="no step-cost profile named '7b'; there are 8b, 8b-h200, 70b-tp8"):
        profile("7b")


def test_the_linear_table_is_interpolated_and_goes_on_in_proportion() -> None:
    cost = profile("8b")
    assert cost.linear(1024) == 17.85
    assert cost.linear(1536) == pytest.approx((17.85 + 35.95) / 2)
    assert cost.linear(32768) == pytest.approx(2 * 308.1)


def test_one_decode_and_a_prompt_of_1024_tokens_take_what_was_measured() -> None:
    cost = profile("8b")
    assert cost.step_ms([], [1]) == pytest.approx(7.2, abs=0.1)
    assert cost.step_ms([(1024, 0)], []) == pytest.approx(20, abs=1)


def test_attention_grows_with_the_history_of_a_chunk() -> None:
    cost = profile("8b")
    assert cost.step_ms([(1024, 65536)], []) > 2 * cost.step_ms([(1024, 0)], [])


def test_an_empty_step_takes_no_time() -> None:
    assert profile("70b-tp8").step_ms([], []) == 0
