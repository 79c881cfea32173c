"""An endpoint: an address (and rank) that requests can be sent to."""

import enum

import msgspec

ROLE_LABEL = "llm-d.ai/role"
DRAINING_LABEL = "draining"
"""`true`: the endpoint finishes what it has and gets nothing new; how an operator takes one out without losing requests."""


class Role(enum.Enum):
    """What an endpoint does, as llm-d's label `llm-d.ai/role` spells it. `both` is the older word for `prefill-decode`."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE_PREFILL = "encode-prefill"
    PREFILL_DECODE = "prefill-decode"
    BOTH = "both"
    ENCODE_PREFILL_DECODE = "encode-prefill-decode"


DECODES: frozenset[Role | None] = frozenset(
    {Role.DECODE, Role.PREFILL_DECODE, Role.BOTH, Role.ENCODE_PREFILL_DECODE, None}
)
"""Roles that can answer a request to its end; None stands for an endpoint without a role label."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One addressable engine cache. With data parallelism every rank is an endpoint of its own at the same address."""

    name: str
    address: str
    """`ip:port`, where HTTP requests go."""
    namespace: str = "default"
    labels: dict[str, str] = {}
    rank: int = 0
    events: str | None = None
    """Where the engine publishes KV events: `tcp://host:port`, or `bind:tcp://host:port` where the engine connects to us."""
    replay: str | None = None
    """The engine's replay ROUTER, `tcp://host:port`."""
    topic: str = ""
    """Subscription prefix; empty hears everything."""
    model: str | None = None
    """Served model, where discovery knows it; None means any."""

    @property
    def role(self) -> Role | None:
        """The labelled role; None where the endpoint carries no role label (llm-d: such an endpoint can decode)."""
        value = self.labels.get(ROLE_LABEL)
        return Role(value) if value else None

    @property
    def draining(self) -> bool:
        return self.labels.get(DRAINING_LABEL) == "true"

    @property
    def url(self) -> str:
        return f"http://{self.address}"
