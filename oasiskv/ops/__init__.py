"""The operations of a decode step as `torch.ops.oasiskv.*`: schemas, shape functions, and the pure-torch reference.

The reference serves every device that torch serves and is the oracle that any other implementation is tested against.
Shapes: S sequences, R query rows, Hq query heads, H kv heads, D head_dim, B block_size, P places, N blocks of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import reference, reference_step, reference_summaries
from .backends import Backends

_library = torch.library.Library("oasiskv", "DEF")

_SCHEMAS = {
    "append_rows": "(Tensor(a!) pool, Tensor keys, Tensor values, Tensor slots, Tensor offsets) -> ()",
    "copy_blocks": "(Tensor source, Tensor(a!) target, Tensor source_slots, Tensor target_slots) -> ()",
    "paged_attention": (
        "(Tensor queries, Tensor pool, Tensor slots, Tensor blocks, Tensor? arena, Tensor? arena_slots, "
        "Tensor? arena_blocks, Tensor positions, float scale, float? softcap=None) -> (Tensor, Tensor)"
    ),
    "exact_logits": ("(Tensor queries, Tensor arena, Tensor pages, int kv_heads, float scale, float? softcap=None) -> Tensor"),
    "block_mass": "(Tensor logits, Tensor num_blocks, int kv_heads) -> Tensor",
    "top_missing": "(Tensor mass, Tensor resident, Tensor low, Tensor high, int count) -> (Tensor, Tensor)",
    "select": (
        "(Tensor mass, Tensor resident, Tensor selected_at, Tensor low, Tensor high, Tensor floor, int step, int max_new, "
        "int pooled, float margin, float keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "exchange_slots": (
        "(Tensor(a!) slots, Tensor(b!) free, Tensor(c!) count, Tensor rows, Tensor kept, Tensor places) -> Tensor"
    ),
    "corrected_attention": (
        "(Tensor queries, Tensor pool, Tensor slots, Tensor blocks, Tensor arena, Tensor arena_slots, Tensor logits, "
        "Tensor num_blocks, Tensor members, Tensor rows, Tensor selected, Tensor selected_slots, Tensor low, Tensor high, "
        "Tensor weights, Tensor positions, int per_row, float least_gain, float scale, float? softcap=None) -> (Tensor, Tensor)"
    ),
    "mark_places": "(Tensor(a!) blocks, Tensor slots, Tensor rows, Tensor kept, Tensor places) -> Tensor",
    "load_blocks": "(Tensor arena, Tensor(a!) pool, Tensor arena_slots, Tensor blocks, Tensor slots) -> Tensor",
    "publish_blocks": (
        "(Tensor(a!) blocks, Tensor(b!) selected_at, Tensor rows, Tensor kept, Tensor places, Tensor new_blocks, "
        "Tensor stamps) -> ()"
    ),
    "guess_queries": "(Tensor raw, Tensor errors, Tensor rows, Tensor turns) -> Tensor",
    "learn_errors": (
        "(Tensor(a!) errors, Tensor rows, Tensor queries, Tensor guessed, Tensor turns, Tensor positions, "
        "Tensor guessed_positions, float scaling, float keep) -> ()"
    ),
    "minmax_write": "(Tensor(a!) bounds, Tensor pages, Tensor keys) -> ()",
    "minmax_score": "(Tensor bounds, Tensor pages, Tensor queries, float scale) -> Tensor",
    "minmax4_write": "(Tensor(a!) codes, Tensor(b!) ranges, Tensor pages, Tensor keys, bool outward) -> ()",
    "minmax4_read": "(Tensor codes, Tensor ranges, Tensor rows) -> Tensor",
    "bit2_write": "(Tensor(a!) codes, Tensor pages, Tensor keys, Tensor bounds) -> ()",
    "bit2_score": "(Tensor codes, Tensor slots, Tensor bounds, Tensor queries, float scale) -> Tensor",
    "transform_write": (
        "(Tensor(a!) codes, Tensor pages, Tensor keys, Tensor mean, Tensor encode, Tensor thresholds, Tensor nibbles, "
        "Tensor shifts) -> ()"
    ),
    "transform_score": (
        "(Tensor codes, Tensor pages, Tensor queries, Tensor mean, Tensor decode, Tensor levels, Tensor components, "
        "Tensor offsets, float scale) -> Tensor"
    ),
}

_MODULES = {**vars(reference), **vars(reference_step), **vars(reference_summaries)}
REFERENCE = {name: _MODULES[name] for name in _SCHEMAS}

for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema)
    _library.impl(_name, REFERENCE[_name], "CompositeExplicitAutograd")

backends = Backends(_library, REFERENCE)


def available() -> dict[str, dict[str, str]]:
    """For each op, whether "native" code or the "reference" serves it, on "cpu" and on "cuda"."""
    return backends.available()


def _nothing(*_: object) -> None:
    return None


def _like_logits(queries: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    sequences, rows, heads, _ = queries.shape
    return queries.new_empty((sequences, rows, heads, table.shape[-1]), dtype=torch.float32)


def _fake_bounds(codes: torch.Tensor, ranges: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return rows.new_empty((*rows.shape, *codes.shape[1:-1], 2 * codes.shape[-1]), dtype=torch.float32)


def _fake_attention(queries: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return queries.new_empty(queries.shape), queries.new_empty(queries.shape[:3], dtype=torch.float32)


def _fake_mass(logits: torch.Tensor, num_blocks: torch.Tensor, kv_heads: int) -> torch.Tensor:
    sequences, rows, _, blocks = logits.shape
    return logits.new_empty((sequences, rows, kv_heads, blocks))


def _fake_missing(
    mass: torch.Tensor, resident: torch.Tensor, low: torch.Tensor, high: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*mass.shape[:2], min(count, mass.shape[2]))
    return mass.new_empty(shape, dtype=torch.int64), mass.new_empty(shape)


def _fake_select(
    mass: torch.Tensor,
    resident: torch.Tensor,
    selected_at: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    floor: torch.Tensor,
    step: int,
    max_new: int,
    pooled: int,
    margin: float,
    keep: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (*mass.shape[:2], min(max_new, mass.shape[2], resident.shape[2]))
    return (
        mass.new_empty(shape, dtype=torch.int64),
        mass.new_empty(shape, dtype=torch.int64),
        torch.empty_like(resident),
        torch.empty_like(selected_at),
        mass.new_empty((mass.shape[0], 2), dtype=torch.int64),
    )


_FAKES: dict[str, Callable[..., Any]] = {
    "append_rows": _nothing,
    "copy_blocks": _nothing,
    "paged_attention": _fake_attention,
    "exact_logits": lambda queries, arena, pages, *_: _like_logits(queries, pages),
    "block_mass": _fake_mass,
    "top_missing": _fake_missing,
    "select": _fake_select,
    "corrected_attention": lambda queries, *_: (
        queries.new_empty(queries.shape),
        queries.new_empty(3, dtype=torch.float32),
    ),
    "mark_places": lambda blocks, slots, rows, kept, places: torch.empty_like(places),
    "load_blocks": lambda arena, pool, arena_slots, blocks, slots: blocks.new_empty((blocks.shape[0], 2)),
    "publish_blocks": _nothing,
    "guess_queries": lambda raw, *_: raw.new_empty(raw.shape, dtype=torch.float32),
    "learn_errors": _nothing,
    "exchange_slots": lambda slots, free, count, rows, kept, places: torch.empty_like(places),
    "minmax_write": _nothing,
    "minmax_score": lambda bounds, pages, queries, scale: _like_logits(queries, pages),
    "minmax4_write": _nothing,
    "minmax4_read": _fake_bounds,
    "bit2_write": _nothing,
    "bit2_score": lambda codes, slots, bounds, queries, scale: _like_logits(queries, slots),
    "transform_write": _nothing,
    "transform_score": lambda codes, pages, queries, *_: _like_logits(queries, pages),
}

for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"oasiskv::{_name}", _fake, lib=_library)


def _op(name: str) -> Callable[..., Any]:
    """The op itself, without the overload resolution of `torch.ops.oasiskv.NAME`."""
    overload: Callable[..., Any] = getattr(torch.ops.oasiskv, name).default
    return overload


append_rows: Callable[..., None] = _op("append_rows")
copy_blocks: Callable[..., None] = _op("copy_blocks")
paged_attention: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _op("paged_attention")
exact_logits: Callable[..., torch.Tensor] = _op("exact_logits")
block_mass: Callable[..., torch.Tensor] = _op("block_mass")
top_missing: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _op("top_missing")
select: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = _op("select")
exchange_slots: Callable[..., torch.Tensor] = _op("exchange_slots")
corrected_attention: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _op("corrected_attention")
mark_places: Callable[..., torch.Tensor] = _op("mark_places")
load_blocks: Callable[..., torch.Tensor] = _op("load_blocks")
publish_blocks: Callable[..., None] = _op("publish_blocks")
guess_queries: Callable[..., torch.Tensor] = _op("guess_queries")
learn_errors: Callable[..., None] = _op("learn_errors")
minmax_write: Callable[..., None] = _op("minmax_write")
minmax_score: Callable[..., torch.Tensor] = _op("minmax_score")
minmax4_write: Callable[..., None] = _op("minmax4_write")
minmax4_read: Callable[..., torch.Tensor] = _op("minmax4_read")
bit2_write: Callable[..., None] = _op("bit2_write")
bit2_score: Callable[..., torch.Tensor] = _op("bit2_score")
transform_write: Callable[..., None] = _op("transform_write")
transform_score: Callable[..., torch.Tensor] = _op("transform_score")

NAMES = tuple(_SCHEMAS)
