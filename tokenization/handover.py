"""Hand the router's token ids to an engine, so that it does not tokenize the same prompt again."""

from collections.abc import Mapping
from typing import Any

from tokenization.tokenized import Tokenized

APIS = frozenset(("chat", "responses", "messages"))
"""Where vLLM reads `kv_transfer_params.prompt_token_ids` (experimental)."""


def with_token_ids(body: Mapping[str, Any], tokenized: Tokenized) -> dict[str, Any] | None:
    """A copy of `body` that carries the ids of its prompt; None where the engine would not use them or they are not all
    of the prompt (other APIs, batches, images, echo, estimates), or the request carries ids already."""
    transfer = body.get("kv_transfer_params")
    usable = (
        tokenized.api in APIS
        and tokenized.source in ("local", "engine")
        and tokenized.complete
        and not tokenized.batch
        and not tokenized.media
        and not tokenized.extras
        and len(tokenized.token_ids) > 0
        and not body.get("echo")
        and (transfer is None or (isinstance(transfer, Mapping) and "prompt_token_ids" not in transfer))
    )
    if not usable:
        return None
    return {**body, "kv_transfer_params": {**(transfer or {}), "prompt_token_ids": tokenized.token_ids.tolist()}}
