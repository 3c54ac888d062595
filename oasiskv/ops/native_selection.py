"""Masses, selection and slots in native code. As in `native.py`: checks, then one call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from . import reference
from ._library import Library
from .native import require_shape, table


def _masses(mass: Tensor, resident: Tensor) -> tuple[int, int, int, int]:
    """Sequences, kv heads, blocks and places. Raises `InputError`."""
    if mass.dim() != 3:
        raise InputError(f"mass.shape is {tuple(mass.shape)}; it must be (sequences, kv_heads, blocks)")
    sequences, heads, blocks = mass.shape
    places = resident.shape[-1]
    require_shape("resident", resident, (sequences, heads, places), "(sequences, kv_heads, places)")
    return sequences, heads, blocks, places


class Selection:
    """`block_mass`, `top_missing`, `select` and `exchange_slots`."""

    def __init__(self, library: Library) -> None:
        self._block_mass = library.call("block_mass")
        self._top_missing = library.call("top_missing")
        self._select = library.call("select")
        self._exchange_slots = library.call("exchange_slots")

    def block_mass(self, logits: Tensor, num_blocks: Tensor, kv_heads: int) -> Tensor:
        """As the reference."""
        if logits.dim() != 4:
            raise InputError(f"logits.shape is {tuple(logits.shape)}; it must be (sequences, rows, query_heads, blocks)")
        sequences, rows, query_heads, blocks = logits.shape
        if kv_heads < 1 or query_heads % kv_heads:
            raise InputError(f"kv_heads is {kv_heads}; it must divide the {query_heads} query heads of logits")
        require_shape("num_blocks", num_blocks, (sequences,), "(sequences,)")
        if logits.dtype is not torch.float32:
            return reference.block_mass(logits, num_blocks, kv_heads)
        logits, num_blocks = logits.contiguous(), table("num_blocks", num_blocks)
        mass = torch.empty((sequences, rows, kv_heads, blocks), dtype=torch.float32, device=logits.device)
        served = self._block_mass(
            logits=logits.data_ptr(),
            num_blocks=num_blocks.data_ptr(),
            mass=mass.data_ptr(),
            sequences=sequences,
            rows=rows,
            query_heads=query_heads,
            kv_heads=kv_heads,
            blocks=blocks,
        )
        return mass if served else reference.block_mass(logits, num_blocks, kv_heads)

    def top_missing(self, mass: Tensor, resident: Tensor, low: Tensor, high: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """As the reference."""
        sequences, heads, blocks, places = _masses(mass, resident)
        require_shape("low", low, (sequences,), "(sequences,)")
        require_shape("high", high, (sequences,), "(sequences,)")
        if mass.dtype is not torch.float32 or count < 0:
            return reference.top_missing(mass, resident, low, high, count)
        mass, resident, low, high = mass.contiguous(), table("resident", resident), table("low", low), table("high", high)
        shape = (sequences, heads, min(count, blocks))
        best_blocks = torch.empty(shape, dtype=torch.int64, device=mass.device)
        best_mass = torch.empty(shape, dtype=torch.float32, device=mass.device)
        served = self._top_missing(
            mass=mass.data_ptr(),
            resident=resident.data_ptr(),
            low=low.data_ptr(),
            high=high.data_ptr(),
            best_blocks=best_blocks.data_ptr(),
            best_mass=best_mass.data_ptr(),
            sequences=sequences,
            kv_heads=heads,
            blocks=blocks,
            places=places,
            count=shape[2],
        )
        return (best_blocks, best_mass) if served else reference.top_missing(mass, resident, low, high, count)

    def select(
        self,
        mass: Tensor,
        resident: Tensor,
        selected_at: Tensor,
        low: Tensor,
        high: Tensor,
        floor: Tensor,
        step: int,
        max_new: int,
        pooled: int,
        margin: float,
        keep: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """As the reference."""
        sequences, heads, blocks, places = _masses(mass, resident)
        require_shape("selected_at", selected_at, (sequences, heads, places), "that of resident")
        for name, bound in (("low", low), ("high", high), ("floor", floor)):
            require_shape(name, bound, (sequences,), "(sequences,)")
        if not mass.dtype == floor.dtype == torch.float32 or max_new < 0:
            return reference.select(mass, resident, selected_at, low, high, floor, step, max_new, pooled, margin, keep)
        mass, floor = mass.contiguous(), floor.contiguous()
        resident, selected_at = table("resident", resident), table("selected_at", selected_at)
        low, high = table("low", low), table("high", high)
        swaps = min(max_new, blocks, places)
        changed, all_places = (sequences, heads, swaps), (sequences, heads, places)
        swap_places, swap_blocks, kept, stamps, counts = (
            torch.empty(shape, dtype=torch.int64, device=mass.device)
            for shape in (changed, changed, all_places, all_places, (sequences, 2))
        )
        served = self._select(
            mass=mass.data_ptr(),
            resident=resident.data_ptr(),
            selected_at=selected_at.data_ptr(),
            low=low.data_ptr(),
            high=high.data_ptr(),
            floor=floor.data_ptr(),
            swap_places=swap_places.data_ptr(),
            swap_blocks=swap_blocks.data_ptr(),
            kept=kept.data_ptr(),
            new_selected_at=stamps.data_ptr(),
            counts=counts.data_ptr(),
            sequences=sequences,
            kv_heads=heads,
            blocks=blocks,
            places=places,
            swaps=swaps,
            pooled=pooled,
            step=step,
            margin=margin,
            keep=keep,
        )
        if not served:
            return reference.select(mass, resident, selected_at, low, high, floor, step, max_new, pooled, margin, keep)
        return swap_places, swap_blocks, kept, stamps, counts

    def exchange_slots(self, slots: Tensor, free: Tensor, count: Tensor, rows: Tensor, kept: Tensor, places: Tensor) -> Tensor:
        """As the reference."""
        if slots.dim() != 3 or free.dim() != 2 or places.dim() != 3:
            raise InputError(
                f"slots, free and places have {slots.dim()}, {free.dim()} and {places.dim()} dimensions; they must be "
                "(rows, kv_heads, places), (rows, slots) and (sequences, kv_heads, swaps)"
            )
        table_rows, heads, per_head = slots.shape
        sequences, _, swaps = places.shape
        require_shape("free", free, (table_rows, free.shape[1]), "(rows, slots)")
        require_shape("count", count, (table_rows,), "(rows,)")
        require_shape("rows", rows, (sequences,), "(sequences,)")
        require_shape("kept", kept, (sequences, heads, per_head), "(sequences, kv_heads, places)")
        require_shape("places", places, (sequences, heads, swaps), "(sequences, kv_heads, swaps)")
        written = (slots, free, count)
        if not all(value.dtype is torch.int64 and value.is_contiguous() for value in written):
            return reference.exchange_slots(slots, free, count, rows, kept, places)
        rows, kept, places = table("rows", rows), table("kept", kept), table("places", places)
        granted = torch.empty((sequences, heads, swaps), dtype=torch.int64, device=slots.device)
        served = self._exchange_slots(
            slots=slots.data_ptr(),
            free_slots=free.data_ptr(),
            free_count=count.data_ptr(),
            rows=rows.data_ptr(),
            kept=kept.data_ptr(),
            places=places.data_ptr(),
            granted=granted.data_ptr(),
            table_rows=table_rows,
            capacity=free.shape[1],
            sequences=sequences,
            kv_heads=heads,
            places_per_head=per_head,
            swaps=swaps,
        )
        return granted if served else reference.exchange_slots(slots, free, count, rows, kept, places)
