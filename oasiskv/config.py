"""`OasisConfig`: every setting of the library, validated before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from os import PathLike
from typing import Literal

from .errors import ConfigError
from .types import MAX_STEP_ROWS

_BURST = 4
"""How many times its even share of a layer's loads one head may take."""

_SHARES = 2
"""How many times its share of a sequence's slots one head may take."""


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_finite(value: object) -> bool:
    """Whether it is a number of at least 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


@dataclass(frozen=True, kw_only=True)
class OasisConfig:
    """Settings of one `KVManager`. Frozen; every combination that cannot work raises `ConfigError`.

    Attributes:
        budget_tokens: tokens per kv head that a sparse sequence keeps on the device: sinks, local window and the
            selected blocks together. A multiple of `block_size`.
        budget_per: whose number of selected blocks is bounded. "head": every kv head of every layer has the same number.
            "sequence": all heads and layers of a sequence share theirs, and `budget_tokens` is the mean. A head takes what its
            attention needs, up to twice its share.
        block_size: consecutive tokens in a block, the unit of ranking, residency and transfer. Even, 4 to 64.
        sink_tokens: first tokens of a sequence that always stay, rounded up to blocks.
        window_tokens: most recent tokens that always stay, rounded up to blocks.
        max_new_blocks: most blocks loaded into the pool per kv head and step, on average over the heads of a sequence in one
            layer. Needs come in bursts, so a single head may take up to four times as many.
        correction_blocks: most missing blocks, per query row, that the exact queries of the step may add at attention time,
            read in place from the arena. 0 turns correction off.
        correction_margin: attention mass that a missing block must hold to be read in place. Both margins are shares of the
            mean mass of a selected block, `1 / selected_blocks` per query head.
        swap_margin: attention mass that a missing block must gain over the resident one it replaces.
        dense_threshold: tokens up to which a sequence keeps its whole KV on the device; `None` means `budget_tokens`.
        summary: name of the key summary that ranks blocks (entry-point group `oasiskv.key_summaries`).
        calibration: file of `oasiskv calibrate` from which the summary takes its parameters; `None` fits them on the first
            texts that turn sparse.
        predictor: name of the predictor (entry-point group `oasiskv.predictors`).
        on_late: what a layer does when its background move is not done: "wait" for it, or "skip" it and count.
        workers: background threads; 0 runs the background work inline, in the caller's thread.
        pool_bytes: size of the device pool, allocated at once; `None` grows it to exactly what the sequences need.
        arena_bytes: most bytes of the host arena; `None` means the machine's physical memory, or half of it with a tier store
            below. Only what is used is taken.
        tier: where blocks go that the arena has no room for: the location of a tier store, such as
            "file:/var/cache/kv?limit=100GiB" (entry-point group `oasiskv.tier_stores`), or several, from fast to slow. Every
            sealed block is stored there; the arena then keeps what was used lately. `None`: the arena holds everything.
        tier_patience_s: seconds that a call which cannot do without the tier store waits while the store is down, before it
            raises. 0 does not wait.
        segment_blocks: consecutive blocks that are stored together, in objects of one layer and all kv heads.
        poison_freed: overwrite freed slots with NaN, so that a stale read shows. For tests.
    """

    budget_tokens: int = 2048
    budget_per: Literal["head", "sequence"] = "head"
    block_size: int = 16
    sink_tokens: int = 16
    window_tokens: int = 128
    max_new_blocks: int = 4
    correction_blocks: int = 4
    correction_margin: float = 0.17
    swap_margin: float = 0.09
    dense_threshold: int | None = None
    summary: str = "transform"
    calibration: str | PathLike[str] | None = None
    predictor: str = "layer-ahead"
    on_late: Literal["wait", "skip"] = "wait"
    workers: int = 1
    pool_bytes: int | None = None
    arena_bytes: int | None = None
    tier: str | Sequence[str] | None = None
    tier_patience_s: float = 0.0
    segment_blocks: int = 16
    poison_freed: bool = False

    def __post_init__(self) -> None:
        for name in ("budget_tokens", "block_size", "window_tokens", "segment_blocks"):
            self._require_int(name, minimum=1)
        for name in ("sink_tokens", "max_new_blocks", "correction_blocks", "workers"):
            self._require_int(name, minimum=0)
        for name in ("pool_bytes", "arena_bytes", "dense_threshold"):
            if getattr(self, name) is not None:
                self._require_int(name, minimum=1)
        for name in ("summary", "predictor"):
            value = getattr(self, name)
            if not _is_text(value):
                raise ConfigError(f"{name} is {value!r}; it must be the name of a registered plug-in")
        if self.calibration is not None and (not isinstance(self.calibration, str | PathLike) or not str(self.calibration)):
            raise ConfigError(f"calibration is {self.calibration!r}; it must be the path of a file, or None")
        if not 4 <= self.block_size <= 64 or self.block_size % 2:
            raise ConfigError(f"block_size is {self.block_size}; it must be even and between 4 and 64 (16 is a good start)")
        for name in ("swap_margin", "correction_margin"):
            value = getattr(self, name)
            if not _is_finite(value):
                raise ConfigError(f"{name} is {value!r}; it is a share of a selected block's mean mass, a number of at least 0")
        if not _is_finite(self.tier_patience_s):
            raise ConfigError(f"tier_patience_s is {self.tier_patience_s!r}; it must be a number of seconds, at least 0")
        if isinstance(self.tier, list):
            object.__setattr__(self, "tier", tuple(self.tier))
        if not isinstance(self.tier, str | tuple | None) or self.tier in ("", ()) or not all(map(_is_text, self.tiers)):
            raise ConfigError(f"tier is {self.tier!r}; it must be the location of a tier store, several of them, or None")
        if not isinstance(self.poison_freed, bool):
            raise ConfigError(f"poison_freed is {self.poison_freed!r}; it must be True or False")
        if self.budget_per not in ("head", "sequence"):
            raise ConfigError(f'budget_per is {self.budget_per!r}; it must be "head" or "sequence"')
        if self.on_late not in ("wait", "skip"):
            raise ConfigError(f'on_late is {self.on_late!r}; it must be "wait" or "skip"')
        needed = (self.sink_blocks + self.ring_blocks + 1) * self.block_size
        if self.budget_tokens % self.block_size:
            down = self.budget_tokens // self.block_size * self.block_size
            fitting = sorted({max(needed, down), max(needed, down + self.block_size)})
            raise ConfigError(
                f"budget_tokens is {self.budget_tokens}, not a multiple of block_size {self.block_size}; "
                f"use {' or '.join(map(str, fitting))}"
            )
        if self.selected_blocks < 1:
            raise ConfigError(
                f"budget_tokens is {self.budget_tokens}, which cannot hold the sinks ({self.sink_tokens} tokens), the window "
                f"({self.window_tokens} tokens and room for {MAX_STEP_ROWS} rows of a step) and one selected block of "
                f"{self.block_size} tokens; use at least {needed}, or lower sink_tokens or window_tokens"
            )
        if self.dense_threshold is not None and self.dense_threshold < self.budget_tokens:
            raise ConfigError(
                f"dense_threshold is {self.dense_threshold}, below budget_tokens {self.budget_tokens}: a sequence that fits "
                f"the budget loses nothing by staying dense; use at least {self.budget_tokens}, or None"
            )

    def _require_int(self, name: str, minimum: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ConfigError(f"{name} is {value!r}; it must be an integer of at least {minimum}")

    @property
    def tiers(self) -> tuple[str, ...]:
        """Locations of tier stores, from fast to slow."""
        return (self.tier,) if isinstance(self.tier, str) else tuple(self.tier or ())

    @property
    def sink_blocks(self) -> int:
        """Blocks that hold the sinks."""
        return -(-self.sink_tokens // self.block_size)

    @property
    def window_blocks(self) -> int:
        """Blocks before the tail block that the window always keeps."""
        return -(-self.window_tokens // self.block_size)

    @property
    def ring_blocks(self) -> int:
        """Places of the window ring: the window, the tail block, and the blocks that draft rows may open beyond it.

        A step of `MAX_STEP_ROWS` rows that starts anywhere in the tail block must not overwrite a block of the window.
        """
        return self.window_blocks + 1 + -(-(MAX_STEP_ROWS - 1) // self.block_size)

    @property
    def budget_blocks(self) -> int:
        """Places in the working set of one kv head."""
        return self.budget_tokens // self.block_size

    @property
    def selected_blocks(self) -> int:
        """Slots for blocks chosen by their scores, per kv head, on average if a sequence shares them."""
        return self.budget_blocks - self.sink_blocks - self.ring_blocks

    @property
    def selected_places(self) -> int:
        """Most blocks that one kv head may select."""
        return self.selected_blocks * (_SHARES if self.budget_per == "sequence" else 1)

    @property
    def swap_gain(self) -> float:
        """`swap_margin` as attention mass per query head."""
        return self.swap_margin / self.selected_blocks

    @property
    def correction_gain(self) -> float:
        """`correction_margin` as attention mass per query head."""
        return self.correction_margin / self.selected_blocks

    @property
    def burst_blocks(self) -> int:
        """Most blocks that one kv head may load in a step when the other heads of its layer load fewer."""
        return min(_BURST * self.max_new_blocks, self.selected_places)

    @property
    def dense_blocks(self) -> int:
        """Places that a dense sequence may fill before it must turn sparse."""
        return (self.dense_threshold or self.budget_tokens) // self.block_size

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of all settings, in the order of their definition."""
        return tuple(field.name for field in fields(cls))
