"""Does a model's chat template keep its history, or rewrite it?

After turn 1 an engine holds the KV of the rendered prompt and of the reply it generated. Turn 2 can use it as far as its
own prompt begins with the same tokens. Templates that drop think blocks, trim white space or move the tools break this
at the same place in every conversation, and no prefix cache can help; whoever expects the reply's KV to be reused (a
prefill/decode decider) must know. The probe renders both turns and compares ids.

What the engine holds: ids of the turn-1 prompt, then ids of the reply as the model emits it, think block included,
without the stop token (no forward pass runs on it). The reply's text is encoded again, which is the best case: ids that
a model sampled can differ from it.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec
import numpy as np

from tokenization.errors import TokenizationError
from tokenization.local import LocalTokenizer
from tokenization.template import ChatTemplate

Verdict = Literal["append_only", "rewrites_history"]
Cause = Literal[
    "none",
    "think block dropped",
    "whitespace trimmed",
    "date line",
    "tools moved",
    "generation prompt",
    "tokens merged",
    "other",
]

QUESTION = "How does the KV cache in a transformer decoder grow as it generates each new output token?"
REPLY_TOKENS = 128
REPLY_SOURCE = (
    "A transformer decoder keeps the keys and values of every position it has already processed, so each new token only "
    "needs one forward pass over one position. The cache grows by one entry per layer and per key-value head with every "
    "generated token, and its size is linear in the length of the sequence. Because the entries for earlier positions "
    "never change, they can be reused by any later request that starts with exactly the same tokens. Engines store them "
    "in fixed size blocks and name each block by a hash of its tokens and of the block before it, which lets two requests "
    "share the memory of a common prefix without copying anything at all. When memory runs short the engine frees the "
    "blocks that nobody uses, oldest first, and computes them again later if needed."
)
FOLLOW_UPS = (
    "Thanks, makes sense.",
    "Does the same thing hold when the model uses grouped-query attention instead of full attention?",
    "Two more questions about the cache, if you have the time for it.\n"
    "If a pod holds 128 blocks for one chat, which of these blocks does the engine free first?\n"
    "And does the order of eviction change once another request shares the same prefix with it?",
)
BLOCK_SIZES = (16,)
REASONING = "The user asks about the cache. Keys and values are appended per token, so it grows linearly."

_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
    },
}
_EXCERPT_TOKENS = 12


class FollowUp(msgspec.Struct, frozen=True, kw_only=True):
    """What one follow-up message leaves to compute."""

    text: str
    tokens: int
    """Of the message alone."""
    prompt_tokens: int
    """Of turn 2's whole prompt."""
    uncached: dict[int, int]
    """Block size -> tokens of turn 2 behind the last full matching block."""
    threshold: int
    """The lowest `nonCachedTokens` with which this follow-up stays on the engine that holds turn 1, however the blocks
    fall, at every block size asked for (a decider splits at `uncached >= nonCachedTokens`)."""


