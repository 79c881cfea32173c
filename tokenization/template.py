"""Chat templates, rendered exactly as the engine renders them.

The environment is the one of transformers' `apply_chat_template`: an immutable sandbox, `trim_blocks` and
`lstrip_blocks`, loop controls, a `tojson` that is plain `json.dumps`, and the globals `raise_exception` and
`strftime_now`. What goes in (which keyword arguments reach the template) follows vLLM.
"""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from tokenization.content_format import ContentFormat, content_format
from tokenization.errors import refuse

CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the final message in the rendered text. transformers uses this very text, and what a template does
to white space around it is part of the result."""


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; for a prompt it is only its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance attribute)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment(now: Callable[[str], str] = _strftime_now) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """A new reference environment. `now` stands in for `strftime_now` (the probe pins the date with it)."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = now
    return env


class ChatTemplate:
    """One chat template, compiled once; `render` is thread-safe.

    Raises `ValueError` where the source is no valid template.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[str], str] = _strftime_now,
    ) -> None:
        env = environment(now)
        try:
            tree = env.parse(source)
            self._template = env.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self.content_format: ContentFormat = content_format(tree)
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        """Names the template reads and does not set; anything else in the request's kwargs is dropped."""
        self.knows_developer = '"developer"' in source or "'developer'" in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt's text. Raises `TokenizationError` (status 400) where the template rejects the messages, or there are
        none: the engine then does not ask the template (transformers, `apply_chat_template`)."""
        chat: list[Any] = list(messages)
        if not chat:
            raise refuse("there is no message to render; a chat needs at least one")
        final = ""
        if continue_final_message:
            chat, final = _mark_final_message(chat)
        names = {"messages", "tools", "documents", "add_generation_prompt"}
        variables = {**self.special_tokens, **{k: v for k, v in kwargs.items() if k in self.variables - names}}
        try:
            text = self._template.render(
                messages=chat,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        # A template is a program that runs on client data: whatever it raises means that these messages do not fit
        # it, and the engine answers 400 for all of it too.
        except Exception as error:
            raise refuse(f"the chat template rejected the messages: {error}", "template_rejected") from error
        return _cut_after_final_message(text, final) if continue_final_message else text

    @cached_property
    def system_first(self) -> bool:
        """Whether system messages after the first one are an error in this template."""
        turn = [{"role": "system", "content": "t"}, {"role": "user", "content": "t"}]
        return not self._renders(turn + turn)

    @cached_property
    def disabled_thinking_effort(self) -> str:
        """The reasoning effort the engine uses for Anthropic's `thinking: disabled`: "none" where the template heeds it,
        else "low" (which then changes nothing, or is the least the model can do)."""
        none = self._with_effort("none")
        if none is None or any(self._with_effort(e) == none for e in ("low", "medium", "high", "xhigh", "max")):
            return "low"
        return "none"

    def _with_effort(self, effort: str) -> str | None:
        hello = "Hi" if self.content_format == "string" else [{"type": "text", "text": "Hi"}]
        try:
            return self.render(
                [{"role": "user", "content": hello}], reasoning_effort=effort, enable_thinking=effort != "none"
            )
        except Exception:  # noqa: BLE001  (see `render`)
            return None

    def _renders(self, messages: list[dict[str, str]]) -> bool:
        # Without special tokens, as the engine's probe does it: a template that needs them counts as strict.
        try:
            self._template.render(messages=messages, add_generation_prompt=False)
        except jinja2.TemplateError:
            return False
        return True


def _mark_final_message(chat: list[Any]) -> tuple[list[Any], str]:
    """The chat with a tag behind the final message's text, and that text."""
    last = dict(chat[-1]) if chat else {}
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + CONTINUE_TAG
        return [*chat[:-1], last], content
    if isinstance(content, list):
        parts = copy.copy(content)
        for index in range(len(parts) - 1, -1, -1):
            if isinstance(parts[index], dict) and isinstance(text := parts[index].get("text"), str):
                parts[index] = {**parts[index], "text": text + CONTINUE_TAG}
                last["content"] = parts
                return [*chat[:-1], last], text
    raise refuse("continue_final_message is set but the final message has no text to continue", "template_rejected")


def _cut_after_final_message(text: str, final: str) -> str:
    tag = CONTINUE_TAG.strip()
    at = text.rfind(tag)
    if at < 0 or final.strip() not in text:
        raise refuse(
            "continue_final_message is set but the final message does not appear in the rendered chat",
            "template_rejected",
        )
    # Where the template kept the blank behind the tag it keeps the message's own trailing space as well; where it
    # trimmed one it trimmed both.
    return text[:at] if text.startswith(CONTINUE_TAG, at) else text[:at].rstrip()
