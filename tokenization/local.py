"""The tokenizer in the router's own process: request body in, the engine's token ids out."""

import copy
import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tokenizers

from tokenization.body import MAX_TOKEN_ID, parse_body
from tokenization.conversation import Conversation, conversation
from tokenization.cuts import hard_tokens, turn_token
from tokenization.encoders import Encoder, Ids, ReferenceEncoder, choose_encoder
from tokenization.errors import TokenizationError, refuse, unroutable
from tokenization.images import Algorithm, Placed
from tokenization.media import IMAGE_TEXT, image_rules, read_media, text_before
from tokenization.model_files import ModelFiles, read_model_files
from tokenization.placeholders import expand
from tokenization.prompt import Chat, Prompt, PromptRequest, Text, Tokens
from tokenization.segments import Boundary, SegmentedEncoder
from tokenization.template import ChatTemplate
from tokenization.tokenized import NO_IDS, Tokenized
from tokenization.tokenizer_spec import added_around, without_truncation

log = logging.getLogger(__name__)

MAX_TEXT_CHARS = 4 * 1024 * 1024
"""A million tokens of prose; a run of one character of this length takes about a second to encode."""
SEGMENT_CACHE_BYTES = 256 * 1024 * 1024


class LocalTokenizer:
    """One model's template and tokenizer. Thread-safe and blocking: call it in worker threads.

    `from_directory` is the usual way to get one.
    """

    def __init__(
        self,
        files: ModelFiles,
        *,
        default_template_kwargs: Mapping[str, Any] | None = None,
        trust_request_chat_template: bool | None = None,
        responses_add_special_tokens: bool = True,
        max_text_chars: int = MAX_TEXT_CHARS,
        segment_cache_bytes: int = SEGMENT_CACHE_BYTES,
        encoder: str = "auto",
        image_hash: Algorithm = "blake3",
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> None:
        """
        default_template_kwargs: the engine's `--default-chat-template-kwargs`.
        trust_request_chat_template: whether the engines run with the flag of this name; None = unknown, then requests
            with a template of their own are routed by load.
        responses_add_special_tokens: vLLM 0.32 adds BOS on top of the template's in /v1/responses.
        encoder: "auto" (fastokens after a self-check, else tokenizers) or "tokenizers".
        image_hash: the engines' `--mm-hasher-algorithm`.
        min_pixels, max_pixels: as in the engines' `--mm-processor-kwargs`; None = as the model's files say.
        """
        spec, text = without_truncation(files.tokenizer)
        self._reference = tokenizers.Tokenizer.from_str(text)
        self._prefix, self._suffix = added_around(self._reference)
        special = dict(files.special_tokens)
        if "bos_token" not in special and len(self._prefix) == 1:
            special["bos_token"] = str(self._reference.id_to_token(int(self._prefix[0])))
        self._special_tokens = special
        self._templates = {name: ChatTemplate(source, special) for name, source in files.templates.items()}
        self._default_kwargs = dict(default_template_kwargs or {})
        self._trust_template = trust_request_chat_template
        self._responses_special = responses_add_special_tokens
        self._max_chars = max_text_chars
        self.images = image_rules(files, image_hash, min_pixels, max_pixels)
        """How images are named and counted; None where that is not known of this model."""
        self._image_id = self._reference.token_to_id(self.images.token) if self.images else None
        self._request_template = lru_cache(maxsize=32)(self._compile)
        self.hard_tokens = hard_tokens(spec)
        self.cut_token = self._choose_cut()
        """The token before which prompts are cut; None: every prompt is encoded as a whole."""
        samples = [sample] if (sample := self._sample()) else []
        chosen: Encoder = (
            ReferenceEncoder(self._reference)
            if encoder == "tokenizers"
            else choose_encoder(text, self._reference, extra_texts=samples)
        )
        self.segments = SegmentedEncoder(chosen, [self.cut_token] if self.cut_token else [], segment_cache_bytes)
        self._check_cuts(samples)

    def with_template(self, source: str) -> "LocalTokenizer":
        """The same tokenizer with another chat template (an engine's `--chat-template`), sharing what took long to load.
        Raises `ValueError` where `source` is no template."""
        other = copy.copy(self)
        other._templates = {"default": ChatTemplate(source, self._special_tokens)}
        other._request_template = lru_cache(maxsize=32)(other._compile)
        other.cut_token = other._choose_cut()
        encoder, max_bytes = self.segments.encoder, self.segments.cache.stats().max_bytes
        other.segments = SegmentedEncoder(encoder, [other.cut_token] if other.cut_token else [], max_bytes)
        other._check_cuts([sample] if (sample := other._sample()) else [])
        return other

    @classmethod
    def from_directory(cls, path: Path, **options: Any) -> "LocalTokenizer":
        """Reads tokenizer.json or tokenizer.json.xz, chat_template.jinja and tokenizer_config.json in `path`; options as
        for the constructor. Takes 1-2 s. Raises `FileNotFoundError` or `ValueError` naming what is wrong."""
        try:
            return cls(read_model_files(Path(path)), **options)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @property
    def encoder(self) -> str:
        """The library in use: fastokens or tokenizers."""
        return self.segments.encoder.name

    @property
    def template(self) -> ChatTemplate | None:
        """The default chat template; None where the model has none."""
        return self._templates.get("default")

    @property
    def knows_images(self) -> bool:
        """Whether images of this model can be named here."""
        return self._image_id is not None

    @property
    def image_counts(self) -> Mapping[str, int]:
        """Outcome -> images since start; empty where this model's images are not named here."""
        return self.images.reader.counts if self.images else {}

    def tokenize(self, path: str, body: Mapping[str, Any], *, engine_model: str | None = None) -> Tokenized:
        """The token ids of a request. Raises `TokenizationError` (see there for what to do with it). `engine_model`: the
        engines' `--model`, which is part of the name of every image; None = nobody knows."""
        template = self.template
        request = parse_body(
            path,
            body,
            system_first=template.system_first if template else True,
            disabled_thinking_effort=template.disabled_thinking_effort if template else "none",
        )
        options = any(body.get(name) for name in ("mm_processor_kwargs", "media_io_kwargs"))
        results = [self._prompt(prompt, request.api, engine_model, media_options=options) for prompt in request.prompts]
        if request.truncate_tokens is not None and request.truncate_tokens >= 0:
            results = [
                self._truncate(result, prompt, request) for result, prompt in zip(results, request.prompts, strict=True)
            ]
        if request.api != "pooling" and not all(len(result.token_ids) for result in results):
            raise refuse("the prompt is empty")
        first = results[0]
        return Tokenized(
            token_ids=first.token_ids,
            batch=tuple(result.token_ids for result in results[1:]),
            boundaries=first.boundaries,
            extras=first.extras,
            media=first.media,
            media_unread=first.media_unread,
            complete=all(result.complete for result in results) and not request.prefix_only,
            salt=request.cache_salt,
            api=request.api,
            source=first.source,
        )

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        """The prompt text of `messages` in OpenAI's form. Keyword arguments: `tools`, `documents`,
        `add_generation_prompt` (default true), `continue_final_message`, and the template's own."""
        tools = kwargs.pop("tools", None)
        chat = Chat(messages=messages, tools=tools, template_kwargs={**kwargs})
        template = self._template_for(chat)
        return self._render(template, self._converse(template, messages), chat)

    def encode(self, text: str, add_special_tokens: bool = False) -> Ids:
        """The ids of `text`; special tokens that it spells out are parsed, as the engine does."""
        return self._encode(text, add_special_tokens)[0]

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text of `ids`, special tokens included; ids outside of the vocabulary have none."""
        known = [number for i in ids if 0 <= (number := int(i)) <= MAX_TOKEN_ID]
        return str(self._reference.decode(known, skip_special_tokens=False))

    # Prompts -----------------------------------------------------------------------------------------------------

    def _prompt(self, prompt: Prompt, api: str, engine_model: str | None, *, media_options: bool) -> Tokenized:
        if isinstance(prompt, Tokens):
            return Tokenized(token_ids=np.array(prompt.token_ids, dtype=np.uint32), source="given")
        if isinstance(prompt, Text):
            ids, boundaries = self._encode(prompt.text, prompt.add_special_tokens)
            return Tokenized(token_ids=ids, boundaries=boundaries)
        special = prompt.add_special_tokens and (api != "responses" or self._responses_special)
        template = self._template_for(prompt)
        talk = self._converse(template, prompt.messages)
        if talk.media:
            return self._with_media(template, prompt, talk, special, engine_model, options=media_options)
        ids, boundaries = self._encode(self._render(template, talk, prompt), special)
        return Tokenized(token_ids=ids, boundaries=boundaries)

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[Ids, tuple[Boundary, ...]]:
        if len(text) > self._max_chars:
            raise unroutable("too_long", f"the prompt has {len(text)} characters; the limit is {self._max_chars}")
        if not add_special_tokens or not (len(self._prefix) or len(self._suffix)):
            return self.segments.encode(text)
        ids, boundaries = self.segments.encode(text, start=len(self._prefix))
        return np.concatenate([self._prefix, ids, self._suffix]), boundaries

    def _with_media(
        self,
        template: ChatTemplate,
        chat: Chat,
        talk: Conversation,
        special: bool,
        engine_model: str | None,
        *,
        options: bool,
    ) -> Tokenized:
        """The tokens of a chat with images, or of its turns before the first medium that only the engine can read."""
        known = read_media(talk.media, self.images if self.knows_images else None, engine_model, options=options)
        modalities = tuple(one.modality for one in talk.media)
        if known.stop is None:
            ids, boundaries = self._encode(self._render(template, talk, chat), special)
            whole = self._expand(ids, boundaries, known.images, more=False)
            return msgspec.structs.replace(whole, media=modalities)

        def render(messages: list[dict[str, Any]]) -> str:
            return self._render(template, Conversation(messages, ()), chat)

        medium, unread = known.stop
        text = text_before(medium, talk, render, self.cut_token)
        ids, boundaries = self._encode(text, special) if text else (NO_IDS, ())
        if len(self._suffix) and special and len(ids):
            ids = ids[: -len(self._suffix)]
        found = self._expand(ids, boundaries, known.images, more=True)
        if not len(found.token_ids):
            raise unroutable(unread.reason, f"no text before a medium that only the engine knows: {unread.detail}")
        return msgspec.structs.replace(found, media=modalities, media_unread=unread.reason, complete=False)

    def _expand(self, ids: Ids, boundaries: tuple[Boundary, ...], images: Sequence[Placed], *, more: bool) -> Tokenized:
        if self._image_id is None:
            return Tokenized(token_ids=ids, boundaries=boundaries)
        try:
            expanded = expand(ids, boundaries, self._image_id, images, more=more)
        except ValueError as error:
            raise unroutable("image_model", f"the chat template: {error}") from error
        return Tokenized(token_ids=expanded.token_ids, boundaries=expanded.boundaries, extras=expanded.extras)

    def _truncate(self, result: Tokenized, prompt: Prompt, request: PromptRequest) -> Tokenized:
        """As many tokens as the request wants to keep.

        With a side in the request the engine slices the ids. Without one it leaves the cutting to the tokenizer, which
        spares the special tokens around the text and keeps the end of what will be generated from, but the start of what
        will be pooled.
        """
        limit, ids = request.truncate_tokens or 0, result.token_ids
        if len(ids) <= limit or limit == 0:
            return result if limit else Tokenized(token_ids=NO_IDS)
        if result.media:
            raise unroutable("image_options", "the engine truncates prompts with images by rules of its own")
        side = request.truncation_side or ("right" if request.api == "pooling" else "left")
        framed = request.truncation_side is None and not isinstance(prompt, Tokens) and prompt.add_special_tokens
        before, after = (len(self._prefix), len(self._suffix)) if framed else (0, 0)
        inner = ids[before : len(ids) - after]
        keep = max(0, limit - before - after)
        inner = inner[:keep] if side == "right" else inner[len(inner) - keep :]
        kept = tuple(b for b in result.boundaries if b.tokens <= before + keep) if side == "right" else ()
        ids = np.concatenate([ids[:before], inner, ids[len(ids) - after :]])
        return Tokenized(token_ids=ids, boundaries=kept, source=result.source)

    # Templates ---------------------------------------------------------------------------------------------------

    def _template_for(self, chat: Chat) -> ChatTemplate:
        own = chat.chat_template or chat.template_kwargs.get("chat_template")
        if own is not None:
            if self._trust_template is False:
                raise refuse("the engines do not accept chat templates in requests")
            if self._trust_template is None or not isinstance(own, str):
                raise unroutable("request_template", "the request brings its own chat template")
            return self._request_template(own)
        name = "tool_use" if chat.tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise unroutable("no_template", "the model's directory has no chat template")
        return template

    def _compile(self, source: str) -> ChatTemplate:
        try:
            return ChatTemplate(source, self._special_tokens)
        except ValueError as error:
            raise refuse(str(error), "template_rejected") from error

    def _converse(self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> Conversation:
        return conversation(
            messages,
            template.content_format,
            knows_developer=template.knows_developer,
            image_text=IMAGE_TEXT if self.knows_images else None,
        )

    def _render(self, template: ChatTemplate, talk: Conversation, chat: Chat) -> str:
        # The engine drops unset values ("auto" is one to it) before the request's kwargs replace its defaults.
        asked = {k: v for k, v in chat.template_kwargs.items() if v is not None and v != "auto"}
        kwargs = {**self._default_kwargs, "tools": chat.tools, **asked}
        if "messages" in kwargs:
            raise refuse("chat_template_kwargs must not contain 'messages'", "template_rejected")
        return template.render(talk.messages, **kwargs)

    # Cuts --------------------------------------------------------------------------------------------------------

    def _sample(self) -> str | None:
        """A rendered chat of three turns and a generation prompt; None where the template does not render it."""
        if self.template is None:
            return None
        turns = [("user", "One?"), ("assistant", "Two."), ("user", "Three?")]
        try:
            return self.render_chat([{"role": role, "content": text} for role, text in turns])
        except TokenizationError as error:
            log.warning("template_rejects_sample error=%r", error.message)
            return None

    def _choose_cut(self) -> str | None:
        sample = self._sample()
        return turn_token(self.hard_tokens, sample, repeats=2) if sample else None

    def _check_cuts(self, samples: list[str]) -> None:
        """The rule is a proof, this is the seat belt: a wrong cut would cost every hit and raise no error."""
        if not self.cut_token:
            log.warning("segments_off reason=no_safe_cut hard_tokens=%d", len(self.hard_tokens))
            return
        token = self.cut_token
        edges = ["", " ", "\n", "e", "\u0301", "\u0338", "<", "|", ">", "_", token[:-1], token[1:], "\u3000", "a b"]
        texts = [*samples, *(f"{left}{token}{right}{token}" for left in edges for right in edges)]
        whole = self.segments.encoder.encode(texts)
        for text, ids in zip(texts, whole, strict=True):
            if not np.array_equal(self.segments.encode(text)[0], ids):
                log.error("segments_off reason=self_check_failed cut_token=%r text=%r", token, text[:80])
                self.cut_token = None
                self.segments = SegmentedEncoder(self.segments.encoder, [], 0)
                return
