"""The selected blocks: the part of the working sets that differs between layers and heads, and the slots that it lies in.

With a budget *per head*, every place of a table has a slot for good. With a budget *per sequence*, tables are wider than the
budget and places take slots from the sequence's stack: a block is worth a slot where its mass exceeds the sequence's *floor*,
the same for all layers, heads and steps, so a head that attends to few blocks leaves its slots to one that attends to many.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from . import ops
from .config import OasisConfig
from .types import EMPTY, ModelShape

_SPARE = 1 / 32
"""The share of a sequence's slots that its floor keeps free, so that every step finds some for what it needs anew."""

_RATE = 1.0
"""How fast a floor follows: the logarithm of its change in a step, per share of the slots that is missing or left over."""

KEPT_ABOVE = 0.2
"""A selected block stays while its mass exceeds this share of the floor: what is needed at times is not loaded each time."""

_LOWEST = 1e-6
"""A block with less mass than this is worth no slot."""


class Selected:
    """Tables with a row per sequence, one of each kind per layer; budgets are per head.

    The foreground owns them but for a layer whose background work is running; they change hands under a lock per layer.

    Attributes:
        blocks: `(rows, kv_heads, places)`, `EMPTY` where nothing is selected.
        stamps: the step at which each block last was wanted.
        slots: of the pool, where each place's block lies; `EMPTY` where it has none.
        locks: one per layer, which keeps the tables from changing.
    """

    def __init__(self, shape: ModelShape, config: OasisConfig) -> None:
        self.shape = shape
        self.places = config.selected_places
        empty = torch.full((0, shape.kv_heads, self.places), EMPTY, dtype=torch.int64, device=shape.device)
        layers = range(shape.num_layers)
        self.blocks = [empty.clone() for _ in layers]
        self.stamps = [empty.clone() for _ in layers]
        self.slots = [empty.clone() for _ in layers]
        self.locks = [threading.Lock() for _ in layers]

    def reserve_rows(self, rows: int) -> None:
        """Make room for `rows` sequences. No background work may run."""
        blocks = [taller(table, rows, EMPTY) for table in self.blocks]
        stamps = [taller(table, rows, 0) for table in self.stamps]
        slots = [taller(table, rows, EMPTY) for table in self.slots]
        self.blocks, self.stamps, self.slots = blocks, stamps, slots  # all of one height, whatever interrupts this

    def clear(self, row: int) -> None:
        """Forget the selected blocks of a sequence, and its slots."""
        for tables, nothing in ((self.blocks, EMPTY), (self.stamps, 0), (self.slots, EMPTY)):
            for table in tables:
                table[row] = nothing

    def begin(self, row: int, blocks: torch.Tensor, mass: torch.Tensor, step: int, slots: torch.Tensor) -> None:
        """Take the first selection of a sequence.

        Args:
            blocks, mass: the best blocks of each head, best first, `(layers, kv_heads, at most places)`.
            slots: those that the sequence owns for selected blocks, `(layers, kv_heads, selected_blocks)`.
        """
        self.clear(row)
        for layer in range(self.shape.num_layers):
            self.blocks[layer][row, :, : blocks.shape[2]] = blocks[layer]
            self.stamps[layer][row] = step
            self.slots[layer][row] = slots[layer]

    def copy_row(self, source: int, target: int, moved: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Give `target` the tables of `source`; `moved` tells which of its own slots stand for those of `source`."""
        for layer in range(self.shape.num_layers):
            self.blocks[layer][target] = self.blocks[layer][source]
            self.stamps[layer][target] = self.stamps[layer][source]
            self.slots[layer][target] = moved(self.slots[layer][source])

    def trim(self, row: int, high: int) -> None:
        """Forget blocks from `high` on: the window holds them, and no block may be listed twice."""
        for layer, table in enumerate(self.blocks):
            rows = torch.tensor([row], device=table.device)
            resident = table[rows]
            kept = resident.masked_fill(resident >= high, EMPTY)
            self._exchange(layer, rows, kept, torch.full_like(kept[..., :1], EMPTY))
            table[rows] = kept

    def floor(self, rows: torch.Tensor) -> torch.Tensor:
        """What an empty place of each sequence is worth, `(S,)`; see `ops.select`."""
        return torch.full(rows.shape, -1.0, device=rows.device)

    def read(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The selected blocks of some sequences and the slots they lie in, `(S, kv_heads, places)` each."""
        with self.locks[layer]:
            blocks, there = self.blocks[layer][rows], self.slots[layer][rows]
        return blocks, torch.where(blocks >= 0, there, EMPTY)

    def give_up(
        self, layer: int, rows: torch.Tensor, kept: torch.Tensor, places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take blocks out of the table before their slots are overwritten: `ops.select` chose `kept` and `places`. Returns the
        places that are filled now, and their slots, `(S, kv_heads, K)` each."""
        with self.locks[layer]:
            places = self._exchange(layer, rows, kept, places)
            slots = ops.mark_places(self.blocks[layer], self.slots[layer], rows, kept, places)
        return places, slots

    def publish(
        self,
        layer: int,
        rows: torch.Tensor,
        kept: torch.Tensor,
        places: torch.Tensor,
        blocks: torch.Tensor,
        stamps: torch.Tensor,
    ) -> None:
        """List blocks `(S, kv_heads, K)` that are in the slots of their places now, beside those that were kept."""
        with self.locks[layer]:
            ops.publish_blocks(self.blocks[layer], self.stamps[layer], rows, kept, places, blocks, stamps)

    def _exchange(self, layer: int, rows: torch.Tensor, kept: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The places for which there is a slot: here, all."""
        return places

    def free_slots(self, row: int) -> list[int]:
        """Slots of a sequence that no place holds."""
        return []

    def device_bytes(self) -> int:
        """Bytes of all tables."""
        return sum(table.numel() * table.itemsize for table in [*self.blocks, *self.stamps, *self.slots])


class SharedSelected(Selected):
    """Budgets are per sequence: its layers and heads share the slots.

    Attributes:
        floors: `(rows,)` in float32.
        free: `(rows, slots of a sequence)`, stacks of slots without a block; `free_count` says how many each holds.
    """

    def __init__(self, shape: ModelShape, config: OasisConfig) -> None:
        super().__init__(shape, config)
        self._config = config
        self._slots = shape.num_layers * shape.kv_heads * config.selected_blocks
        self.floors = torch.zeros(0, device=shape.device)
        self.free = torch.full((0, self._slots), EMPTY, dtype=torch.int64, device=shape.device)
        self.free_count = torch.zeros(0, dtype=torch.int64, device=shape.device)
        self._stacks = threading.Lock()

    def reserve_rows(self, rows: int) -> None:
        super().reserve_rows(rows)
        floors, free, count = taller(self.floors, rows, 0), taller(self.free, rows, EMPTY), taller(self.free_count, rows, 0)
        self.floors, self.free, self.free_count = floors, free, count

    def clear(self, row: int) -> None:
        super().clear(row)
        self.free_count[row] = 0

    def begin(self, row: int, blocks: torch.Tensor, mass: torch.Tensor, step: int, slots: torch.Tensor) -> None:
        floor = first_floor(self.shape, self._config, mass)
        blocks = torch.where(mass > floor, blocks, EMPTY)
        super().begin(row, blocks, mass, step, torch.full_like(slots[..., :1], EMPTY).expand(-1, -1, self.places))
        self.floors[row] = floor
        self.free[row] = slots.flatten()
        self.free_count[row] = self._slots
        rows = torch.tensor([row], device=blocks.device)
        places = torch.arange(blocks.shape[2], device=blocks.device)
        for layer, chosen in enumerate(blocks):
            nothing = torch.full_like(self.blocks[layer][rows], EMPTY)
            wanted = torch.where(chosen >= 0, places, EMPTY)[None]
            ops.exchange_slots(self.slots[layer], self.free, self.free_count, rows, nothing, wanted)

    def copy_row(self, source: int, target: int, moved: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().copy_row(source, target, moved)
        self.floors[target] = self.floors[source]
        self.free[target] = moved(self.free[source])
        self.free_count[target] = self.free_count[source]

    def floor(self, rows: torch.Tensor) -> torch.Tensor:
        return self.floors[rows]

    def _exchange(self, layer: int, rows: torch.Tensor, kept: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        with self._stacks:
            places = ops.exchange_slots(self.slots[layer], self.free, self.free_count, rows, kept, places)
            spare = self.free_count[rows] / self._slots
            change = torch.exp((_SPARE - spare) * (_RATE / self.shape.num_layers))
            self.floors[rows] = (self.floors[rows] * change).clamp(min=_LOWEST)
        return places

    def free_slots(self, row: int) -> list[int]:
        free: list[int] = self.free[row, : int(self.free_count[row])].tolist()
        return free

    def device_bytes(self) -> int:
        return super().device_bytes() + sum(
            table.numel() * table.itemsize for table in (self.floors, self.free, self.free_count)
        )


def usable_slots(shape: ModelShape, config: OasisConfig) -> int:
    """How many selected blocks a sequence holds when its budget is full, without the spare slots."""
    return int(shape.num_layers * shape.kv_heads * config.selected_blocks * (1 - _SPARE))


def first_floor(shape: ModelShape, config: OasisConfig, mass: torch.Tensor) -> torch.Tensor:
    """The floor by which a sequence fills its slots but for the spare ones, from the masses of the best `selected_places`
    blocks of each head, `(layers, kv_heads, C)`."""
    most = usable_slots(shape, config)
    ranked = mass.flatten().sort(descending=True).values
    floor = ranked[most] if most < len(ranked) else ranked.new_zeros(())
    return floor.clamp(min=_LOWEST)


def taller(table: torch.Tensor, rows: int, fill: float) -> torch.Tensor:
    """A table with more rows, the new ones full of `fill`."""
    longer = table.new_full((rows, *table.shape[1:]), fill)
    longer[: table.shape[0]] = table
    return longer
