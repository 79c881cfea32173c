"""What makes two blocks of equal tokens different for vLLM: adapter, media, cache salt, prompt embeddings.

The engine hashes them tagged, as ("lora", name, path), ("mm", identifier, offset), ("cache_salt", salt) and
("prompt_embeds", digest), in this order. Its events carry them untagged and without the adapter's path:
["ad1", "s1"], ["img-0", 4], bytes. `from_event` puts the tags back.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

# Constants on purpose: one object each, as in the engine (see the pickle trap in engine_hash).
_LORA, _MEDIA, _SALT, _EMBEDS = "lora", "mm", "cache_salt", "prompt_embeds"


class ExtraKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The extra keys of one block. Only the first block of a sequence carries the salt; every block the adapter."""

    lora: tuple[str, str] | None = None  # name, path
    media: tuple[tuple[str, int], ...] = ()  # identifier, offset from the block's start (negative: began earlier)
    salt: str | None = None
    prompt_embeds: tuple[bytes, ...] = ()  # SHA-256 of that slice of the embeddings

    def tagged(self, separate: Callable[[str], str]) -> tuple[tuple[Any, ...], ...] | None:
        """The tuple that is hashed, None when empty; `separate` copies a string that is not a constant."""
        keys: list[tuple[Any, ...]] = []
        if self.lora is not None:
            keys.append((_LORA, separate(self.lora[0]), separate(self.lora[1])))
        keys.extend((_MEDIA, separate(identifier), offset) for identifier, offset in self.media)
        if self.salt is not None:
            keys.append((_SALT, separate(self.salt)))
        keys.extend((_EMBEDS, bytes(bytearray(digest))) for digest in self.prompt_embeds)
        return tuple(keys) or None


def from_event(entry: Sequence[Any] | None, *, lora_name: str | None, lora_path: str | None) -> ExtraKeys | None:
    """One entry of an event's `extra_keys` in the form the engine hashed it, None when it has none.

    `lora_name` is the event's; `lora_path` is the adapter's `root` in /v1/models, which no event carries. A string
    is the adapter's name if it comes first and equals `lora_name`, otherwise the salt. Raises ValueError for an entry
    of another shape, or for an adapter whose path is unknown.
    """
    rest = list(entry or ())
    lora = None
    if lora_name is not None:
        if rest and rest[0] == lora_name:
            del rest[0]
        if lora_path is None:
            raise ValueError(f"the path of LoRA adapter {lora_name!r} is unknown, its blocks cannot be hashed")
        lora = (lora_name, lora_path)
    media: list[tuple[str, int]] = []
    embeds: list[bytes] = []
    salt = None
    for key in rest:
        match key:
            case str() if salt is None:
                salt = key
            case bytes():
                embeds.append(key)
            case [str() as identifier, int() as offset]:
                media.append((identifier, offset))
            case _:
                raise ValueError(f"extra key {key!r}: expected a salt, [identifier, offset] or bytes")
    if lora is None and not media and salt is None and not embeds:
        return None
    return ExtraKeys(lora=lora, media=tuple(media), salt=salt, prompt_embeds=tuple(embeds))
