"""What decoding asks of the tier that the new blocks of every step come from, in bytes per second."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .config import OasisConfig
from .errors import InputError
from .types import ModelShape

BUSY_GPU_BYTES_PER_S = 50e9
"""A rule of practice: a tier that is slower does not feed a busy GPU."""


@dataclass(frozen=True)
class Demand:
    """A model, and how it is used.

    Attributes:
        shape: of the model.
        config: budget and block size.
        context_tokens: tokens of each sequence.
        batch: sequences that decode together.
        steps_per_s: steps of the batch, so tokens per second of each sequence.
        new_blocks: blocks that a kv head of a layer loads per step, on average.
    """

    shape: ModelShape
    config: OasisConfig
    context_tokens: int
    batch: int
    steps_per_s: float
    new_blocks: float

    def __post_init__(self) -> None:
        for name in ("context_tokens", "batch"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("steps_per_s", "new_blocks"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}; it must be a number above 0")

    @property
    def slot_bytes(self) -> int:
        """Of one block of one kv head in one layer."""
        return self.shape.slot_bytes(self.config.block_size)

    @property
    def loaded_blocks(self) -> float:
        """New blocks per head and step: no more than there are outside of the budget, and no more than there are places for."""
        outside = max(0, math.ceil((self.context_tokens - self.config.budget_tokens) / self.config.block_size))
        return min(self.new_blocks, self.config.selected_blocks, outside)

    @property
    def step_bytes(self) -> float:
        """What one sequence loads per step."""
        return self.loaded_blocks * self.shape.kv_heads * self.shape.num_layers * self.slot_bytes

    @property
    def bytes_per_s(self) -> float:
        """What the batch loads."""
        return self.step_bytes * self.batch * self.steps_per_s

    @property
    def reads_per_call(self) -> int:
        """Blocks that one layer loads in a step: what is asked of a tier at once."""
        return max(1, round(self.loaded_blocks * self.shape.kv_heads * self.batch))

    def fed_tokens_per_s(self, bytes_per_s: float) -> float:
        """Tokens per second of all sequences together that a tier of this bandwidth can feed; infinite if nothing is loaded."""
        return bytes_per_s / self.step_bytes if self.step_bytes else math.inf

    def arithmetic(self) -> str:
        """How `bytes_per_s` comes about, with its numbers."""
        return (
            f"{self.loaded_blocks:g} new blocks per head and step x {self.shape.kv_heads} heads x {self.shape.num_layers} "
            f"layers x {self.slot_bytes:,} bytes x batch of {self.batch} x {self.steps_per_s:g} steps/s "
            f"= {self.bytes_per_s / 1e9:.3g} GB/s"
        )
