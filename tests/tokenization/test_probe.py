"""The template probe: the published turn-2 table, and the known causes of rewritten history."""

import msgspec
import pytest

from tests.tokenization.conftest import QWEN3, load
from tokenization.errors import TokenizationError
from tokenization.local import LocalTokenizer
from tokenization.model_files import read_model_files
from tokenization.probe import FOLLOW_UPS, REPLY_SOURCE, REPLY_TOKENS, probe, probe_report_text

TABLE = {
    "llama3_1": {16: [20, 32, 68], 32: [36, 48, 84], 64: [68, 80, 116], 128: [68, 80, 116], 256: [196, 208, 244]},
    "qwen2_5": {16: [30, 42, 80], 32: [30, 42, 80], 64: [62, 74, 112], 128: [62, 74, 112], 256: [190, 202, 240]},
    "qwen3": {
        16: [157, 169, 207],
        32: [173, 185, 223],
        64: [173, 185, 223],
        128: [173, 185, 223],
        256: [173, 185, 223],
    },
}
MATCHES = {"llama3_1": (181, 181, 53), "qwen2_5": (175, 175, 47), "qwen3": (26, 158, 30)}


def reply(tokenizer: LocalTokenizer, tokens: int = REPLY_TOKENS) -> str:
    return tokenizer.decode(tokenizer.encode(REPLY_SOURCE)[:tokens])


def made_of(template: str) -> LocalTokenizer:
    """Qwen3's tokenizer with another template."""
    return load("qwen3").with_template(template)


def test_a_model_without_a_template_cannot_be_probed() -> None:
    files = msgspec.structs.replace(read_model_files(QWEN3), templates={})
    with pytest.raises(TokenizationError, match="no chat template"):
        probe(LocalTokenizer(files, encoder="tokenizers"))


@pytest.mark.parametrize("bad", [{"follow_ups": ()}, {"block_sizes": ()}, {"block_sizes": (0,)}])
def test_nothing_to_compare_is_an_error(bad: dict[str, tuple[int, ...]], qwen3: LocalTokenizer) -> None:
    with pytest.raises(ValueError, match="at least"):
        probe(qwen3, **bad)  # type: ignore[arg-type]


def test_the_published_table_is_reproduced_exactly(tokenizer: LocalTokenizer, model: str) -> None:
    report = probe(tokenizer, block_sizes=tuple(TABLE[model]))
    assert {size: [f.uncached[size] for f in report.follow_ups] for size in TABLE[model]} == TABLE[model]
    assert (report.match_tokens, report.held_tokens, report.prompt_tokens) == MATCHES[model]
    assert [f.tokens for f in report.follow_ups] == [5, 17, 53 if model == "llama3_1" else 55]


def test_verdicts_and_causes_of_the_three_models(tokenizer: LocalTokenizer, model: str) -> None:
    report = probe(tokenizer)
    rewrites = model == "qwen3"
    verdict, cause = ("rewrites_history", "think block dropped") if rewrites else ("append_only", "none")
    assert (report.verdict, report.cause) == (verdict, cause)
    assert {name: mode.verdict for name, mode in report.modes.items()} == dict.fromkeys(("off", "on", "tools"), verdict)
    assert not report.dated


def test_qwen3_thinking_leaves_the_same_match(qwen3: LocalTokenizer) -> None:
    report = probe(qwen3, thinking=True)
    assert (report.match_tokens, report.cause) == (26, "think block dropped")
    assert report.modes["on"].held_text.startswith("<think>")


def test_the_threshold_keeps_a_follow_up_local_however_the_blocks_fall(qwen2_5: LocalTokenizer) -> None:
    for tokens in range(REPLY_TOKENS - 16, REPLY_TOKENS):
        report = probe(qwen2_5, reply=reply(qwen2_5, tokens))
        for follow_up in report.follow_ups:
            assert follow_up.tokens + 10 <= follow_up.uncached[16] <= follow_up.tokens + 25 < follow_up.threshold


@pytest.mark.parametrize(
    ("model", "before", "after", "cause", "match", "uncached"),
    [
        ("llama3_1", "\n", "", "whitespace trimmed", 53, 159),
        ("llama3_1", " ", "", "whitespace trimmed", 53, 159),
        ("llama3_1", "", "\n", "whitespace trimmed", 180, 31),
        ("qwen2_5", "\n", "", "tokens merged", 46, 169),
        ("qwen2_5", " ", "", "none", 174, None),
        ("qwen2_5", "", "\n", "none", 175, None),
    ],
)
def test_white_space_around_the_reply(
    model: str, before: str, after: str, cause: str, match: int, uncached: int | None, request: pytest.FixtureRequest
) -> None:
    tokenizer: LocalTokenizer = request.getfixturevalue(model)
    text = before + reply(tokenizer, REPLY_TOKENS - 1) + after
    report = probe(tokenizer, reply=text, follow_ups=FOLLOW_UPS[1:2])
    assert (report.cause, report.match_tokens) == (cause, match)
    assert uncached in (None, report.follow_ups[0].uncached[16])


TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
HEAD = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    ("name", "template", "cause", "mode"),
    [
        ("plain", "{% for m in messages %}" + TURN + "{% endfor %}" + HEAD, "none", "off"),
        (
            "generation prompt only",
            "{% for m in messages %}" + TURN + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}",
            "generation prompt",
            "off",
        ),
        (
            "open think block in the prompt, none in history",
            "{% for m in messages %}" + TURN + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
            "{% endif %}{# </think> #}",
            "think block dropped",
            "on",
        ),
        (
            "tools before the last question",
            "{% for m in messages %}{% if loop.last and tools %}{{ tools[0].function.name }}\n{% endif %}"
            + TURN
            + "{% endfor %}"
            + HEAD,
            "tools moved",
            "tools",
        ),
        (
            "time in the prompt",
            "{{ strftime_now('%Y-%m-%d %f') }}{% for m in messages %}" + TURN + "{% endfor %}" + HEAD,
            "date line",
            "off",
        ),
    ],
)  # fmt: skip
def test_causes(name: str, template: str, cause: str, mode: str) -> None:
    report = probe(made_of(template))
    assert report.modes[mode].cause == cause
    assert (report.modes[mode].verdict == "append_only") == (cause == "none")


def test_a_date_that_changes_daily_is_told_though_nothing_breaks_today() -> None:
    report = probe(made_of("{{ strftime_now('%d %b %Y') }}{% for m in messages %}" + TURN + "{% endfor %}" + HEAD))
    assert report.dated
    assert report.verdict == "append_only"
    assert "day changes" in probe_report_text(report)


def test_the_report_as_json_has_the_promised_fields(qwen3: LocalTokenizer) -> None:
    data = msgspec.json.decode(msgspec.json.encode(probe(qwen3, block_sizes=(16, 64))))
    assert data["verdict"] == "rewrites_history"
    assert data["cause"] == "think block dropped"
    assert data["match_tokens"] == 26
    first = data["follow_ups"][0]
    assert (first["tokens"], first["uncached"], first["threshold"]) == (5, {"16": 157, "64": 173}, 211)


def test_the_report_for_people_shows_the_place_and_the_numbers() -> None:
    text = probe_report_text(probe(load("qwen3")))
    assert "thinking off: rewrites_history, 26 of 158 held tokens match" in text
    assert "'<think>\\n\\n</think>" in text
    assert "157" in text
