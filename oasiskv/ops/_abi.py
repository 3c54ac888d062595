"""Generated from kernels/include/oasiskv.h by kernels/generate_bindings.py. Do not edit.

Each op has a function that packs its arguments as the C struct has them. Pointers are integers.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

VERSION = 6

OK = 0
INVALID = 1
OUT_OF_RANGE = 2
UNSUPPORTED = 3
FAILED = 4

FLOAT32 = 0
BFLOAT16 = 1
FLOAT16 = 2

_append_rows = Struct("@PPPPPqqqqqqqqqqqP0q")

_copy_blocks = Struct("@PPPPqqqqqP0q")

_paged_attention = Struct("@PPPPPPPPPPqqqqqqqqqqqqqqqPPqff0q")

_exact_logits = Struct("@PPPPqqqqqqqqqqqqqPPqff0q")

_block_mass = Struct("@PPPqqqqqqPPq0q")

_top_missing = Struct("@PPPPPPqqqqqqPPq0q")

_select = Struct("@PPPPPPPPPPPqqqqqqqqPPqff0q")

_exchange_slots = Struct("@PPPPPPPqqqqqqqP0q")

_minmax_write = Struct("@PPPqqqqqqqqqqP0q")

_minmax_score = Struct("@PPPPqqqqqqqqqqqqqPPqf0q")

_minmax4_write = Struct("@PPPPqqqqqqqqqqqP0q")

_minmax4_read = Struct("@PPPPqqqqqP0q")

_bit2_write = Struct("@PPPPqqqqqqqqqqP0q")

_bit2_score = Struct("@PPPPPqqqqqqqqqqqqqPPqf0q")

_transform_write = Struct("@PPPPPPPPqqqqqqqqqqqqPPq0q")

_transform_score = Struct("@PPPPPPPPPqqqqqqqqqqqqqqqPPqf0q")

_read_slots = Struct("@PPPqqqqP0q")

_corrected_attention = Struct("@PPPPPPPPPPPPPPPPPPqqqqqqqqqqqqqqqqqqqPfff0q")

_mark_places = Struct("@PPPPPPqqqqqqP0q")

_load_blocks = Struct("@PPPPPPqqqqqqqqP0q")

_publish_blocks = Struct("@PPPPPPPqqqqqqP0q")

_guess_queries = Struct("@PPPPPqqqqqqqP0q")

_learn_errors = Struct("@PPPPPPPqqqqqqqqqPff0q")


def append_rows(
    *,
    pool: int,
    keys: int,
    values: int,
    slots: int,
    offsets: int,
    num_slots: int,
    num_tokens: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    keys_token_stride: int,
    keys_head_stride: int,
    values_token_stride: int,
    values_head_stride: int,
    element_bytes: int,
    num_threads: int = 1,
    stream: int = 0,
) -> bytes:
    """Arguments of `oasis_append_rows`."""
    return _append_rows.pack(
        pool,
        keys,
        values,
        slots,
        offsets,
        num_slots,
        num_tokens,
        kv_heads,
        block_size,
        head_dim,
        keys_token_stride,
        keys_head_stride,
        values_token_stride,
        values_head_stride,
        element_bytes,
        num_threads,
        stream,
    )


def copy_blocks(
    *,
    source: int,
    target: int,
    source_slots: int,
    target_slots: int,
    num_pairs: int,
    num_source_slots: int,
    num_target_slots: int,
    slot_bytes: int,
    num_threads: int = 1,
    stream: int = 0,
) -> bytes:
    """Arguments of `oasis_copy_blocks`."""
    return _copy_blocks.pack(
        source,
        target,
        source_slots,
        target_slots,
        num_pairs,
        num_source_slots,
        num_target_slots,
        slot_bytes,
        num_threads,
        stream,
    )


def paged_attention(
    *,
    queries: int,
    pool: int,
    slots: int,
    blocks: int,
    arena: int,
    arena_slots: int,
    arena_blocks: int,
    positions: int,
    output: int,
    logsumexp: int,
    sequences: int,
    rows: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    places: int,
    arena_places: int,
    num_slots: int,
    num_arena_slots: int,
    queries_sequence_stride: int,
    queries_row_stride: int,
    queries_head_stride: int,
    dtype: int,
    num_threads: int = 1,
    stream: int = 0,
    scratch: int = 0,
    scratch_bytes: int = 0,
    scale: float,
    softcap: float,
) -> bytes:
    """Arguments of `oasis_paged_attention`."""
    return _paged_attention.pack(
        queries,
        pool,
        slots,
        blocks,
        arena,
        arena_slots,
        arena_blocks,
        positions,
        output,
        logsumexp,
        sequences,
        rows,
        query_heads,
        kv_heads,
        head_dim,
        block_size,
        places,
        arena_places,
        num_slots,
        num_arena_slots,
        queries_sequence_stride,
        queries_row_stride,
        queries_head_stride,
        dtype,
        num_threads,
        stream,
        scratch,
        scratch_bytes,
        scale,
        softcap,
    )


def exact_logits(
    *,
    queries: int,
    arena: int,
    pages: int,
    logits: int,
    sequences: int,
    rows: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    blocks: int,
    num_pages: int,
    queries_sequence_stride: int,
    queries_row_stride: int,
    queries_head_stride: int,
    dtype: int,
    num_threads: int = 1,
    stream: int = 0,
    scratch: int = 0,
    scratch_bytes: int = 0,
    scale: float,
    softcap: float,
) -> bytes:
    """Arguments of `oasis_exact_logits`."""
    return _exact_logits.pack(
        queries,
        arena,
        pages,
        logits,
        sequences,
        rows,
        query_heads,
        kv_heads,
        head_dim,
        block_size,
        blocks,
        num_pages,
        queries_sequence_stride,
        queries_row_stride,
        queries_head_stride,
        dtype,
        num_threads,
        stream,
        scratch,
        scratch_bytes,
        scale,
        softcap,
    )


def block_mass(
    *,
    logits: int,
    num_blocks: int,
    mass: int,
    sequences: int,
    rows: int,
    query_heads: int,
    kv_heads: int,
    blocks: int,
    num_threads: int = 1,
    stream: int = 0,
    scratch: int = 0,
    scratch_bytes: int = 0,
) -> bytes:
    """Arguments of `oasis_block_mass`."""
    return _block_mass.pack(
        logits,
        num_blocks,
        mass,
        sequences,
        rows,
        query_heads,
        kv_heads,
        blocks,
        num_threads,
        stream,
        scratch,
        scratch_bytes,
    )


def top_missing(
    *,
    mass: int,
    resident: int,
    low: int,
    high: int,
    best_blocks: int,
    best_mass: int,
    sequences: int,
    kv_heads: int,
    blocks: int,
    places: int,
    count: int,
    num_threads: int = 1,
    stream: int = 0,
    scratch: int = 0,
    scratch_bytes: int = 0,
) -> bytes:
    """Arguments of `oasis_top_missing`."""
    return _top_missing.pack(
        mass,
        resident,
        low,
        high,
        best_blocks,
        best_mass,
        sequences,
        kv_heads,
        blocks,
        places,
        count,
        num_threads,
        stream,
        scratch,
        scratch_bytes,
    )


def select(
    *,
    mass: int,
    resident: int,
    selected_at: int,
    low: int,
    high: int,
    floor: int,
    swap_places: int,
    swap_blocks: int,
    kept: int,
    new_selected_at: int,
    counts: int,
    sequences: int,
    kv_heads: int,
    blocks: int,
    places: int,
    swaps: int,
    pooled: int,
    step: int,
    num_threads: int = 1,
    stream: int = 0,
    scratch: int = 0,
    scratch_bytes: int = 0,
    margin: float,
    keep: float,
) -> bytes:
    """Arguments of `oasis_select`."""
    return _select.pack(
        mass,
        resident,
        selected_at,
        low,
        high,
        floor,
        swap_places,
        swap_blocks,
        kept,
        new_selected_at,
        counts,
        sequences,
        kv_heads,
        blocks,
        places,
        swaps,
        pooled,
        step,
        num_threads,
        stream,
        scratch,
        scratch_bytes,
        margin,
        keep,
    )


def exchange_slots(
    *,
    slots: int,
    free_slots: int,
    free_count: int,
    rows: int,
    kept: int,
    places: int,
    granted: int,
    table_rows: int,
    capacity: int,
    sequences: int,
    kv_heads: int,
    places_per_head: int,
    swaps: int,
    num_threads: int = 1,
    stream: int = 0,
) -> bytes:
    """Arguments of `oasis_exchange_slots`."""
    return _exchange_slots.pack(
        slots,
        free_slots,
        free_count,
        rows,
        kept,
        places,
        granted,
        table_rows,
        capacity,
        sequences,
        kv_heads,
        places_per_head,
        swaps,
        num_threads,
        stream,
    )


def minmax_write(
    *,
    bounds: int,
    pages: int,
    keys: int,
    count: int,
    num_pages: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    keys_block_stride: int,
    keys_head_stride: int,
    keys_token_stride: int,
    dtype: int,
    num_threads: int = 1,
    stream: int = 0,
) -> bytes:
    """Arguments of `oasis_minmax_write`."""
    return _minmax_write.pack(
        bounds,
        pages,
        keys,
        count,
        num_pages,
        kv_heads,
        block_size,
        head_dim,
        keys_block_stride,
        keys_head_stride,
        keys_token_stride,
        dtype,
        num_threads,
        stream,
    )


def minmax_score(
    *,
    bounds: int,
    pages: int,
    queries: int,
    logits: int,
    sequences: int,
    rows: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    blocks: int,
    num_pages: int,
    queries_sequence_stride: int,
    queries_row_stride: int,
    queries_head_stride: int,
    queries_dtype: int,
    bounds_dtype: int,
    num_threads: int = 1,
    stream: int = 0,
    scratch: int = 0,
    scratch_bytes: int = 0,
    scale: float,
) -> bytes:
    """Arguments of `oasis_minmax_score`."""
    return _minmax_score.pack(
        bounds,
        pages,
        queries,
        logits,
        sequences,
        rows,
        query_heads,
        kv_heads,
        head_dim,
        blocks,
        num_pages,
        queries_sequence_stride,
        queries_row_stride,
        queries_head_stride,
        queries_dtype,
        bounds_dtype,
        num_threads,
        stream,
        scratch,
        scratch_bytes,
        scale,
    )


def minmax4_write(
    *,
    codes: int,
    ranges: int,
    pages: int,
    keys: int,
    count: int,
    num_pages: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    keys_block_stride: int,
    keys_head_stride: int,
    keys_token_stride: int,
    dtype: int,
    outward: int,
    num_threads: int = 1,
    stream: int = 0,
) -> bytes:
    """Arguments of `oasis_minmax4_write`."""
    return _minmax4_write.pack(
        codes,
        ranges,
        pages,
        keys,
        count,
        num_pages,
        kv_heads,
        block_size,
        head_dim,
        keys_block_stride,
        keys_head_stride,
        keys_token_stride,
        dtype,
        outward,
        num_threads,
        stream,
    )


def minmax4_read(
    *,
    codes: int,
    ranges: int,
    rows: int,
    bounds: int,
    count: int,
    num_rows: int,
    inner: int,
    head_dim: int,
    num_threads: int = 1,
    stream: int = 0,
) -> bytes:
    """Arguments of `oasis_minmax4_read`."""
    return _minmax4_read.pack(
        codes,
        ranges,
        rows,
        bounds,
        count,
        num_rows,
        inner,
        head_dim,
        num_threads,
        stream,
    )


def bit2_write(
    *,
    codes: int,
    pages: int,
    keys: int,
    bounds: int,
    count: int,
    num_pages: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    keys_block_stride: int,
    keys_head_stride: int,
    keys_token_stride: int,
    dtype: int,
    num_threads: int = 1,
    stream: int = 0,
) -> bytes:
    """Arguments of `oasis_bit2_write`."""
    return _bit2_write.pack(
        codes,
        pages,
        keys,
        bounds,
        count,
        num_pages,
        kv_heads,
        block_size,
        head_dim,
        keys_block_stride,
        keys_head_stride,
        keys_token_stride,
        dtype,
        num_threads,
        stream,
    )


def bit2_score(
    *,
    codes: int,
    slots: int,
    bounds: int,
    queries: int,
    logits: int,
    sequences: int,
    rows: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    blocks: int,
    num_slots: int,
    queries_sequence_stride: int,
    queries_row_stride: int,
    queries_head_stride: int,
    dtype: int,
    num_threads: int = 1,
    stream: int = 0,
    scratch: int = 0,
    scratch_bytes: int = 0,
    scale: float,
) -> bytes:
    """Arguments of `oasis_bit2_score`."""
    return _bit2_score.pack(
        codes,
        slots,
        bounds,
        queries,
        logits,
        sequences,
        rows,
        query_heads,
        kv_heads,
        head_dim,
        block_size,
        blocks,
        num_slots,
        queries_sequence_stride,
        queries_row_stride,
        queries_head_stride,
        dtype,
        num_threads,
        stream,
        scratch,
        scratch_bytes,
        scale,
    )


def transform_write(
    *,
    codes: int,
    pages: int,
    keys: int,
    mean: int,
    encode: int,
    thresholds: int,
    nibbles: int,
    shifts: int,
    count: int,
    num_pages: int,
    num_nibbles: int,
    components: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    keys_block_stride: int,
    keys_head_stride: int,
    keys_token_stride: int,
    dtype: int,
    num_threads: int = 1,
    stream: int = 0,
    scratch: int = 0,
    scratch_bytes: int = 0,
) -> bytes:
    """Arguments of `oasis_transform_write`."""
    return _transform_write.pack(
        codes,
        pages,
        keys,
        mean,
        encode,
        thresholds,
        nibbles,
        shifts,
        count,
        num_pages,
        num_nibbles,
        components,
        kv_heads,
        block_size,
        head_dim,
        keys_block_stride,
        keys_head_stride,
        keys_token_stride,
        dtype,
        num_threads,
        stream,
        scratch,
        scratch_bytes,
    )


def transform_score(
    *,
    codes: int,
    pages: int,
    queries: int,
    mean: int,
    decode: int,
    levels: int,
    components: int,
    offsets: int,
    logits: int,
    sequences: int,
    rows: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    blocks: int,
    num_pages: int,
    num_nibbles: int,
    num_components: int,
    queries_sequence_stride: int,
    queries_row_stride: int,
    queries_head_stride: int,
    dtype: int,
    num_threads: int = 1,
    stream: int = 0,
    scratch: int = 0,
    scratch_bytes: int = 0,
    scale: float,
) -> bytes:
    """Arguments of `oasis_transform_score`."""
    return _transform_score.pack(
        codes,
        pages,
        queries,
        mean,
        decode,
        levels,
        components,
        offsets,
        logits,
        sequences,
        rows,
        query_heads,
        kv_heads,
        head_dim,
        block_size,
        blocks,
        num_pages,
        num_nibbles,
        num_components,
        queries_sequence_stride,
        queries_row_stride,
        queries_head_stride,
        dtype,
        num_threads,
        stream,
        scratch,
        scratch_bytes,
        scale,
    )


def read_slots(
    *,
    pool: int,
    slots: int,
    sum: int,
    count: int,
    num_slots: int,
    slot_bytes: int,
    num_threads: int = 1,
    stream: int = 0,
) -> bytes:
    """Arguments of `oasis_read_slots`."""
    return _read_slots.pack(
        pool,
        slots,
        sum,
        count,
        num_slots,
        slot_bytes,
        num_threads,
        stream,
    )


def corrected_attention(
    *,
    queries: int,
    pool: int,
    slots: int,
    blocks: int,
    arena: int,
    arena_slots: int,
    logits: int,
    num_blocks: int,
    members: int,
    table_rows: int,
    selected: int,
    selected_slots: int,
    low: int,
    high: int,
    weights: int,
    positions: int,
    output: int,
    counts: int,
    sequences: int,
    sparse_sequences: int,
    rows: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    places: int,
    selected_places: int,
    num_table_rows: int,
    num_sealed: int,
    num_slots: int,
    num_arena_slots: int,
    per_row: int,
    queries_sequence_stride: int,
    queries_row_stride: int,
    queries_head_stride: int,
    dtype: int,
    num_threads: int = 1,
    stream: int = 0,
    least_gain: float,
    scale: float,
    softcap: float,
) -> bytes:
    """Arguments of `oasis_corrected_attention`."""
    return _corrected_attention.pack(
        queries,
        pool,
        slots,
        blocks,
        arena,
        arena_slots,
        logits,
        num_blocks,
        members,
        table_rows,
        selected,
        selected_slots,
        low,
        high,
        weights,
        positions,
        output,
        counts,
        sequences,
        sparse_sequences,
        rows,
        query_heads,
        kv_heads,
        head_dim,
        block_size,
        places,
        selected_places,
        num_table_rows,
        num_sealed,
        num_slots,
        num_arena_slots,
        per_row,
        queries_sequence_stride,
        queries_row_stride,
        queries_head_stride,
        dtype,
        num_threads,
        stream,
        least_gain,
        scale,
        softcap,
    )


def mark_places(
    *,
    blocks: int,
    slots: int,
    table_rows: int,
    kept: int,
    places: int,
    filled: int,
    num_table_rows: int,
    sequences: int,
    kv_heads: int,
    places_per_head: int,
    swaps: int,
    num_threads: int = 1,
    stream: int = 0,
) -> bytes:
    """Arguments of `oasis_mark_places`."""
    return _mark_places.pack(
        blocks,
        slots,
        table_rows,
        kept,
        places,
        filled,
        num_table_rows,
        sequences,
        kv_heads,
        places_per_head,
        swaps,
        num_threads,
        stream,
    )


def load_blocks(
    *,
    arena: int,
    pool: int,
    arena_slots: int,
    blocks: int,
    slots: int,
    counts: int,
    sequences: int,
    kv_heads: int,
    num_sealed: int,
    swaps: int,
    num_arena_slots: int,
    num_slots: int,
    slot_bytes: int,
    num_threads: int = 1,
    stream: int = 0,
) -> bytes:
    """Arguments of `oasis_load_blocks`."""
    return _load_blocks.pack(
        arena,
        pool,
        arena_slots,
        blocks,
        slots,
        counts,
        sequences,
        kv_heads,
        num_sealed,
        swaps,
        num_arena_slots,
        num_slots,
        slot_bytes,
        num_threads,
        stream,
    )


def publish_blocks(
    *,
    blocks: int,
    selected_at: int,
    table_rows: int,
    kept: int,
    places: int,
    new_blocks: int,
    stamps: int,
    num_table_rows: int,
    sequences: int,
    kv_heads: int,
    places_per_head: int,
    swaps: int,
    num_threads: int = 1,
    stream: int = 0,
) -> bytes:
    """Arguments of `oasis_publish_blocks`."""
    return _publish_blocks.pack(
        blocks,
        selected_at,
        table_rows,
        kept,
        places,
        new_blocks,
        stamps,
        num_table_rows,
        sequences,
        kv_heads,
        places_per_head,
        swaps,
        num_threads,
        stream,
    )


def guess_queries(
    *,
    raw: int,
    errors: int,
    table_rows: int,
    turns: int,
    queries: int,
    num_table_rows: int,
    sequences: int,
    rows: int,
    query_heads: int,
    head_dim: int,
    planes: int,
    num_threads: int = 1,
    stream: int = 0,
) -> bytes:
    """Arguments of `oasis_guess_queries`."""
    return _guess_queries.pack(
        raw,
        errors,
        table_rows,
        turns,
        queries,
        num_table_rows,
        sequences,
        rows,
        query_heads,
        head_dim,
        planes,
        num_threads,
        stream,
    )


def learn_errors(
    *,
    errors: int,
    table_rows: int,
    queries: int,
    guessed: int,
    turns: int,
    positions: int,
    guessed_positions: int,
    num_table_rows: int,
    sequences: int,
    rows: int,
    query_heads: int,
    head_dim: int,
    planes: int,
    queries_sequence_stride: int,
    queries_head_stride: int,
    num_threads: int = 1,
    stream: int = 0,
    scaling: float,
    keep: float,
) -> bytes:
    """Arguments of `oasis_learn_errors`."""
    return _learn_errors.pack(
        errors,
        table_rows,
        queries,
        guessed,
        turns,
        positions,
        guessed_positions,
        num_table_rows,
        sequences,
        rows,
        query_heads,
        head_dim,
        planes,
        queries_sequence_stride,
        queries_head_stride,
        num_threads,
        stream,
        scaling,
        keep,
    )


PACK: dict[str, Callable[..., bytes]] = {
    "append_rows": append_rows,
    "copy_blocks": copy_blocks,
    "paged_attention": paged_attention,
    "exact_logits": exact_logits,
    "block_mass": block_mass,
    "top_missing": top_missing,
    "select": select,
    "exchange_slots": exchange_slots,
    "minmax_write": minmax_write,
    "minmax_score": minmax_score,
    "minmax4_write": minmax4_write,
    "minmax4_read": minmax4_read,
    "bit2_write": bit2_write,
    "bit2_score": bit2_score,
    "transform_write": transform_write,
    "transform_score": transform_score,
    "read_slots": read_slots,
    "corrected_attention": corrected_attention,
    "mark_places": mark_places,
    "load_blocks": load_blocks,
    "publish_blocks": publish_blocks,
    "guess_queries": guess_queries,
    "learn_errors": learn_errors,
}

NUMBERS = {
    "append_rows": 0,
    "copy_blocks": 1,
    "paged_attention": 2,
    "exact_logits": 3,
    "block_mass": 4,
    "top_missing": 5,
    "select": 6,
    "exchange_slots": 7,
    "minmax_write": 8,
    "minmax_score": 9,
    "minmax4_write": 10,
    "minmax4_read": 11,
    "bit2_write": 12,
    "bit2_score": 13,
    "transform_write": 14,
    "transform_score": 15,
    "read_slots": 16,
    "corrected_attention": 17,
    "mark_places": 18,
    "load_blocks": 19,
    "publish_blocks": 20,
    "guess_queries": 21,
    "learn_errors": 22,
}

SIZES = {
    "append_rows": _append_rows.size,
    "copy_blocks": _copy_blocks.size,
    "paged_attention": _paged_attention.size,
    "exact_logits": _exact_logits.size,
    "block_mass": _block_mass.size,
    "top_missing": _top_missing.size,
    "select": _select.size,
    "exchange_slots": _exchange_slots.size,
    "minmax_write": _minmax_write.size,
    "minmax_score": _minmax_score.size,
    "minmax4_write": _minmax4_write.size,
    "minmax4_read": _minmax4_read.size,
    "bit2_write": _bit2_write.size,
    "bit2_score": _bit2_score.size,
    "transform_write": _transform_write.size,
    "transform_score": _transform_score.size,
    "read_slots": _read_slots.size,
    "corrected_attention": _corrected_attention.size,
    "mark_places": _mark_places.size,
    "load_blocks": _load_blocks.size,
    "publish_blocks": _publish_blocks.size,
    "guess_queries": _guess_queries.size,
    "learn_errors": _learn_errors.size,
}

WITH_SCRATCH = {
    "paged_attention",
    "exact_logits",
    "block_mass",
    "top_missing",
    "select",
    "minmax_score",
    "bit2_score",
    "transform_write",
    "transform_score",
}
