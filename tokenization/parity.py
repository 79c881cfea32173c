"""Do the engine's own token ids agree with the router's? A pure comparison; who samples and counts is elsewhere.

Engines announce the ids of the blocks they store. Where these differ from what the router made of the same request, its
hit rate is zero and nothing else would tell, so the first difference is worth a warning that shows it.
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

Ids = Sequence[int] | NDArray[np.uint32]
CONTEXT_TOKENS = 4


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """The first token on which engine and router disagree."""

    position: int
    """Index in the prompt."""
    engine_id: int | None
    """None where the engine's ids end before the router's do."""
    router_id: int | None
    engine_text: str
    router_text: str
    before: str
    """Text of the last tokens on which both agree."""
    message: str


def compare(
    engine: Ids, router: Ids, decode: Callable[[Sequence[int]], str], *, offset: int = 0, prompt_only: bool = True
) -> Mismatch | None:
    """The first difference between `engine`, the ids of announced blocks that start at token `offset` of the prompt, and
    `router`, the whole prompt as the router tokenized it; None where they agree.

    `prompt_only`: ids behind the router's end are generated tokens or belong to a later turn, and no difference.
    """
    theirs = np.asarray(engine, dtype=np.int64)
    ours = np.asarray(router, dtype=np.int64)[offset:]
    common = min(len(theirs), len(ours))
    differing = np.nonzero(theirs[:common] != ours[:common])[0]
    if not len(differing):
        if prompt_only or len(theirs) <= len(ours):
            return None
        at = common
    else:
        at = int(differing[0])
    engine_id = int(theirs[at]) if at < len(theirs) else None
    router_id = int(ours[at]) if at < len(ours) else None
    before = decode(np.asarray(router)[max(0, offset + at - CONTEXT_TOKENS) : offset + at].tolist())
    engine_text, router_text = ("" if i is None else decode([i]) for i in (engine_id, router_id))
    message = (
        f"token {offset + at}: the engine has {engine_id} {engine_text!r}, the router {router_id} {router_text!r}, "
        f"after {before!r}"
    )
    return Mismatch(
        position=offset + at,
        engine_id=engine_id,
        router_id=router_id,
        engine_text=engine_text,
        router_text=router_text,
        before=before,
        message=message,
    )
