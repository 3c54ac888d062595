"""How fast the native CPU kernels are, beside what bounds them on the same machine.

One attention layer like that of Llama-3.1-8B: 32 query heads, 8 kv heads, head_dim 128, blocks of 16 tokens, bf16, a budget of
2,048 tokens. What is compared runs in turns, each time on blocks that no cache holds any more. Times are medians of processor
time of one thread, but for the row about two threads. The pool lies on huge pages unless `--small-pages` is given.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from oasiskv import ops

from .report import Row, at_least, at_most, run

QUERY_HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16
PLACES = 128
SLOT_BYTES = 2 * BLOCK * HEAD_DIM * 2

Case = Callable[[int], object]


class Layer:
    """Keys and values of one long text, and working sets of it that have no block in common."""

    def __init__(self, blocks: int, small_pages: bool) -> None:
        self.blocks = blocks
        count = KV_HEADS * blocks
        region = mmap.mmap(-1, count * SLOT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if not small_pages:
            region.madvise(mmap.MADV_HUGEPAGE)
        self.pool = torch.frombuffer(region, dtype=torch.bfloat16).view(count, 2, BLOCK, HEAD_DIM)
        self.pool.view(-1, 64, 2, BLOCK, HEAD_DIM)[:] = torch.randn(64, 2, BLOCK, HEAD_DIM)
        order = torch.randperm(count)
        self._sets = order.view(-1, 1, KV_HEADS, PLACES)
        self._whole = order.view(1, KV_HEADS, blocks)
        self._sum = torch.zeros(1)
        native = ops.backends.cpu
        if native is None:
            raise SystemExit("benchmarks.kernels measures native code, and this installation has none")
        self._read_slots = native.call("read_slots")

    def sparse(self, rows: int) -> Case:
        """Attention of `rows` rows over the n-th working set."""
        return self._attention(list(self._sets), rows)

    def cached(self, rows: int) -> Case:
        """As much attention over two blocks only, which stay in the cache."""
        return self._attention([self._sets[0][..., :2].repeat(1, 1, PLACES // 2)], rows)

    def dense(self, rows: int) -> Case:
        """Attention over everything."""
        return self._attention([self._whole], rows)

    def _attention(self, tables: list[torch.Tensor], rows: int) -> Case:
        places = tables[0].shape[2]
        blocks = torch.arange(places).expand(tables[0].shape).contiguous()
        positions = torch.arange(places * BLOCK - rows, places * BLOCK)[None]
        queries = torch.randn(1, rows, QUERY_HEADS, HEAD_DIM).bfloat16()

        def attend(turn: int) -> object:
            slots = tables[turn % len(tables)]
            return ops.paged_attention(queries, self.pool, slots, blocks, None, None, None, positions, HEAD_DIM**-0.5)

        return attend

    def read(self, turn: int) -> bool:
        """Reads the n-th working set and does nothing with it."""
        slots = self._sets[turn % len(self._sets)]
        return self._read_slots(
            pool=self.pool.data_ptr(),
            slots=slots.data_ptr(),
            sum=self._sum.data_ptr(),
            count=slots.numel(),
            num_slots=self.pool.shape[0],
            slot_bytes=SLOT_BYTES,
        )


def medians(cases: dict[str, Case], turns: int, clock: Callable[[], float] = time.thread_time) -> dict[str, float]:
    """Seconds of each case. They run in turns, so that what else the machine does meets all alike."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    # A step that has no divisor in common with the number of working sets, so that no case meets those of another.
    number = 0
    for turn in range(turns + 1):
        for name, case in cases.items():
            number += 7
            start = clock()
            case(number)
            if turn > 0:
                times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def attention(options: argparse.Namespace) -> Iterator[Row]:
    """Sparse attention beside reading, beside dense attention, and with more rows or threads."""
    layer = Layer(2048 if options.quick else 8192, options.small_pages)
    turns = 15 if options.quick else 60
    cases = {"read": layer.read, "one": layer.sparse(1), "four": layer.sparse(4), "cached": layer.cached(1)}
    found = medians(cases, turns)
    yield at_least(
        "attention-bandwidth",
        "sparse attention, 1 row: share of the bandwidth of reading",
        found["read"] / found["one"],
        "",
        0.85,
    )
    longer = found["one"] / max(found["read"], found["cached"])
    yield at_most(
        "attention-overlap", "sparse attention, in the time of reading or of arithmetic, the longer", longer, "x", 1.2
    )
    yield at_most("attention-rows", "4 rows, in the time of 1 row", found["four"] / found["one"], "x", 1.3)
    found = medians({"sparse": layer.sparse(1), "dense": layer.dense(1)}, max(5, turns // 5))
    ratio = layer.blocks // PLACES
    yield at_least(
        "attention-dense",
        f"the same kernel over {ratio} times the blocks, in the time of the working set",
        found["dense"] / found["sparse"],
        "x",
        50 / 64 * ratio,
    )
    yield two_threads(layer, turns)


def two_threads(layer: Layer, turns: int) -> Row:
    """By the clock on the wall, so the fastest tenth counts: what else runs takes one of two cores away."""
    times: dict[int, list[float]] = {1: [], 2: []}
    case = layer.sparse(1)
    for turn in range(turns):
        for threads, found in times.items():
            torch.set_num_threads(threads)
            for number in range(8):
                start = time.perf_counter()
                case(8 * turn + number)
                found.append(time.perf_counter() - start)
    torch.set_num_threads(1)
    one, two = (sorted(found)[len(found) // 10] for found in times.values())
    return at_least("attention-threads", "two threads, against one", one / two, "x", 1.8)


class Summaries:
    """What scoring reads of one layer: bounds in fp16, and transform codes in a few copies, so that none is cached."""

    def __init__(self, blocks: int, copies: int = 5) -> None:
        nibbles, components = max(8, HEAD_DIM // 8), 28
        self._pages = torch.arange(blocks)[None]
        self._bounds = torch.randn(64, KV_HEADS, 2, HEAD_DIM).half().repeat(blocks // 64, 1, 1, 1)
        self._codes = torch.randint(256, (copies, blocks, KV_HEADS * nibbles, BLOCK // 2), dtype=torch.uint8)
        self._queries = torch.randn(1, 1, QUERY_HEADS, HEAD_DIM).bfloat16()
        lanes = torch.arange(KV_HEADS * nibbles)[:, None] // nibbles * components + torch.arange(4)
        self._book = (
            torch.randn(KV_HEADS, HEAD_DIM),
            torch.randn(KV_HEADS, components, HEAD_DIM) / 4,
            torch.randn(KV_HEADS * nibbles, 16, 4) * torch.tensor([1.0, 0.5, 0.0, 0.0]),
            lanes,
            torch.arange(KV_HEADS) * nibbles,
        )
        self._sum = torch.zeros(1)
        native = ops.backends.cpu
        if native is None:
            raise SystemExit("benchmarks.kernels measures native code, and this installation has none")
        self._read_slots = native.call("read_slots")

    def transform(self, turn: int) -> torch.Tensor:
        """Scores of all blocks by the n-th copy of the codes."""
        return ops.transform_score(
            self._codes[turn % len(self._codes)], self._pages, self._queries, *self._book, HEAD_DIM**-0.5
        )

    def minmax(self, _: int) -> torch.Tensor:
        """Scores of all blocks by their bounds."""
        return ops.minmax_score(self._bounds, self._pages, self._queries, HEAD_DIM**-0.5)

    def read(self, _: int) -> bool:
        """Reads all bounds in their order and does nothing with them."""
        blocks = self._pages.numel()
        return self._read_slots(
            pool=self._bounds.data_ptr(),
            slots=self._pages.data_ptr(),
            sum=self._sum.data_ptr(),
            count=blocks,
            num_slots=blocks,
            slot_bytes=self._bounds[0].numel() * self._bounds.itemsize,
        )


def scoring(options: argparse.Namespace) -> Iterator[Row]:
    """Scoring 8,192 blocks for one row of queries, beside attention over the budget and beside reading."""
    blocks = 2048 if options.quick else 8192
    layer, summaries = Layer(2048, options.small_pages), Summaries(blocks)
    cases = {"attention": layer.sparse(1), "transform": summaries.transform, "minmax": summaries.minmax, "read": summaries.read}
    found = medians(cases, 15 if options.quick else 60)
    what = f"transform scores of {blocks} blocks"
    yield at_most("score-attention", f"{what}, in the time of attention", found["transform"] / found["attention"], "x", 0.7)
    yield at_most("score-minmax", f"{what}, in the time of fp16 min/max", found["transform"] / found["minmax"], "x", 0.4)
    share = found["read"] / found["minmax"]
    yield at_least("minmax-bandwidth", "fp16 min/max: share of the bandwidth of a sequential read", share, "", 0.9)


def selection(options: argparse.Namespace) -> Iterator[Row]:
    """Choosing swaps beside one `torch.topk` of the same masses."""
    blocks, swaps = 8192, 16
    masses = [torch.randn(1, KV_HEADS, blocks).mul(2).softmax(2) for _ in range(20)]
    residents = []
    for mass in masses:  # nearly the best blocks, and a few others
        resident = mass.topk(PLACES + 8, dim=2).indices[..., 8:].contiguous()
        resident[..., :8] = torch.randint(0, blocks, (1, KV_HEADS, 8))
        residents.append(resident)
    stamps, floor = torch.zeros_like(residents[0]), torch.tensor([-1.0])
    low, high = torch.tensor([1]), torch.tensor([blocks - 2])

    def select(turn: int) -> object:
        mass, resident = masses[turn % 20], residents[turn % 20]
        return ops.select(mass, resident, stamps, low, high, floor, turn, swaps, 40, 1e-4, 0.5)

    cases: dict[str, Case] = {"topk": lambda turn: masses[turn % 20].topk(PLACES, dim=2), "select": select}
    found = medians(cases, 60 if options.quick else 300)
    what = f"select, {KV_HEADS} heads of {blocks} blocks, against torch.topk of them"
    yield at_most("select", what, found["select"] / found["topk"], "x", 0.3)


def overhead(options: argparse.Namespace) -> Iterator[Row]:
    """A call that does next to nothing, beside the cheapest call of torch."""
    pool, eight = torch.zeros(4, 2, 4, 8), torch.zeros(8)
    source, target = torch.tensor([0]), torch.tensor([3])

    def often(call: Callable[[], object]) -> Case:
        def case(_: int) -> None:
            for _turn in range(200):
                call()

        return case

    cases = {
        "add": often(lambda: eight.add_(1)),
        "copy": often(lambda: ops.copy_blocks(pool, pool, source, target)),
    }
    found = medians(cases, 15 if options.quick else 60)
    yield at_most("overhead", "one op from Python, against an in-place add of 8 elements", found["copy"] / found["add"], "x", 3)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """All rows."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield from overhead(options)
    yield from selection(options)
    yield from attention(options)
    yield from scoring(options)


def more_options(parser: argparse.ArgumentParser) -> None:
    """What only this benchmark has."""
    parser.add_argument("--small-pages", action="store_true", help="keep the pool on pages of 4 KiB")


if __name__ == "__main__":
    raise SystemExit(run("kernels", __doc__ or "", measure, more_options))
