"""The reference environment: what templates may use, and what they render to."""

import re

import pytest

from tests.tokenization.conftest import QWEN2_5_TEMPLATE, QWEN3
from tokenization.conversation import conversation
from tokenization.errors import TokenizationError
from tokenization.template import ChatTemplate

HELLO = [{"role": "user", "content": "Hello"}]
MACRO = "{% macro f(x) %}{% for c in x %}{% endfor %}{% endmacro %}"


def render(source: str, messages: list[dict[str, object]] | None = None, **kwargs: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages or HELLO, **kwargs)  # type: ignore[arg-type]


def test_raise_exception_is_the_clients_400_with_the_templates_reason() -> None:
    with pytest.raises(TokenizationError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert (caught.value.status, caught.value.reason) == (400, "template_rejected")


def test_attributes_of_missing_messages_are_the_clients_400() -> None:
    with pytest.raises(TokenizationError) as caught:
        ChatTemplate("{{ messages[1].role.x }}").render(HELLO)
    assert (caught.value.status, caught.value.reason) == (400, "template_rejected")


@pytest.mark.parametrize("source", ["{{ messages[0].role }}", "{% for m in messages %}{{ m.role }}{% endfor %}"])
@pytest.mark.parametrize("continued", [False, True])
def test_an_empty_chat_is_refused_before_any_template_sees_it(source: str, continued: bool) -> None:
    """Whatever a template would make of it: vLLM 0.32 refuses with "Provide at least one message"."""
    with pytest.raises(TokenizationError, match="at least one") as caught:
        ChatTemplate(source).render([], continue_final_message=continued)
    assert (caught.value.status, caught.value.reason) == (400, "invalid_request")


@pytest.mark.parametrize(
    "attack", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ messages.__init__ }}"]
)
def test_the_sandbox_lets_no_template_change_or_reach_anything(attack: str) -> None:
    try:
        text = render(attack)
    except TokenizationError:
        return
    assert text == ""


def test_tojson_is_plain_json() -> None:
    data = {"b": "<é'\">", "a": [1.0, 1e-7, None, True]}
    assert render("{{ x | tojson }}", x=data) == '{"b": "<é\'\\">", "a": [1.0, 1e-07, null, true]}'
    assert render("{{ x | tojson(indent=2, sort_keys=true) }}", x={"b": 1, "a": 2}) == '{\n  "a": 2,\n  "b": 1\n}'
    assert render("{{ x | tojson(separators=(',', ':'), ensure_ascii=true) }}", x={"é": 1}) == '{"\\u00e9":1}'


def test_blocks_take_their_line_with_them() -> None:
    assert render("a\n   {% if true %}\nb\n   {% endif %}\nc\n") == "a\nb\nc"


def test_loops_can_break_and_continue() -> None:
    assert (
        render(
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
            "{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        )
        == "02"
    )


def test_generation_blocks_are_their_body() -> None:
    assert render("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c") == "abHelloc"


def test_strftime_now_is_todays_date() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", render("{{ strftime_now('%Y-%m-%d') }}"))


def test_special_tokens_can_be_overridden_by_kwargs() -> None:
    assert render("{{ bos_token }}{{ eos_token }}") == "<s>"
    assert render("{{ bos_token }}", bos_token="<x>") == "<x>"


def test_kwargs_that_the_template_does_not_read_are_dropped() -> None:
    assert render("{{ known }}", known=1, unknown=2) == "1"


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        ("<{{ messages[0].content }}>", "part ", "<part "),
        ("<{{ messages[0].content | trim }}>", "part ", "<part"),
        ("<{{ messages[0].content[0].text }}>", [{"type": "text", "text": "part"}], "<part"),
    ],
)
def test_a_continued_message_ends_where_its_text_does(source: str, content: object, expected: str) -> None:
    messages = [{"role": "assistant", "content": content}]
    assert render(source, messages, continue_final_message=True, add_generation_prompt=False) == expected


@pytest.mark.parametrize("content", [None, [], [{"type": "image"}], "gone"])
def test_a_message_that_cannot_be_continued_is_the_clients_400(content: object) -> None:
    source = "{{ messages[0].content[:0] if messages[0].content is string else '' }}"
    with pytest.raises(TokenizationError) as caught:
        render(source, [{"role": "assistant", "content": content}], continue_final_message=True)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "string"),
        ("{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% for c in m['content'] | list %}{{ c }}{% endfor %}{% endfor %}", "openai"),
        ("{% set tail = messages[1:] %}{% for m in tail %}{% for c in m.content %}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}{% endfor %}", "openai"),
        (MACRO + "{% for m in messages %}{{ f(m.content) }}{% endfor %}", "openai"),
        (MACRO + "{% for m in messages %}{{ f(x=m.content) }}{% endfor %}", "openai"),
        ("{% macro f(content) %}{% for c in content %}{% endfor %}{% endmacro %}{{ f(tools) }}", "string"),
        ("{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}", "string"),
        (QWEN2_5_TEMPLATE.read_text(), "string"),
        ((QWEN3 / "chat_template.jinja").read_text(), "string"),
    ],
    ids=range(11),
)  # fmt: skip
def test_the_content_format_follows_from_the_templates_loops(source: str, expected: str) -> None:
    assert ChatTemplate(source).content_format == expected


def test_parts_are_flattened_for_templates_that_want_strings_and_kept_for_the_others() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "", "x": 1}, "b"]
    messages = [{"role": "user", "content": parts}, {"role": "tool", "content": parts}]
    assert [m["content"] for m in conversation(messages, "string").messages] == ["a\nb", "a\nb"]
    kept = [{"type": "text", "text": "a"}, {"type": "text", "text": "", "x": 1}, {"type": "text", "text": "b"}]
    assert [m["content"] for m in conversation(messages, "openai").messages] == [kept, "a\n\nb"]


def test_a_template_is_asked_whether_system_messages_may_come_later() -> None:
    late = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('x') }}{% endif %}"
    strict = "{% for m in messages %}" + late + "{% endfor %}"
    assert ChatTemplate(strict).system_first
    assert not ChatTemplate("{{ messages }}").system_first


def test_disabled_thinking_is_effort_none_only_where_the_template_heeds_it() -> None:
    assert ChatTemplate((QWEN3 / "chat_template.jinja").read_text()).disabled_thinking_effort == "none"
    assert ChatTemplate(QWEN2_5_TEMPLATE.read_text()).disabled_thinking_effort == "low"
    assert (
        ChatTemplate(
            "{% if reasoning_effort == 'none' %}{{ raise_exception('x') }}{% endif %}"
        ).disabled_thinking_effort
        == "low"
    )
