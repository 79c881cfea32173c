"""What the gateway calls: `await backend.tokenize(path, body)`. It keeps the event loop a fraction of a millisecond at most.

`LocalBackend` computes at once what is short and the rest in worker threads, `EstimateBackend` guesses, `EngineBackend` (module
`engine_backend`) asks an engine. A backend either returns or raises `TokenizationError`; it counts what it did in `counts`.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from tokenization.errors import TokenizationError, unroutable
from tokenization.estimate import estimate
from tokenization.local import LocalTokenizer
from tokenization.tokenized import Tokenized

log = logging.getLogger(__name__)

INLINE_BYTES = 4 * 1024
"""Up to here encoding takes less than changing to another thread and back."""
SMALL_BYTES = 64 * 1024
"""Up to here a request takes well under a millisecond of encoding, and must not wait behind one that takes ten."""


class Backend(Protocol):
    """How requests become token ids."""

    name: str
    counts: Counter[str]
    """Outcome -> requests: "ok", or the reason of the error or fallback. Values of a metric's label."""

    async def tokenize(
        self, path: str, body: Mapping[str, Any], *, size: int | None = None, engine_model: str | None = None
    ) -> Tokenized:
        """The token ids of a request. `size`: bytes of the raw body where they are known. `engine_model`: the engines'
        `--model` where it is known. Raises `TokenizationError`."""

    async def close(self) -> None:
        """Give up threads and connections."""


class LocalBackend:
    """`LocalTokenizer`: the shortest requests at once, others on two thread pools. Small ones have their own, so that big ones
    never delay them."""

    name = "local"

    def __init__(
        self,
        tokenizer: LocalTokenizer,
        *,
        small_workers: int = 2,
        big_workers: int | None = None,
        small_bytes: int = SMALL_BYTES,
        inline_bytes: int = INLINE_BYTES,
    ) -> None:
        """`big_workers`: 1 unless given, and one more for a model whose images are read here: a long text must not wait until
        somebody's picture is hashed."""
        if big_workers is None:
            big_workers = 2 if tokenizer.knows_images else 1
        self.tokenizer = tokenizer
        self.counts: Counter[str] = Counter()
        self._small_bytes, self._inline_bytes = small_bytes, inline_bytes
        self._small = ThreadPoolExecutor(small_workers, thread_name_prefix="tokenize-small")
        self._big = ThreadPoolExecutor(big_workers, thread_name_prefix="tokenize-big")

    async def tokenize(
        self, path: str, body: Mapping[str, Any], *, size: int | None = None, engine_model: str | None = None
    ) -> Tokenized:
        weight = text_size(body, self._small_bytes) if size is None else size
        work = partial(self.tokenizer.tokenize, path, body, engine_model=engine_model)
        try:
            if weight <= self._inline_bytes:
                result = work()
            else:
                pool = self._small if weight <= self._small_bytes else self._big
                result = await asyncio.get_running_loop().run_in_executor(pool, work)
        except TokenizationError as error:
            self.counts[error.reason] += 1
            raise
        # Whatever else a request can provoke in a template engine or a tokenizer, it must cost that request its prefix
        # score and nothing more.
        except Exception as error:
            self.counts["internal"] += 1
            log.exception("tokenization_failed path=%s size=%s", path, size)
            raise unroutable("internal", f"tokenization failed: {error!r}") from error
        self.counts[result.media_unread or "ok"] += 1
        return result

    async def close(self) -> None:
        self._small.shutdown(wait=False, cancel_futures=True)
        self._big.shutdown(wait=False, cancel_futures=True)


class EstimateBackend:
    """Pseudo tokens of 4 bytes."""

    name = "estimate"

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    async def tokenize(
        self, path: str, body: Mapping[str, Any], *, size: int | None = None, engine_model: str | None = None
    ) -> Tokenized:
        try:
            small = (text_size(body, SMALL_BYTES) if size is None else size) <= SMALL_BYTES
            result = estimate(path, body) if small else await asyncio.to_thread(estimate, path, body)
        except TokenizationError as error:
            self.counts[error.reason] += 1
            raise
        self.counts["ok"] += 1
        return result

    async def close(self) -> None:
        return None


def text_size(value: Any, limit: int) -> int:
    """About how many characters a decoded body holds; counting stops soon after `limit`."""
    total, pending = 0, [value]
    while pending and total <= limit:
        item = pending.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            pending.extend(item.values())
            total += 8 * len(item)
        elif isinstance(item, list):
            total += 4 * len(item)
            # Token ids and the like: their number is their size.
            if item and not isinstance(item[0], int):
                pending.extend(item)
        else:
            total += 4
    return total
