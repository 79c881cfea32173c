"""tokenizer.json as the engine uses it, and what its post-processor adds to a text."""

import json
from typing import Any

import msgspec
import numpy as np
import tokenizers

from tokenization.encoders import Ids


def without_truncation(text: str) -> tuple[dict[str, Any], str]:
    """The parsed tokenizer.json and its text, without the truncation and padding that some models ship: the engine sets
    both per request."""
    try:
        spec = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(f"tokenizer.json: not valid JSON: {error}") from error
    if not isinstance(spec, dict) or "model" not in spec:
        raise ValueError("tokenizer.json: not a tokenizer (no 'model')")
    if spec.get("truncation") or spec.get("padding"):
        spec["truncation"] = spec["padding"] = None
        text = json.dumps(spec, ensure_ascii=False)
    return spec, text


def added_around(tokenizer: tokenizers.Tokenizer) -> tuple[Ids, Ids]:
    """The ids that the post-processor puts before and behind a text (BOS, EOS), each maybe empty."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    for at in range(len(full) - len(plain) + 1):
        if full[at : at + len(plain)] == plain:
            return np.array(full[:at], dtype=np.uint32), np.array(full[at + len(plain) :], dtype=np.uint32)
    raise ValueError("tokenizer.json: the post-processor changes the text's own ids; such tokenizers are not supported")
