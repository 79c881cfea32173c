"""What prefill engines report as cached, in all the ways that they do not."""

import pytest

from gateway.prefill_usage import reused_share


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"{}",
        b'{"usage": null}',
        b'{"usage": {"prompt_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}}}',
        b'{"usage": {"prompt_tokens": 100}}',
        b'{"usage": {"prompt_tokens": 100, "prompt_tokens_details": null}}',
        b'{"usage": {"prompt_tokens": "many"}}',
    ],
)
def test_an_answer_that_does_not_say_gives_nothing(answer: bytes) -> None:
    assert reused_share(answer) is None


def test_the_share_is_cached_over_prompt_tokens() -> None:
    answer = b'{"id": "x", "usage": {"prompt_tokens": 200, "prompt_tokens_details": {"cached_tokens": 150}}}'
    assert reused_share(answer) == 0.75
