"""Random arguments of every op, and how close its result must come to the reference's. Runs without pytest, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from oasiskv.ops import reference, reference_summaries

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES)


@dataclass
class Case:
    """One call. `on_host` names arguments that lie in page-locked memory, `written` those that hold the result."""

    op: str
    label: str
    arguments: list[Any]
    tolerance: float = 0.0
    written: tuple[int, ...] = ()
    on_host: tuple[int, ...] = ()
    result_counts: Callable[[Tensor], Tensor] | None = field(default=None)

    def placed(self, device: str) -> list[Any]:
        """The arguments where they belong, copies of their own."""
        return [self._place(value, device, index in self.on_host) for index, value in enumerate(self.arguments)]

    @staticmethod
    def _place(value: Any, device: str, on_host: bool) -> Any:
        if not isinstance(value, Tensor):
            return value
        if device == "cpu":
            return value.clone()
        return value.clone().pin_memory() if on_host else value.to(device, copy=True)


def check(case: Case, calls: Any, device: str) -> None:
    """Raise `AssertionError` if the op is not as the reference."""
    function = {**vars(reference), **vars(reference_summaries)}[case.op]
    ours, theirs = case.placed(device), case.placed("cpu")
    results, expected = getattr(calls, case.op)(*ours), function(*theirs)
    if device != "cpu":
        torch.cuda.synchronize()
    results = list(results) if isinstance(results, tuple) else [] if results is None else [results]
    expected = list(expected) if isinstance(expected, tuple) else [] if expected is None else [expected]
    results += [ours[index] for index in case.written]
    expected += [theirs[index] for index in case.written]
    for result, wanted in zip(results, expected, strict=True):
        result = result.cpu()
        if case.result_counts is not None:
            mask = case.result_counts(result)
            result, wanted = result[mask], wanted[mask]
        if case.tolerance:
            torch.testing.assert_close(result.float(), wanted.float(), rtol=case.tolerance, atol=case.tolerance)
        else:
            assert torch.equal(result, wanted), f"{case.op}, {case.label}: differs"


def attention(
    dtype: torch.dtype, head_dim: int, block_size: int, group: int, rows: int, tokens: int, softcap: float | None = None
) -> Case:
    """Two sequences, half of the last one's places empty, an eighth of all blocks in the arena."""
    heads, places, arena_places = 2, max(2, tokens // block_size), max(1, tokens // block_size // 8)
    pool = torch.randn(2 * heads * places, 2, block_size, head_dim).to(dtype)
    arena = torch.randn(2 * heads * arena_places, 2, block_size, head_dim).to(dtype)
    slots = torch.randperm(pool.shape[0]).view(2, heads, places)
    arena_slots = torch.randperm(arena.shape[0]).view(2, heads, arena_places)
    listed = torch.stack([torch.randperm(places + arena_places) for _ in range(2 * heads)]).view(2, heads, -1)
    blocks, arena_blocks = listed[..., :places].contiguous(), listed[..., places:].contiguous()
    blocks[1, :, ::2] = -1
    slots[blocks < 0] = -1
    last = (places + arena_places) * block_size - block_size // 2 - rows
    positions = torch.stack([torch.arange(last, last + rows), torch.arange(rows) + block_size])
    positions[1, -1] = -1
    queries = torch.randn(2, rows, heads * group, head_dim).to(dtype)
    arguments = [queries, pool, slots, blocks, arena, arena_slots, arena_blocks, positions, head_dim**-0.5, softcap]
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    label = f"{dtype}, head_dim {head_dim}, block {block_size}, group {group}, rows {rows}, {tokens} tokens, softcap {softcap}"
    return Case("paged_attention", label, arguments, tolerance, on_host=(4,))


def moves(dtype: torch.dtype, slots: int) -> Iterator[Case]:
    pool, arena = torch.randn(slots, 2, 16, 64).to(dtype), torch.randn(slots, 2, 16, 64).to(dtype)
    pairs = torch.randperm(slots), torch.randperm(slots)
    pairs[0][::5] = -1
    yield Case("copy_blocks", f"{dtype}, in", [arena, pool, *pairs], written=(1,), on_host=(0,))
    yield Case("copy_blocks", f"{dtype}, out", [pool, arena, *pairs], written=(1,), on_host=(1,))
    rows = [torch.randn(slots // 4, 4, 64).to(dtype) for _ in range(2)]
    where = torch.randperm(slots)[: slots // 4 * 4].view(-1, 4)
    yield Case("append_rows", f"{dtype}", [pool, *rows, where, torch.randint(16, (slots // 4,))], written=(0,))


def selection(sequences: int, heads: int, blocks: int, places: int) -> Iterator[Case]:
    label = f"{sequences} sequences, {heads} heads, {blocks} blocks, {places} places"
    count = sequences * heads * blocks
    mass = ((torch.randperm(count) + 1) / count).view(sequences, heads, blocks)
    resident = torch.stack([torch.randperm(blocks)[:places] for _ in range(sequences * heads)]).view(sequences, heads, places)
    resident[torch.rand(resident.shape) < 0.3] = -1
    low, high = torch.zeros(sequences, dtype=torch.int64), torch.full((sequences,), blocks - 1)
    yield Case("top_missing", label, [mass, resident, low, high, places])
    stamps = torch.randint(0, 9, resident.shape)
    for floor, pooled in ((-1.0, places * heads), (0.4, places)):
        arguments = [mass, resident, stamps, low, high, torch.full((sequences,), floor), 11, places, pooled, 0.01, 0.9]
        yield Case("select", f"{label}, floor {floor}", arguments)
    logits = torch.randn(sequences, 2, heads * 3, blocks) * 4
    yield Case("block_mass", label, [logits, torch.full((sequences,), blocks - 1), heads], 1e-4)
    slots = torch.randperm(sequences * heads * places).view(sequences, heads, places)
    slots[torch.rand(slots.shape) < 0.5] = -1
    free, depth = torch.zeros(sequences, heads * places, dtype=torch.int64), torch.zeros(sequences, dtype=torch.int64)
    kept = torch.where(torch.rand(slots.shape) < 0.5, 3, -1)
    wanted = torch.arange(places // 2).expand(sequences, heads, -1).contiguous()
    kept[..., : places // 2] = -1
    arguments = [slots, free, depth, torch.arange(sequences), kept, wanted]
    yield Case("exchange_slots", label, arguments, written=(0, 2))


def summaries(dtype: torch.dtype, blocks: int, head_dim: int, rows: int) -> Iterator[Case]:
    label = f"{dtype}, {blocks} blocks, head_dim {head_dim}, rows {rows}"
    heads, group, pages, scale = 2, 3, max(4, blocks // 2), head_dim**-0.5
    table = torch.randint(-1, pages, (2, blocks))

    def real(result: Tensor) -> Tensor:
        return (table >= 0)[:, None, None].expand_as(result)

    queries = torch.randn(2, rows, heads * group, head_dim).to(dtype)
    arena = torch.randn(pages * heads, 2, 16, head_dim).to(dtype)
    for softcap in (None, 2.0):
        arguments = [queries, arena, table, heads, scale, softcap]
        yield Case("exact_logits", f"{label}, softcap {softcap}", arguments, 1e-3, on_host=(1,), result_counts=real)
    keys, written = torch.randn(4, heads, 16, head_dim).to(dtype), torch.randperm(pages)[:4]
    bounds = torch.randn(pages, heads, 2, head_dim).to(dtype)
    yield Case("minmax_write", label, [bounds, written, keys], written=(0,))
    yield Case("minmax_score", label, [bounds, table, queries, scale], 1e-3, result_counts=real)
    codes4 = torch.randint(256, (pages, heads, 2, head_dim // 2), dtype=torch.uint8)
    ranges = torch.rand(pages, heads, 2, 2).half()
    for outward in (False, True):
        yield Case("minmax4_write", f"{label}, outward {outward}", [codes4, ranges, written, keys, outward], written=(0, 1))
    yield Case("minmax4_read", label, [codes4, ranges, table.clamp(min=0)], on_host=(0, 1))
    levels = torch.stack([keys.amin(2), keys.amax(2)], 2).float()
    codes2 = torch.randint(256, (pages, heads, 16, head_dim // 4), dtype=torch.uint8)
    yield Case("bit2_write", label, [codes2, written, keys, levels], written=(0,))
    slots = torch.randint(0, pages * heads, (2, heads, blocks))
    arguments = [codes2.flatten(0, 1), slots, torch.randn(2, heads, blocks, 2, head_dim), queries, scale]
    yield Case("bit2_score", label, arguments, 1e-3, on_host=(0,))
    nibbles, components = 16, head_dim // 4
    codes = torch.randint(256, (pages, nibbles, 8), dtype=torch.uint8)
    of = torch.randint(components, (nibbles, 4)) + (torch.arange(nibbles)[:, None] >= 7) * components
    mean, decode, offsets = torch.randn(heads, head_dim), torch.randn(heads, components, head_dim) * 0.3, torch.tensor([0, 7])
    values = torch.randn(nibbles, 16, 4) * 0.3
    arguments = [codes, table, queries, mean, decode, values, of, offsets, scale]
    yield Case("transform_score", label, arguments, 1e-3, result_counts=real)
    # Thresholds between values that keys cannot take, so that no rounding decides: keys and directions are small whole numbers.
    whole = torch.randint(-3, 4, keys.shape).to(dtype)
    encode = torch.randint(-1, 2, (heads, head_dim, components)).float()
    thresholds = (torch.arange(15) * 2.0 - 14.5).expand(heads, components, 15).clone()
    where = (torch.arange(components) % 7).expand(heads, components) + torch.tensor([[0], [7]])
    shifts = torch.zeros_like(where)
    where[:, 7:], thresholds[:, 7:] = 0, torch.inf
    arguments = [codes, written, whole, torch.zeros(heads, head_dim), encode, thresholds, where.contiguous(), shifts]
    yield Case("transform_write", label, arguments, written=(0,))


def cases(large: bool) -> Iterator[Case]:
    """All of them. `large` are sizes of real use, else those that an emulator can bear."""
    torch.manual_seed(0)
    for dtype, head_dim in product(HALVES, (64, 80, 96, 128, 256)):
        yield attention(dtype, head_dim, 16, 4, 2, 4096 if large else 96)
    for block_size, group, rows in ((4, 1, 1), (5, 7, 3), (32, 4, 16), (64, 8, 9)):
        yield attention(torch.bfloat16, 128, block_size, group, rows, 2048 if large else 128)
    for head_dim in (64, 256):
        yield attention(torch.float32, head_dim, 16, 2, 3, 1024 if large else 64)
    for dtype in DTYPES:
        yield attention(dtype, 256, 16, 2, 3, 1024 if large else 64, softcap=2.0)
    for dtype in DTYPES:
        yield from moves(dtype, 4096 if large else 20)
    for shape in ((4, 8, 8192, 256), (1, 8, 65536, 512)) if large else ((2, 2, 90, 12),):
        yield from selection(*shape)
    for dtype, head_dim, rows in product(DTYPES, (64, 128), (1, 5)):
        yield from summaries(dtype, 700 if large else 12, head_dim, rows)
