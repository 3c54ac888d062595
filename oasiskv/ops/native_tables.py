"""Tables and guesses of a step in native code. As in `native.py`: checks, then one call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from . import reference_step as reference
from ._library import Library
from .native import require_shape, require_slots, table


class Transfers:
    """`mark_places`, `load_blocks` and `publish_blocks`."""

    def __init__(self, library: Library) -> None:
        self._mark_places = library.call("mark_places")
        self._load_blocks = library.call("load_blocks")
        self._publish_blocks = library.call("publish_blocks")

    def mark_places(self, blocks: Tensor, slots: Tensor, rows: Tensor, kept: Tensor, places: Tensor) -> Tensor:
        """As the reference."""
        sequences, heads, swaps = swaps_shape("places", places)
        require_places("blocks", blocks, heads)
        table_rows, _, per_head = blocks.shape
        require_shape("slots", slots, (table_rows, heads, per_head), "that of blocks")
        require_shape("rows", rows, (sequences,), "(sequences,)")
        require_shape("kept", kept, (sequences, heads, per_head), "(sequences, kv_heads, places)")
        if not writable(blocks):
            return reference.mark_places(blocks, slots, rows, kept, places)
        slots, rows, kept, places = table("slots", slots), table("rows", rows), table("kept", kept), table("places", places)
        filled = torch.empty((sequences, heads, swaps), dtype=torch.int64, device=blocks.device)
        served = self._mark_places(
            blocks=blocks.data_ptr(),
            slots=slots.data_ptr(),
            table_rows=rows.data_ptr(),
            kept=kept.data_ptr(),
            places=places.data_ptr(),
            filled=filled.data_ptr(),
            num_table_rows=table_rows,
            sequences=sequences,
            kv_heads=heads,
            places_per_head=per_head,
            swaps=swaps,
        )
        return filled if served else reference.mark_places(blocks, slots, rows, kept, places)

    def load_blocks(self, arena: Tensor, pool: Tensor, arena_slots: Tensor, blocks: Tensor, slots: Tensor) -> Tensor:
        """As the reference."""
        require_slots("arena", arena)
        require_slots("pool", pool)
        if arena.shape[1:] != pool.shape[1:]:
            raise InputError(f"a slot of arena is {tuple(arena.shape[1:])}, one of pool {tuple(pool.shape[1:])}")
        sequences, heads, swaps = swaps_shape("blocks", blocks)
        require_shape("slots", slots, (sequences, heads, swaps), "that of blocks")
        require_shape("arena_slots", arena_slots, (sequences, heads, arena_slots.shape[-1]), "(sequences, kv_heads, blocks)")
        if arena.dtype is not pool.dtype or not (arena.is_contiguous() and pool.is_contiguous()):
            return reference.load_blocks(arena, pool, arena_slots, blocks, slots)
        arena_slots, blocks, slots = table("arena_slots", arena_slots), table("blocks", blocks), table("slots", slots)
        counts = torch.empty((sequences, 2), dtype=torch.int64, device=pool.device)
        served = self._load_blocks(
            arena=arena.data_ptr(),
            pool=pool.data_ptr(),
            arena_slots=arena_slots.data_ptr(),
            blocks=blocks.data_ptr(),
            slots=slots.data_ptr(),
            counts=counts.data_ptr(),
            sequences=sequences,
            kv_heads=heads,
            num_sealed=arena_slots.shape[2],
            swaps=swaps,
            num_arena_slots=arena.shape[0],
            num_slots=pool.shape[0],
            slot_bytes=2 * pool.shape[2] * pool.shape[3] * pool.itemsize,
        )
        return counts if served else reference.load_blocks(arena, pool, arena_slots, blocks, slots)

    def publish_blocks(
        self,
        blocks: Tensor,
        selected_at: Tensor,
        rows: Tensor,
        kept: Tensor,
        places: Tensor,
        new_blocks: Tensor,
        stamps: Tensor,
    ) -> None:
        """As the reference."""
        sequences, heads, swaps = swaps_shape("places", places)
        require_places("blocks", blocks, heads)
        table_rows, _, per_head = blocks.shape
        require_shape("selected_at", selected_at, (table_rows, heads, per_head), "that of blocks")
        require_shape("rows", rows, (sequences,), "(sequences,)")
        require_shape("kept", kept, (sequences, heads, per_head), "(sequences, kv_heads, places)")
        require_shape("stamps", stamps, (sequences, heads, per_head), "that of kept")
        require_shape("new_blocks", new_blocks, (sequences, heads, swaps), "that of places")
        if not writable(blocks, selected_at):
            return reference.publish_blocks(blocks, selected_at, rows, kept, places, new_blocks, stamps)
        rows, kept, places = table("rows", rows), table("kept", kept), table("places", places)
        new_blocks, stamps = table("new_blocks", new_blocks), table("stamps", stamps)
        served = self._publish_blocks(
            blocks=blocks.data_ptr(),
            selected_at=selected_at.data_ptr(),
            table_rows=rows.data_ptr(),
            kept=kept.data_ptr(),
            places=places.data_ptr(),
            new_blocks=new_blocks.data_ptr(),
            stamps=stamps.data_ptr(),
            num_table_rows=table_rows,
            sequences=sequences,
            kv_heads=heads,
            places_per_head=per_head,
            swaps=swaps,
        )
        if served:
            return None
        return reference.publish_blocks(blocks, selected_at, rows, kept, places, new_blocks, stamps)


def _require_errors(errors: Tensor, rows: Tensor, sequences: int, query_heads: int, head_dim: int) -> None:
    require_shape("errors", errors, (errors.shape[0], query_heads, head_dim), "(table_rows, query_heads, head_dim)")
    require_shape("rows", rows, (sequences,), "(sequences,)")


class Guesses:
    """`guess_queries` and `learn_errors`."""

    def __init__(self, library: Library) -> None:
        self._guess_queries = library.call("guess_queries")
        self._learn_errors = library.call("learn_errors")

    def guess_queries(self, raw: Tensor, errors: Tensor, rows: Tensor, turns: Tensor) -> Tensor:
        """As the reference."""
        sequences, query_rows, query_heads, head_dim = heads_shape("raw", raw)
        planes = require_turns(turns, sequences, query_rows)
        _require_errors(errors, rows, sequences, query_heads, head_dim)
        if not errors.dtype is turns.dtype is torch.float32:
            return reference.guess_queries(raw, errors, rows, turns)
        raw, errors, rows, turns = raw.float().contiguous(), errors.contiguous(), table("rows", rows), turns.contiguous()
        queries = torch.empty((sequences, query_rows, query_heads, head_dim), dtype=torch.float32, device=raw.device)
        served = self._guess_queries(
            raw=raw.data_ptr(),
            errors=errors.data_ptr(),
            table_rows=rows.data_ptr(),
            turns=turns.data_ptr(),
            queries=queries.data_ptr(),
            num_table_rows=errors.shape[0],
            sequences=sequences,
            rows=query_rows,
            query_heads=query_heads,
            head_dim=head_dim,
            planes=planes,
        )
        return queries if served else reference.guess_queries(raw, errors, rows, turns)

    def learn_errors(
        self,
        errors: Tensor,
        rows: Tensor,
        queries: Tensor,
        guessed: Tensor,
        turns: Tensor,
        positions: Tensor,
        guessed_positions: Tensor,
        scaling: float,
        keep: float,
    ) -> None:
        """As the reference."""
        sequences, query_rows, query_heads, head_dim = heads_shape("queries", queries)
        planes = require_turns(turns, sequences, query_rows)
        require_shape("guessed", guessed, tuple(queries.shape), "that of queries")
        _require_errors(errors, rows, sequences, query_heads, head_dim)
        require_shape("positions", positions, (sequences, query_rows), "(sequences, rows)")
        require_shape("guessed_positions", guessed_positions, (sequences, query_rows), "that of positions")
        if not errors.dtype is turns.dtype is torch.float32 or not errors.is_contiguous():
            return reference.learn_errors(errors, rows, queries, guessed, turns, positions, guessed_positions, scaling, keep)
        queries = queries.float()
        queries = queries if queries.stride(3) == 1 else queries.contiguous()
        rows, guessed, turns = table("rows", rows), guessed.float().contiguous(), turns.contiguous()
        positions, guessed_positions = table("positions", positions), table("guessed_positions", guessed_positions)
        strides = queries.stride()
        served = self._learn_errors(
            errors=errors.data_ptr(),
            table_rows=rows.data_ptr(),
            queries=queries.data_ptr(),
            guessed=guessed.data_ptr(),
            turns=turns.data_ptr(),
            positions=positions.data_ptr(),
            guessed_positions=guessed_positions.data_ptr(),
            num_table_rows=errors.shape[0],
            sequences=sequences,
            rows=query_rows,
            query_heads=query_heads,
            head_dim=head_dim,
            planes=planes,
            queries_sequence_stride=strides[0],
            queries_head_stride=strides[2],
            scaling=scaling,
            keep=keep,
        )
        if served:
            return None
        return reference.learn_errors(errors, rows, queries, guessed, turns, positions, guessed_positions, scaling, keep)


def require_places(name: str, value: Tensor, heads: int) -> None:
    """Raise `InputError` unless `value` is a table of selected places."""
    if value.dim() != 3 or value.shape[1] != heads:
        raise InputError(f"{name}.shape is {tuple(value.shape)}; it must be (table_rows, {heads}, places)")


def swaps_shape(name: str, value: Tensor) -> tuple[int, int, int]:
    """Sequences, kv heads and swaps. Raises `InputError`."""
    if value.dim() != 3:
        raise InputError(f"{name}.shape is {tuple(value.shape)}; it must be (sequences, kv_heads, swaps)")
    sequences, heads, swaps = value.shape
    return sequences, heads, swaps


def heads_shape(name: str, value: Tensor) -> tuple[int, int, int, int]:
    """Sequences, rows, query heads and head_dim. Raises `InputError`."""
    if value.dim() != 4:
        raise InputError(f"{name}.shape is {tuple(value.shape)}; it must be (sequences, rows, query_heads, head_dim)")
    sequences, rows, heads, head_dim = value.shape
    return sequences, rows, heads, head_dim


def require_turns(turns: Tensor, sequences: int, rows: int) -> int:
    """Planes. Raises `InputError`."""
    require_shape("turns", turns, (sequences, rows, 2, turns.shape[-1]), "(sequences, rows, 2, planes)")
    return int(turns.shape[-1])


def writable(*tables: Tensor) -> bool:
    """Whether the library can write these tables."""
    return all(value.dtype is torch.int64 and value.is_contiguous() for value in tables)
