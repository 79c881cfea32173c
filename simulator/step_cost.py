"""How long one engine step takes: measured H100 kernels as a formula.

    step = LIN(n) + HEAD + attention of the prefill chunks + attention of the decodes + overhead          (all ms)

n = prefill tokens + decodes of the step. Linear layers come from a table (linear interpolation, proportional beyond the
last point); attention of a chunk of c tokens after h tokens of history is 4 Hq 128 L c (h + c/2) / 600 TFLOP/s; decode
attention is linear in the sum of contexts. Source: aiconfigurator-core 0.12.0 tables for vLLM 0.24, BF16, tensor-parallel
all-reduces included. Uncertainty of prefill: about a factor 1.5.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping

import msgspec

_FLOPS = 600e12


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of one model on one machine. Times in milliseconds."""

    tokens: tuple[int, ...]
    linear_ms: tuple[float, ...]
    head_ms: float
    query_heads: int
    layers: int
    decode_base_ms: float
    decode_context_ms: float
    decode_request_ms: float
    overhead_ms: float
    overhead_request_ms: float
    transfer_token_us: float
    transfer_setup_ms: float = 1.0

    def linear(self, tokens: int) -> float:
        """Milliseconds of all linear layers for a step of `tokens` tokens."""
        points, values = self.tokens, self.linear_ms
        if tokens >= points[-1]:
            return values[-1] * tokens / points[-1]
        right = bisect_left(points, tokens)
        if right == 0:
            return values[0]
        low, high = points[right - 1], points[right]
        share = (tokens - low) / (high - low)
        return values[right - 1] + share * (values[right] - values[right - 1])

    def prefill_attention(self, chunk: int, history: int) -> float:
        """Milliseconds of attention for `chunk` prompt tokens that follow `history` tokens."""
        return 4 * self.query_heads * 128 * self.layers * chunk * (history + chunk / 2) / _FLOPS * 1e3

    def step_ms(self, chunks: Iterable[tuple[int, int]], contexts: Iterable[int]) -> float:
        """One step: `chunks` are (tokens, history) of prefills, `contexts` the context lengths of the decodes."""
        chunks, contexts = list(chunks), list(contexts)
        prefill = sum(tokens for tokens, _ in chunks)
        decodes = len(contexts)
        if prefill + decodes == 0:
            return 0.0
        total = self.linear(prefill + decodes) + self.head_ms
        total += sum(self.prefill_attention(tokens, history) for tokens, history in chunks)
        if decodes:
            total += self.decode_base_ms + self.decode_context_ms * sum(contexts) + self.decode_request_ms * decodes
        return total + self.overhead_ms + self.overhead_request_ms * decodes

    def transfer_ms(self, tokens: int) -> float:
        """Milliseconds to pull the KV of `tokens` tokens from another engine over one 40 GB/s link."""
        return self.transfer_setup_ms + self.transfer_token_us * tokens / 1e3


_POINTS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

PROFILES: Mapping[str, StepCost] = {
    "8b": StepCost(
        tokens=_POINTS,
        linear_ms=(5.01, 5.46, 5.69, 5.73, 5.89, 5.84, 6.44, 9.31, 17.85, 35.95, 71.29, 153.98, 308.1),
        head_ms=0.43,
        query_heads=32,
        layers=32,
        decode_base_ms=0.57,
        decode_context_ms=4.15e-5,
        decode_request_ms=0.0041,
        overhead_ms=1.16,
        overhead_request_ms=0.0044,
        transfer_token_us=3.3,
    ),
    "8b-h200": StepCost(
        tokens=_POINTS,
        linear_ms=(3.87, 3.88, 4.19, 4.25, 4.32, 4.40, 5.51, 9.12, 17.99, 39.18, 77.99, 158.5, 323.2),
        head_ms=0.26,
        query_heads=32,
        layers=32,
        decode_base_ms=0.52,
        decode_context_ms=2.95e-5,
        decode_request_ms=0.0046,
        overhead_ms=1.16,
        overhead_request_ms=0.0044,
        transfer_token_us=3.3,
    ),
    "70b-tp8": StepCost(
        tokens=(1, 8, 64, 256, 512, 1024, 2048, 4096, 8192),
        linear_ms=(10.4, 10.0, 11.3, 16.0, 24.7, 42.3, 75.0, 144.0, 287.0),
        head_ms=0.09,
        query_heads=8,
        layers=80,
        decode_base_ms=0.88,
        decode_context_ms=1.38e-5,
        decode_request_ms=0.0018,
        overhead_ms=2.7,
        overhead_request_ms=0.0053,
        transfer_token_us=8.2,
    ),
}


def profile(name: str) -> StepCost:
    """The constants called `name`; raises ValueError naming the valid ones."""
    if name not in PROFILES:
        raise ValueError(f"no step-cost profile named {name!r}; there are {', '.join(PROFILES)}")
    return PROFILES[name]
