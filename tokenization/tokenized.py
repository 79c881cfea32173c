"""The result of tokenization: what the router may claim about the engine's view of a prompt."""

from typing import Literal

import msgspec
import numpy as np

from tokenization.encoders import Ids
from tokenization.segments import Boundary

Source = Literal["given", "local", "engine", "estimate"]
"""Ids came with the request; computed here; asked from an engine; pseudo ids of 4 bytes each."""

NO_IDS: Ids = np.empty(0, dtype=np.uint32)


class Extra(msgspec.Struct, frozen=True):
    """A multimodal item at its place among the tokens, as the engine hashes it into the blocks that it touches."""

    identifier: str
    offset: int
    """First token of its placeholder."""
    length: int
    """Tokens of its placeholder."""


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids of one request. Ids are read-only by convention: they may be shared with the cache."""

    token_ids: Ids
    """Of the first (mostly: the only) prompt."""
    batch: tuple[Ids, ...] = ()
    """Of the prompts after the first one."""
    boundaries: tuple[Boundary, ...] = ()
    """Named places in `token_ids`, for a key-chain cache; empty where there are none."""
    extras: tuple[Extra, ...] = ()
    """Images whose tokens are among `token_ids`."""
    media: tuple[str, ...] = ()
    """Modalities of the images and the like in the request, whatever is known of their tokens."""
    media_unread: str = ""
    """Why `token_ids` end before one of these; a metric's label (`images.Reason`)."""
    complete: bool = True
    """False where `token_ids` are only the leading part of the prompt (text before an image, a query without its
    documents): good for matching a prefix, no measure of the prompt's length."""
    salt: str | None = None
    api: str = ""
    source: Source = "local"

    @property
    def exact(self) -> bool:
        """Whether `token_ids` are the engine's own (as far as they go)."""
        return self.source != "estimate"

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts of the request."""
        return len(self.token_ids) + sum(map(len, self.batch))
