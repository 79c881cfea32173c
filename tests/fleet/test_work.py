import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.work import H100_8B


@given(st.integers(1, 1_000_000), st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_a_prompt_costs_what_its_missing_tokens_cost_after_the_cached_ones(tokens: int, shares: list[float]) -> None:
    cached = np.floor(np.array(shares) * tokens)
    expected = H100_8B.seconds(tokens - cached, cached)
    assert H100_8B.of_prompt(tokens, cached).tolist() == pytest.approx(expected.tolist(), rel=1e-12, abs=1e-15)
