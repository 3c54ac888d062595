"""The ops of `oasiskv.ops.reference` by a library of the ABI: same arguments, same results. Outputs begin as garbage."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .emulator import dtype_of


def garbage(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory for a result beside `like` that holds what no result is."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else 77, dtype=dtype, device=like.device)


def _queries(queries: Tensor) -> dict[str, object]:
    sequences, rows, query_heads, head_dim = queries.shape
    return {
        "queries": queries,
        "sequences": sequences,
        "rows": rows,
        "query_heads": query_heads,
        "head_dim": head_dim,
        "queries_sequence_stride": queries.stride(0),
        "queries_row_stride": queries.stride(1),
        "queries_head_stride": queries.stride(2),
    }


def _keys(keys: Tensor) -> dict[str, object]:
    count, kv_heads, block_size, head_dim = keys.shape
    return {
        "keys": keys,
        "count": count,
        "kv_heads": kv_heads,
        "block_size": block_size,
        "head_dim": head_dim,
        "keys_block_stride": keys.stride(0),
        "keys_head_stride": keys.stride(1),
        "keys_token_stride": keys.stride(2),
    }


class Runner(Protocol):
    """Runs an op of the ABI on tensors and numbers."""

    def run(self, name: str, **fields: object) -> None: ...


class Calls:
    """Ops with the signatures of the reference."""

    def __init__(self, runner: Runner) -> None:
        self.run = runner.run

    def append_rows(self, pool: Tensor, keys: Tensor, values: Tensor, slots: Tensor, offsets: Tensor) -> None:
        self.run(
            "append_rows",
            pool=pool,
            keys=keys,
            values=values,
            slots=slots,
            offsets=offsets,
            num_slots=pool.shape[0],
            num_tokens=keys.shape[0],
            kv_heads=keys.shape[1],
            block_size=pool.shape[2],
            head_dim=pool.shape[3],
            keys_token_stride=keys.stride(0),
            keys_head_stride=keys.stride(1),
            values_token_stride=values.stride(0),
            values_head_stride=values.stride(1),
            element_bytes=pool.itemsize,
        )

    def copy_blocks(self, source: Tensor, target: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
        self.run(
            "copy_blocks",
            source=source,
            target=target,
            source_slots=source_slots,
            target_slots=target_slots,
            num_pairs=source_slots.numel(),
            num_source_slots=source.shape[0],
            num_target_slots=target.shape[0],
            slot_bytes=source[0].numel() * source.itemsize,
        )

    def paged_attention(
        self,
        queries: Tensor,
        pool: Tensor,
        slots: Tensor,
        blocks: Tensor,
        arena: Tensor | None,
        arena_slots: Tensor | None,
        arena_blocks: Tensor | None,
        positions: Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        output, logsumexp = garbage(queries, queries.shape, queries.dtype), garbage(queries, queries.shape[:3])
        self.run(
            "paged_attention",
            **_queries(queries),
            pool=pool,
            slots=slots,
            blocks=blocks,
            arena=0 if arena is None else arena,
            arena_slots=0 if arena_slots is None else arena_slots,
            arena_blocks=0 if arena_blocks is None else arena_blocks,
            positions=positions,
            output=output,
            logsumexp=logsumexp,
            kv_heads=slots.shape[1],
            block_size=pool.shape[2],
            places=slots.shape[2],
            arena_places=0 if arena_slots is None else arena_slots.shape[2],
            num_slots=pool.shape[0],
            num_arena_slots=0 if arena is None else arena.shape[0],
            dtype=dtype_of(pool),
            scale=scale,
            softcap=softcap or 0.0,
        )
        return output, logsumexp

    def exact_logits(
        self, queries: Tensor, arena: Tensor, pages: Tensor, kv_heads: int, scale: float, softcap: float | None = None
    ) -> Tensor:
        logits = garbage(queries, (*queries.shape[:3], pages.shape[1]))
        self.run(
            "exact_logits",
            **_queries(queries),
            arena=arena,
            pages=pages,
            logits=logits,
            kv_heads=kv_heads,
            block_size=arena.shape[2],
            blocks=pages.shape[1],
            num_pages=arena.shape[0] // kv_heads,
            dtype=dtype_of(arena),
            scale=scale,
            softcap=softcap or 0.0,
        )
        return logits

    def block_mass(self, logits: Tensor, num_blocks: Tensor, kv_heads: int) -> Tensor:
        sequences, rows, query_heads, blocks = logits.shape
        mass = garbage(logits, (sequences, rows, kv_heads, blocks))
        self.run(
            "block_mass",
            logits=logits,
            num_blocks=num_blocks,
            mass=mass,
            sequences=sequences,
            rows=rows,
            query_heads=query_heads,
            kv_heads=kv_heads,
            blocks=blocks,
        )
        return mass

    def top_missing(self, mass: Tensor, resident: Tensor, low: Tensor, high: Tensor, count: int) -> tuple[Tensor, Tensor]:
        sequences, kv_heads, blocks = mass.shape
        count = min(count, blocks)
        best, best_mass = garbage(mass, (sequences, kv_heads, count), torch.int64), garbage(mass, (sequences, kv_heads, count))
        self.run(
            "top_missing",
            mass=mass,
            resident=resident,
            low=low,
            high=high,
            best_blocks=best,
            best_mass=best_mass,
            sequences=sequences,
            kv_heads=kv_heads,
            blocks=blocks,
            places=resident.shape[2],
            count=count,
        )
        return best, best_mass

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
    ) -> tuple[Tensor, ...]:
        sequences, kv_heads, blocks = mass.shape
        swaps = min(max_new, blocks, resident.shape[2])
        results = {
            "swap_places": garbage(mass, (sequences, kv_heads, swaps), torch.int64),
            "swap_blocks": garbage(mass, (sequences, kv_heads, swaps), torch.int64),
            "kept": garbage(mass, resident.shape, torch.int64),
            "new_selected_at": garbage(mass, resident.shape, torch.int64),
            "counts": garbage(mass, (sequences, 2), torch.int64),
        }
        self.run(
            "select",
            mass=mass,
            resident=resident,
            selected_at=selected_at,
            low=low,
            high=high,
            floor=floor,
            **results,
            sequences=sequences,
            kv_heads=kv_heads,
            blocks=blocks,
            places=resident.shape[2],
            swaps=swaps,
            pooled=pooled,
            step=step,
            margin=margin,
            keep=keep,
        )
        return tuple(results.values())

    def exchange_slots(self, slots: Tensor, free: Tensor, count: Tensor, rows: Tensor, kept: Tensor, places: Tensor) -> Tensor:
        granted = garbage(places, places.shape, torch.int64)
        self.run(
            "exchange_slots",
            slots=slots,
            free_slots=free,
            free_count=count,
            rows=rows,
            kept=kept,
            places=places,
            granted=granted,
            table_rows=slots.shape[0],
            capacity=free.shape[1],
            sequences=rows.shape[0],
            kv_heads=slots.shape[1],
            places_per_head=slots.shape[2],
            swaps=places.shape[2],
        )
        return granted

    def minmax_write(self, bounds: Tensor, pages: Tensor, keys: Tensor) -> None:
        self.run("minmax_write", **_keys(keys), bounds=bounds, pages=pages, num_pages=bounds.shape[0], dtype=dtype_of(keys))

    def minmax_score(self, bounds: Tensor, pages: Tensor, queries: Tensor, scale: float) -> Tensor:
        logits = garbage(queries, (*queries.shape[:3], pages.shape[1]))
        self.run(
            "minmax_score",
            **_queries(queries),
            bounds=bounds,
            pages=pages,
            logits=logits,
            kv_heads=bounds.shape[1],
            blocks=pages.shape[1],
            num_pages=bounds.shape[0],
            queries_dtype=dtype_of(queries),
            bounds_dtype=dtype_of(bounds),
            scale=scale,
        )
        return logits

    def minmax4_write(self, codes: Tensor, ranges: Tensor, pages: Tensor, keys: Tensor, outward: bool) -> None:
        self.run(
            "minmax4_write",
            **_keys(keys),
            codes=codes,
            ranges=ranges,
            pages=pages,
            num_pages=codes.shape[0],
            dtype=dtype_of(keys),
            outward=outward,
        )

    def minmax4_read(self, codes: Tensor, ranges: Tensor, rows: Tensor) -> Tensor:
        inner = codes.shape[1:-2].numel()
        bounds = garbage(rows, (*rows.shape, *codes.shape[1:-1], 2 * codes.shape[-1]))
        self.run(
            "minmax4_read",
            codes=codes,
            ranges=ranges,
            rows=rows,
            bounds=bounds,
            count=rows.numel(),
            num_rows=codes.shape[0],
            inner=inner,
            head_dim=2 * codes.shape[-1],
        )
        return bounds

    def bit2_write(self, codes: Tensor, pages: Tensor, keys: Tensor, bounds: Tensor) -> None:
        self.run(
            "bit2_write", **_keys(keys), codes=codes, pages=pages, bounds=bounds, num_pages=codes.shape[0], dtype=dtype_of(keys)
        )

    def bit2_score(self, codes: Tensor, slots: Tensor, bounds: Tensor, queries: Tensor, scale: float) -> Tensor:
        logits = garbage(queries, (*queries.shape[:3], slots.shape[2]))
        self.run(
            "bit2_score",
            **_queries(queries),
            codes=codes,
            slots=slots,
            bounds=bounds,
            logits=logits,
            kv_heads=slots.shape[1],
            block_size=codes.shape[1],
            blocks=slots.shape[2],
            num_slots=codes.shape[0],
            dtype=dtype_of(queries),
            scale=scale,
        )
        return logits

    def transform_write(
        self,
        codes: Tensor,
        pages: Tensor,
        keys: Tensor,
        mean: Tensor,
        encode: Tensor,
        thresholds: Tensor,
        nibbles: Tensor,
        shifts: Tensor,
    ) -> None:
        self.run(
            "transform_write",
            **_keys(keys),
            codes=codes,
            pages=pages,
            mean=mean,
            encode=encode,
            thresholds=thresholds,
            nibbles=nibbles,
            shifts=shifts,
            num_pages=codes.shape[0],
            num_nibbles=codes.shape[1],
            components=encode.shape[2],
            dtype=dtype_of(keys),
        )

    def transform_score(
        self,
        codes: Tensor,
        pages: Tensor,
        queries: Tensor,
        mean: Tensor,
        decode: Tensor,
        levels: Tensor,
        components: Tensor,
        offsets: Tensor,
        scale: float,
    ) -> Tensor:
        logits = garbage(queries, (*queries.shape[:3], pages.shape[1]))
        self.run(
            "transform_score",
            **_queries(queries),
            codes=codes,
            pages=pages,
            mean=mean,
            decode=decode,
            levels=levels,
            components=components,
            offsets=offsets,
            logits=logits,
            kv_heads=mean.shape[0],
            block_size=2 * codes.shape[2],
            blocks=pages.shape[1],
            num_pages=codes.shape[0],
            num_nibbles=codes.shape[1],
            num_components=decode.shape[1],
            dtype=dtype_of(queries),
            scale=scale,
        )
        return logits