class Mode(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one way of asking."""

    verdict: Verdict
    cause: Cause
    match_tokens: int
    """Leading tokens of turn 2 that the engine holds, over the follow-ups the fewest."""
    held_tokens: int
    """Tokens the engine holds after turn 1; equal to `match_tokens` where the template only appends."""
    prompt_tokens: int
    """Of turn 1's prompt."""
    held_text: str
    """What follows the match on the engine ..."""
    found_text: str
    """... and in turn 2's prompt; both empty where all of it matches."""
    follow_ups: tuple[FollowUp, ...]


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result for the mode asked for, and in `modes` for all: thinking "off" and "on", and "tools" (off, with a tool)."""

    verdict: Verdict
    cause: Cause
    match_tokens: int
    held_tokens: int
    prompt_tokens: int
    thinking: bool
    dated: bool
    """The template writes today's date: every open conversation misses when it changes."""
    block_sizes: tuple[int, ...]
    follow_ups: tuple[FollowUp, ...]
    modes: dict[str, Mode]
    """A mode that the template refuses to render is missing."""


def probe(
    tokenizer: LocalTokenizer,
    question: str = QUESTION,
    reply: str | None = None,
    follow_ups: Sequence[str] = FOLLOW_UPS,
    thinking: bool = False,
    block_sizes: Sequence[int] = BLOCK_SIZES,
) -> ProbeReport:
    """Compares turn 1 and turn 2 of a chat. `reply`: None for the default, 128 tokens of prose.

    Raises `TokenizationError` where the model has no template or it refuses the chat, `ValueError` for bad arguments.
    """
    if not follow_ups or not block_sizes or min(block_sizes) < 1:
        raise ValueError("the probe needs at least one follow-up and block sizes of at least 1")
    if reply is None:
        reply = tokenizer.decode(tokenizer.encode(REPLY_SOURCE)[:REPLY_TOKENS])
    runs = {
        name: _Run(tokenizer, question, reply, on, tools)
        for name, on, tools in (("off", False, None), ("on", True, None), ("tools", False, [_TOOL]))
    }
    asked = "on" if thinking else "off"
    modes = {asked: runs[asked].mode(follow_ups, block_sizes)}
    for name, run in runs.items():
        if name not in modes:
            try:
                modes[name] = run.mode(follow_ups, block_sizes)
            except TokenizationError:
                continue
    chosen = modes[asked]
    return ProbeReport(
        verdict=chosen.verdict,
        cause=chosen.cause,
        match_tokens=chosen.match_tokens,
        held_tokens=chosen.held_tokens,
        prompt_tokens=chosen.prompt_tokens,
        thinking=thinking,
        dated=runs[asked].dated,
        block_sizes=tuple(block_sizes),
        follow_ups=chosen.follow_ups,
        modes={name: modes[name] for name in runs if name in modes},
    )


class _Run:
    """One mode: how it renders, and what it finds."""

    def __init__(
        self, tokenizer: LocalTokenizer, question: str, reply: str, thinking: bool, tools: list[dict[str, Any]] | None
    ) -> None:
        self._tokenizer = tokenizer
        self._kwargs: dict[str, Any] = {"enable_thinking": thinking, "tools": tools}
        self._turn1 = [{"role": "user", "content": question}]
        self._reply = reply
        source = tokenizer.template.source if tokenizer.template else ""
        self._thinks = thinking and "</think>" in source
        self.dated = "strftime_now" in source and _depends_on_date(tokenizer.template, self._turn1)

    def mode(self, follow_ups: Sequence[str], block_sizes: Sequence[int]) -> Mode:
        prompt1 = self._tokenizer.render_chat(self._turn1, **self._kwargs)
        live = self._live_reply(prompt1)
        ids1 = self._tokenizer.encode(prompt1)
        held = np.concatenate([ids1, self._tokenizer.encode(live)])
        found: list[FollowUp] = []
        shortest: tuple[int, str, np.ndarray[Any, np.dtype[np.uint32]]] | None = None
        for text in follow_ups:
            prompt2 = self._tokenizer.render_chat(self._turn2(text), **self._kwargs)
            ids2 = self._tokenizer.encode(prompt2)
            match = common_prefix(held, ids2)
            tail = len(ids2) - match
            found.append(
                FollowUp(
                    text=text,
                    tokens=len(self._tokenizer.encode(text)),
                    prompt_tokens=len(ids2),
                    uncached={size: len(ids2) - match // size * size for size in block_sizes},
                    threshold=tail + max(block_sizes),
                )
            )
            if shortest is None or match < shortest[0]:
                shortest = match, prompt2, ids2
        assert shortest is not None
        match, prompt2, ids2 = shortest
        whole = match == len(held)
        return Mode(
            verdict="append_only" if whole else "rewrites_history",
            cause="none" if whole else self._cause(prompt1, live, prompt2, match, len(ids1)),
            match_tokens=match,
            held_tokens=len(held),
            prompt_tokens=len(ids1),
            held_text="" if whole else self._tokenizer.decode(held[match : match + _EXCERPT_TOKENS]),
            found_text="" if whole else self._tokenizer.decode(ids2[match : match + _EXCERPT_TOKENS]),
            follow_ups=tuple(found),
        )

    def _turn2(self, follow_up: str) -> list[dict[str, Any]]:
        answer: dict[str, Any] = {"role": "assistant", "content": self._reply}
        if self._thinks:
            answer["reasoning"] = REASONING
        return [*self._turn1, answer, {"role": "user", "content": follow_up}]

    def _live_reply(self, prompt: str) -> str:
        """The reply as the model emits it after `prompt`."""
        if not self._thinks:
            return self._reply
        opened = prompt.rstrip().endswith("<think>")
        return f"{'' if opened else '<think>' + chr(10)}{REASONING}\n</think>\n\n{self._reply}"

    def _cause(self, prompt1: str, live: str, prompt2: str, match: int, prompt_tokens: int) -> Cause:
        held = prompt1 + live
        at = _common_text(held, prompt2)
        if at == len(held):
            return "tokens merged"
        if self._kwargs["tools"] and _moved(prompt1, prompt2, _TOOL["function"]["name"]):  # type: ignore[index]
            return "tools moved"
        # A dropped block may share its first characters ("<") with what follows in turn 2.
        block = held.rfind("<think>", 0, at + len("<think>"))
        if block >= 0 and (end := held.find("</think>", block)) >= 0 and at <= end + len("</think>") + 2:
            without = held[:block] + held[end + len("</think>") :].lstrip("\n")
            if _common_text(without, prompt2) > at or not self._reply:
                return "think block dropped"
        if match < prompt_tokens and self.dated:
            return "date line"
        if held[:at].endswith("<think>\n") or held[at:].lstrip().startswith(("<think>", "</think>")):
            return "think block dropped"
        trimmed = prompt1 + live.strip()
        if live != live.strip() and _common_text(trimmed, prompt2) >= len(trimmed):
            return "whitespace trimmed"
        return "generation prompt" if at <= len(prompt1) else "other"


def common_prefix(a: np.ndarray[Any, np.dtype[np.uint32]], b: np.ndarray[Any, np.dtype[np.uint32]]) -> int:
    """Number of leading ids that are equal."""
    length = min(len(a), len(b))
    differing = np.nonzero(a[:length] != b[:length])[0]
    return int(differing[0]) if len(differing) else length


def _common_text(a: str, b: str) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _moved(prompt1: str, prompt2: str, name: Any) -> bool:
    """Whether the tools stand behind the first question in turn 2's prompt and before it in turn 1's, or further back."""
    return prompt1.find(str(name)) != prompt2.find(str(name))


def _depends_on_date(template: ChatTemplate | None, messages: list[dict[str, str]]) -> bool:
    if template is None:
        return False
    texts = set()
    for day in (datetime(2001, 2, 3), datetime(2002, 3, 4)):
        pinned = ChatTemplate(template.source, template.special_tokens, now=day.strftime)
        try:
            texts.add(pinned.render(messages))
        except TokenizationError:
            return False
    return len(texts) > 1


def probe_report_text(report: ProbeReport) -> str:
    """The report for people."""
    lines = []
    for name, mode in report.modes.items():
        title = {"off": "thinking off", "on": "thinking on", "tools": "thinking off, with a tool"}[name]
        lines.append(f"{title}: {mode.verdict}, {mode.match_tokens} of {mode.held_tokens} held tokens match")
        if mode.verdict == "rewrites_history":
            lines.append(f"  cause    {mode.cause}")
            lines.append(f"  engine   ...{mode.held_text!r}")
            lines.append(f"  turn 2   ...{mode.found_text!r}")
    if report.dated:
        lines.append("The template writes the date: every open conversation misses when the engine's day changes.")
    asked = "on" if report.thinking else "off"
    lines.append("")
    lines.append(f"Turn 2 on the engine that holds turn 1 (thinking {asked}), tokens to compute:")
    sizes = "".join(f"{'block ' + str(size):>12}" for size in report.block_sizes)
    lines.append(f"  follow-up  prompt{sizes}   nonCachedTokens at least")
    for follow_up in report.follow_ups:
        cells = "".join(f"{follow_up.uncached[size]:>12}" for size in report.block_sizes)
        lines.append(f"{follow_up.tokens:>11}{follow_up.prompt_tokens:>8}{cells}   {follow_up.threshold}")
    return "\n".join(lines)
