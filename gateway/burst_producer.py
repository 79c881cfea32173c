"""The parameters of a burst producer; `gateway.burst_room` does what they say."""

from typing import Annotated, Literal

from msgspec import Meta

from fleet import plugin
from fleet.plugin import Producer
from gateway.joint_placement import Rules


class BurstPrefixCacheProducer(Producer, type="burst-prefix-cache-producer"):
    """Send prompts that arrive together and begin alike to the same endpoint, so that their prefix is computed once.

    For many requests with one prompt in the same moment (rollouts of reinforcement learning, best of n, fan-out over one
    document): nothing of it is cached anywhere yet, and decided one by one they are spread by load. The first request opens
    a window; when it ends, its prompts are placed jointly, and each gets a full match on the endpoint it was assigned and
    none elsewhere. A prefix-cache-scorer that names this producer turns that into a score; the other scorers of the profile
    still have their say.

    - Prompts with the same full blocks are a group and go together. A prompt of its own is placed only where it shares at
      least `minColocateBlocks` (above 0) leading blocks with another one. Nothing is said about the others.
    - Groups are placed the heaviest first, each on the endpoint with the lowest level: what the books say is in flight there
      plus what the window has already put there, in requests or (`balanceBy: tokens`) uncached prompt tokens. A shared
      beginning attracts others only up to an even level.
    - `maxPerReplica` splits a group; the rest goes to the next endpoint. A fleet too small for it is filled evenly.
    - Candidates are those that the filters of the request's own profile leave; with a hand-off, the endpoints that would
      compute the prompt. Those that went away or stopped taking requests while the window was open are left out; new ones
      come in with the next window.
    - Held are only prompts of at least one full block with a choice of endpoints, in a profile that reads this producer.
      Everything else is decided at once. A reload and a shutdown end the open window early, and during shutdown nobody is
      held.

    The wait is at most `windowDurationMs`, whatever it is: `warmroute.decideTimeout` is about tokenizing and does not cut it
    short, and the deadline of a decision (and Envoy's `message_timeout` as `warmroute envoy-config` writes it) is longer by
    the window. A window remembers nothing of the one before; add a precise or approximate producer for that.
    Reads: `fleet.in_flight` or `fleet.in_flight_tokens`, at the end of the window.
    Source: llm-d-router burst-prefix-cache-producer. There a full window sends the next requests off without a match; here
    it ends early and the next one opens. There only ties are broken by what endpoints are busy with.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        window_duration_ms: Annotated[
            int, Meta(ge=1, le=10000, description="How long a window is open: the most that a request waits here.")
        ] = 100
        max_per_replica: Annotated[
            int, Meta(ge=-1, description="Most prompts of one group per endpoint; -1: all.")
        ] = -1
        block_size_tokens: Annotated[int, Meta(ge=1, description="Tokens per block.")] = 64
        max_prefix_tokens_to_match: Annotated[
            int, Meta(ge=0, description="Prompts are alike if they are up to here; 0: to their last full block.")
        ] = 0
        min_colocate_blocks: Annotated[
            int,
            Meta(
                ge=0,
                description="Leading blocks that prompts which are not alike must share to attract each other; 0: never.",
            ),
        ] = 0
        max_batch_size: Annotated[
            int, Meta(ge=-1, description="Requests that end a window early; -1: time alone bounds it.")
        ] = 1000
        balance_by: Annotated[
            Literal["requests", "tokens"],
            Meta(description="What is spread evenly: requests, or prompt tokens to compute."),
        ] = "requests"

        def __post_init__(self) -> None:
            if self.max_per_replica == 0:
                raise ValueError("maxPerReplica must be -1 (no limit) or at least 1")
            if self.max_batch_size == 0:
                raise ValueError("maxBatchSize must be -1 (no limit) or at least 1")
            if 0 < self.max_prefix_tokens_to_match < self.block_size_tokens:
                raise ValueError(
                    f"maxPrefixTokensToMatch is {self.max_prefix_tokens_to_match}, less than one block of "
                    f"{self.block_size_tokens} tokens (blockSizeTokens), so nothing could match; write 0 for no limit"
                )

    parameters: Parameters

    @property
    def rules(self) -> Rules:
        given = self.parameters
        return Rules(
            block_tokens=given.block_size_tokens,
            max_per_replica=given.max_per_replica if given.max_per_replica > 0 else None,
            min_colocate_blocks=given.min_colocate_blocks,
            by_tokens=given.balance_by == "tokens",
        )

    @property
    def window_s(self) -> float:
        return self.parameters.window_duration_ms / 1e3

    @property
    def most(self) -> int | None:
        """Requests of one window; None without a limit."""
        return self.parameters.max_batch_size if self.parameters.max_batch_size > 0 else None

    @property
    def max_blocks(self) -> int | None:
        """How much of a prompt is looked at; None: all."""
        return self.parameters.max_prefix_tokens_to_match // self.parameters.block_size_tokens or None
