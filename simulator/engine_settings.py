"""What an engine model is told once."""

import msgspec

from simulator.hash_chain import HashRecipe
from simulator.step_cost import StepCost, profile


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`blocks` includes the null block. `speed` 2.0 halves every step time."""

    recipe: HashRecipe
    blocks: int = 4096
    max_running: int = 256
    token_budget: int = 8192
    cost: StepCost = profile("8b")
    speed: float = 1.0
    caching: bool = True
    reserve_output: bool = False

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit into the pool at once."""
        return (self.blocks - 1) * self.recipe.block_tokens
