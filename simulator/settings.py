"""Everything a simulated engine server can be told."""

import msgspec

from simulator.engine_settings import EngineSettings
from simulator.hash_chain import HashRecipe
from simulator.step_cost import profile
from simulator.wire import WireFormat


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults are vLLM's where it has one. Raises ValueError for values that no engine could start with.

    `events` / `replay`: addresses of the PUB and ROUTER sockets, None for none. `bind_events` None: vLLM's rule (an address
    with `*` is bound, any other connected to). `loras`: adapter name -> path. `hash_seed`: PYTHONHASHSEED, None if unset.
    """

    name: str = "engine"
    host: str = "127.0.0.1"
    port: int = 8000
    model: str = "sim"
    loras: dict[str, str] = {}
    events: str | None = None
    replay: str | None = None
    bind_events: bool | None = None
    buffer_steps: int = 10_000
    topic: str = ""
    rank: int = 0
    wire: WireFormat = WireFormat()
    hash_algorithm: str = "sha256"
    hash_seed: str | None = None
    block_tokens: int = 16
    blocks: int = 4096
    max_running: int = 256
    token_budget: int = 8192
    max_model_len: int | None = None
    profile: str = "8b"
    speed: float = 1.0
    caching: bool = True
    reply_tokens: int = 64
    load_failure_recompute: bool = False
    lease_s: float = 30.0

    def __post_init__(self) -> None:
        if self.speed <= 0:
            raise ValueError(f"speed {self.speed}: must be above 0")
        if self.max_model_len is not None and self.max_model_len > self.capacity_tokens:
            raise ValueError(
                f"max model length {self.max_model_len}: {self.blocks} blocks of {self.block_tokens} tokens hold only "
                f"{self.capacity_tokens} tokens"
            )

    @property
    def capacity_tokens(self) -> int:
        return (self.blocks - 1) * self.block_tokens

    @property
    def context_tokens(self) -> int:
        """The longest prompt and reply together."""
        return self.max_model_len or min(131_072, self.capacity_tokens)

    def engine(self) -> EngineSettings:
        return EngineSettings(
            recipe=HashRecipe.of(self.hash_algorithm, self.hash_seed, self.block_tokens),
            blocks=self.blocks,
            max_running=self.max_running,
            token_budget=self.token_budget,
            cost=profile(self.profile),
            speed=self.speed,
            caching=self.caching,
        )

    def cache_config(self) -> dict[str, str]:
        """The labels of `vllm:cache_config_info`."""
        return {
            "block_size": str(self.block_tokens),
            "hash_block_size": "None",
            "effective_attention_block_size": str(self.block_tokens),
            "prefix_match_unit": "None",
            "prefix_caching_hash_algo": self.hash_algorithm,
            "enable_prefix_caching": str(self.caching),
            "num_gpu_blocks": str(self.blocks),
            "kv_cache_size_tokens": str(self.blocks * self.block_tokens),
            "prefix_cache_retention_interval": "0",
            "sliding_window": "None",
        }

    def event_sources(self, endpoint: str | None, replay: str | None) -> dict[str, dict[str, object]]:
        """The body of /kv_event_sources, with the addresses as they were resolved."""
        return {
            str(self.rank): {
                "enable_kv_cache_events": endpoint is not None,
                "publisher": "zmq" if endpoint is not None else "null",
                "endpoint": endpoint,
                "replay_endpoint": replay,
                "buffer_steps": self.buffer_steps,
                "hwm": 100_000,
                "max_queue_size": 100_000,
                "topic": self.topic,
            }
        }
