"""Whether each model's chat template keeps its history: found out by the template probe, in the background.

A model whose template rewrites earlier turns cannot reuse a reply's KV, whatever is cached where; deciders read it from
`Request.rewrites_history`. What `warmroute.models.NAME.rewritesHistory` says is believed and not probed.
"""

import asyncio
import logging
import time
from collections.abc import Mapping

from gateway.config_document import Model
from gateway.metrics import Metrics
from gateway.served_models import Served
from tokenization.errors import TokenizationError
from tokenization.local import LocalTokenizer
from tokenization.probe import Mode, ProbeReport, probe

log = logging.getLogger(__name__)

DEFAULT = "default"
"""The metric's label for models that share the default tokenizer."""
_HI = [{"role": "user", "content": "Hi"}]


class TemplateKnowledge:
    """What is known so far. The event loop's thread owns it."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._known: dict[str, bool] = {}
        self._found: list[tuple[LocalTokenizer, bool]] = []  # by the last `learn`, for those in use then

    def rewrites_history(self, served: Served) -> bool | None:
        """None while nobody knows, or where the model is tokenized elsewhere."""
        return self._known.get(served.base, self._known.get(DEFAULT))

    async def learn(self, models: Mapping[str, Model], tokenizers: Mapping[str, LocalTokenizer]) -> None:
        """Replace what is known. `tokenizers`: by model, the default one under "". Never raises for a template's sake.

        A tokenizer that a reload has kept is not asked again: every thread that has encoded once keeps 16 MB (Qwen3).
        """
        known = {name: model.rewrites_history for name, model in models.items() if model.rewrites_history is not None}
        probed: dict[int, bool | None] = {id(tokenizer): verdict for tokenizer, verdict in self._found}
        for name, tokenizer in tokenizers.items():
            if (name or DEFAULT) in known:
                continue
            if id(tokenizer) not in probed:
                probed[id(tokenizer)] = await self._ask(name or DEFAULT, tokenizer)
            if (verdict := probed[id(tokenizer)]) is not None:
                known[name or DEFAULT] = verdict
        self._known = known
        verdicts = ((tokenizer, probed.get(id(tokenizer))) for tokenizer in tokenizers.values())
        self._found = [(tokenizer, verdict) for tokenizer, verdict in verdicts if verdict is not None]
        self._metrics.rewrites_history.clear()
        for name, rewrites in known.items():
            self._metrics.rewrites_history.labels(self._metrics.model(name)).set(float(rewrites))

    async def _ask(self, name: str, tokenizer: LocalTokenizer) -> bool | None:
        if tokenizer.template is None:
            return None  # a model without chats has no history
        started = time.monotonic()
        try:
            mode = await asyncio.to_thread(mode_in_use, tokenizer)
        except TokenizationError as error:
            log.warning("template_probe_refused model=%s error=%r", name, error.message)
            return None
        except Exception:  # a template is a program of somebody else's
            log.exception("template_probe_failed model=%s", name)
            return None
        log.info(
            "template_probed model=%s verdict=%s cause=%r match=%d held=%d seconds=%.2f",
            name,
            mode.verdict,
            mode.cause,
            mode.match_tokens,
            mode.held_tokens,
            time.monotonic() - started,
        )
        return mode.verdict == "rewrites_history"


def mode_in_use(tokenizer: LocalTokenizer) -> Mode:
    """The probe's result for chats that say nothing about thinking: most of them."""
    report: ProbeReport = probe(tokenizer)
    return report.modes.get("on" if _thinks_by_default(tokenizer) else "off") or report.modes["off"]


def _thinks_by_default(tokenizer: LocalTokenizer) -> bool:
    if tokenizer.template is None or "</think>" not in tokenizer.template.source:
        return False
    try:
        return tokenizer.render_chat(_HI) == tokenizer.render_chat(_HI, enable_thinking=True)
    except TokenizationError:
        return False
