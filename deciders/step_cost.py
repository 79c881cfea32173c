"""What engine steps and KV transfers cost, by model and hardware: measured tables behind the cost decider.

A step with n tokens (prefill chunk + decodes) takes LIN(n) + attention. LIN is interpolated between measured points and
proportional beyond the last. Attention of n new tokens over a history of h: 4 * heads * 128 * layers * n * (h + n/2) /
600e12 seconds. BF16, vLLM 0.24 kernels, SXM boards; the uncertainty of prefill is about a factor 1.5.
"""

from bisect import bisect_left
from collections.abc import Mapping
from functools import cached_property

import msgspec

from fleet.work import PrefillCost

POINTS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class StepCost(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Constants of one model on one kind of hardware."""

    points: tuple[float, ...]
    """Tokens of a step."""
    linear_ms: tuple[float, ...]
    """Milliseconds of a step with so many tokens, attention aside."""
    layers: int
    heads: int
    """Query heads per GPU."""
    decode_ms: tuple[float, float, float]
    """Decode attention: a constant, per token of context, per decoding request."""
    other_ms: float
    """Per step: LM head and everything outside the model."""
    kv_bytes: int
    """Per token, over all GPUs."""

    def linear(self, tokens: float) -> float:
        """LIN(tokens) in ms; 0 for no tokens."""
        if tokens <= 0:
            return 0.0
        points, cost = self.points, self.linear_ms
        if tokens > points[-1]:
            return cost[-1] * tokens / points[-1]
        at = bisect_left(points, tokens)
        if at == 0:
            return cost[0]
        share = (tokens - points[at - 1]) / (points[at] - points[at - 1])
        return cost[at - 1] + share * (cost[at] - cost[at - 1])

    def attention(self, new: float, history: float) -> float:
        """Prefill attention in ms."""
        return self.pair_ms * new * (history + new / 2)

    def append(self, new: float, history: float, batch: float) -> float:
        """By how many ms a prefill of `new` tokens delays every request of a decode batch."""
        return self.linear(new + batch) - self.linear(batch) + self.attention(new, history)

    def decode_step(self, batch: float, context: float) -> float:
        """Milliseconds of a step that only decodes: `batch` requests with `context` tokens in all."""
        constant, per_token, per_request = self.decode_ms
        return self.linear(max(batch, 1)) + constant + per_token * context + per_request * batch + self.other_ms

    @cached_property
    def pair_ms(self) -> float:
        return 4 * self.heads * 128 * self.layers / 600e12 * 1e3

    @property
    def prefill(self) -> PrefillCost:
        """The same as seconds per token and per pair of tokens, as the books are priced."""
        return PrefillCost(a=self.linear(8192) / 8192 / 1e3, q=self.pair_ms / 1e3)


TABLES: Mapping[str, StepCost] = {
    "8b-h100-tp1": StepCost(
        points=POINTS,
        linear_ms=(5.01, 5.46, 5.69, 5.73, 5.89, 5.84, 6.44, 9.31, 17.85, 35.95, 71.29, 153.98, 308.1),
        layers=32, heads=32, decode_ms=(0.57, 4.15e-5, 0.0041), other_ms=0.43 + 1.16, kv_bytes=131_072,
    ),
    "70b-h100-tp4": StepCost(
        points=POINTS,
        linear_ms=(12.15, 12.98, 12.94, 12.52, 12.90, 13.56, 14.51, 22.40, 41.77, 82.79, 179.0, 406.1, 720.3),
        layers=80, heads=16, decode_ms=(0.72, 2.79e-5, 0.0036), other_ms=0.20 + 2.7, kv_bytes=327_680,
    ),
    "70b-h100-tp8": StepCost(  # with its all-reduces
        points=(1, 8, 64, 256, 512, 1024, 2048, 4096, 8192),
        linear_ms=(10.4, 10.0, 11.3, 16.0, 24.7, 42.3, 75.0, 144.0, 287.0),
        layers=80, heads=8, decode_ms=(0.88, 1.38e-5, 0.0018), other_ms=0.09 + 2.7, kv_bytes=327_680,
    ),
    "8b-h200-tp1": StepCost(
        points=POINTS,
        linear_ms=(3.87, 3.88, 4.19, 4.25, 4.32, 4.40, 5.51, 9.12, 17.99, 39.18, 77.99, 158.5, 323.2),
        layers=32, heads=32, decode_ms=(0.52, 2.95e-5, 0.0046), other_ms=0.26 + 1.16, kv_bytes=131_072,
    ),
}  # fmt: skip
