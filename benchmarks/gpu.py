"""Native code on a GPU: is it right, and how close does it come to what memory and link allow? No GPU has run this yet.

One command on a machine with a GPU, nvcc and torch, without a network: it compiles the library for that GPU, compares every
op with the reference, and measures. `--no-checks` leaves the comparison out.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import Row, at_least, run
from oasiskv.ops import _abi
from oasiskv.ops._library import Call, Library

ROOT = Path(__file__).parents[1]
HEADS, GROUP, DIM, BLOCK = 8, 4, 128, 16
"""One layer like Llama-3.1-8B's, in bf16."""


def build(folder: Path) -> Path:
    """Compile the library for the GPU that is here."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    major, minor = torch.cuda.get_device_capability()
    kernels = ROOT / "kernels"
    includes = [f"-I{kernels / part}" for part in ("cuda/native", "cuda", "include")]
    options = [
        "-std=c++17",
        "-O3",
        f"-arch=sm_{major}{minor}",
        "--shared",
        "-Xcompiler=-fPIC",
        "--cudart=static",
        "--threads=0",
    ]
    target = folder / "liboasiskv_cuda.so"
    sources = sorted(map(str, (kernels / "cuda").glob("*.cu")))
    subprocess.run([nvcc, *options, *includes, *sources, "-o", str(target)], check=True, timeout=400)
    return target


def seconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Of one run on the device, the best of several replays of a graph of ten: launching costs nothing then."""
    inner, stream = 10, torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(inner):
            work()
    best = float("inf")
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1000 / inner)
    return best


def shown(id_: str, what: str, value: float, unit: str) -> Row:
    """A figure without a bar."""
    return Row(id_, what, value, unit, "", True)


def on_device(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers."""
    return torch.randn(shape, device="cuda").to(dtype)


def attention(call: Call, sequences: int, rows: int, tokens: int) -> tuple[Callable[[], object], int]:
    """A call of paged_attention, and the bytes of KV that it reads."""
    places = tokens // BLOCK
    count = sequences * HEADS * places
    pool = on_device(count, 2, BLOCK, DIM)
    slots = torch.randperm(count, device="cuda").view(sequences, HEADS, places)
    blocks = torch.arange(places, device="cuda").expand_as(slots).contiguous()
    queries = on_device(sequences, rows, HEADS * GROUP, DIM)
    positions = torch.arange(tokens - rows, tokens, device="cuda").expand(sequences, -1).contiguous()
    output, logsumexp = torch.empty_like(queries), torch.empty(queries.shape[:3], device="cuda")

    def work() -> object:
        return call(
            queries=queries.data_ptr(),
            pool=pool.data_ptr(),
            slots=slots.data_ptr(),
            blocks=blocks.data_ptr(),
            arena=0,
            arena_slots=0,
            arena_blocks=0,
            positions=positions.data_ptr(),
            output=output.data_ptr(),
            logsumexp=logsumexp.data_ptr(),
            sequences=sequences,
            rows=rows,
            query_heads=HEADS * GROUP,
            kv_heads=HEADS,
            head_dim=DIM,
            block_size=BLOCK,
            places=places,
            arena_places=0,
            num_slots=count,
            num_arena_slots=0,
            queries_sequence_stride=queries.stride(0),
            queries_row_stride=queries.stride(1),
            queries_head_stride=queries.stride(2),
            dtype=_abi.BFLOAT16,
            scale=DIM**-0.5,
            softcap=0.0,
        )

    return work, pool.numel() * pool.itemsize


def scoring(call: Call, blocks: int) -> tuple[Callable[[], object], int]:
    """A call of transform_score with 32 bits per token and head, and the bytes of codes that it reads."""
    nibbles, components = 8 * HEADS, 32
    codes = torch.randint(256, (blocks, nibbles, BLOCK // 2), dtype=torch.uint8, device="cuda")
    pages, queries = torch.randperm(blocks, device="cuda")[None], on_device(1, 1, HEADS * GROUP, DIM)
    mean = on_device(HEADS, DIM, dtype=torch.float32)
    decode = on_device(HEADS, components, DIM, dtype=torch.float32)
    levels, offsets = on_device(nibbles, 16, 4, dtype=torch.float32), torch.arange(HEADS, device="cuda") * 8
    of = torch.arange(nibbles, device="cuda")[:, None] // 8 * components + torch.arange(4, device="cuda")
    logits = torch.empty((1, 1, HEADS * GROUP, blocks), device="cuda")

    def work() -> object:
        return call(
            codes=codes.data_ptr(),
            pages=pages.data_ptr(),
            queries=queries.data_ptr(),
            mean=mean.data_ptr(),
            decode=decode.data_ptr(),
            levels=levels.data_ptr(),
            components=of.data_ptr(),
            offsets=offsets.data_ptr(),
            logits=logits.data_ptr(),
            sequences=1,
            rows=1,
            query_heads=HEADS * GROUP,
            kv_heads=HEADS,
            head_dim=DIM,
            block_size=BLOCK,
            blocks=blocks,
            num_pages=blocks,
            num_nibbles=nibbles,
            num_components=components,
            queries_sequence_stride=queries.stride(0),
            queries_row_stride=queries.stride(1),
            queries_head_stride=queries.stride(2),
            dtype=_abi.BFLOAT16,
            scale=DIM**-0.5,
        )

    return work, codes.numel()


def selecting(call: Call, blocks: int, places: int) -> Callable[[], object]:
    """A call of select."""
    mass = torch.rand((1, HEADS, blocks), device="cuda")
    resident = torch.stack([torch.randperm(blocks, device="cuda")[:places] for _ in range(HEADS)])[None].contiguous()
    stamps, kept, new_stamps = torch.zeros_like(resident), torch.empty_like(resident), torch.empty_like(resident)
    low, high = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.full((1,), blocks, device="cuda")
    floor, counts = torch.full((1,), -1.0, device="cuda"), torch.empty((1, 2), dtype=torch.int64, device="cuda")
    swaps = 32
    swap_places, swap_blocks = (torch.empty((1, HEADS, swaps), dtype=torch.int64, device="cuda") for _ in range(2))

    def work() -> object:
        return call(
            mass=mass.data_ptr(),
            resident=resident.data_ptr(),
            selected_at=stamps.data_ptr(),
            low=low.data_ptr(),
            high=high.data_ptr(),
            floor=floor.data_ptr(),
            swap_places=swap_places.data_ptr(),
            swap_blocks=swap_blocks.data_ptr(),
            kept=kept.data_ptr(),
            new_selected_at=new_stamps.data_ptr(),
            counts=counts.data_ptr(),
            sequences=1,
            kv_heads=HEADS,
            blocks=blocks,
            places=places,
            swaps=swaps,
            pooled=swaps * HEADS,
            step=1,
            margin=0.0,
            keep=1.0,
        )

    return work


def gathering(call: Call, source: Tensor, target: Tensor, slot_bytes: int, pairs: int) -> Iterator[Callable[[], object]]:
    """Slots from page-locked memory in random order: by the kernel, and by a copy for each."""
    num_slots = source.numel() // slot_bytes
    order = torch.randperm(num_slots)[:pairs]
    order_there, places = order.cuda(), torch.arange(pairs, device="cuda")
    sources, targets = source.view(num_slots, slot_bytes), target[: pairs * slot_bytes].view(pairs, slot_bytes)

    def by_kernel() -> object:
        return call(
            source=source.data_ptr(),
            target=target.data_ptr(),
            source_slots=order_there.data_ptr(),
            target_slots=places.data_ptr(),
            num_pairs=pairs,
            num_source_slots=num_slots,
            num_target_slots=pairs,
            slot_bytes=slot_bytes,
        )

    def by_copies() -> None:
        for place, slot in enumerate(order.tolist()):
            targets[place].copy_(sources[slot], non_blocking=True)

    yield by_kernel
    yield by_copies


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """All rows; the comparison comes first."""
    with tempfile.TemporaryDirectory() as folder:
        path = build(Path(folder))
        if not options.no_checks:
            checked = subprocess.run([sys.executable, "-m", "tests.gpu", str(path)], cwd=ROOT, timeout=300, check=False)
            yield at_least("right", "every op as the reference", checked.returncode == 0, "", 1)
        yield from bandwidths(Library("cuda", path))


def bandwidths(library: Library) -> Iterator[Row]:
    """What memory and link give, and what the kernels make of it."""
    large, other = (torch.empty(1 << 29, dtype=torch.uint8, device="cuda") for _ in range(2))
    copy = 2 * large.numel() / seconds(lambda: other.copy_(large)) / 1e9
    yield shown("device-copy", "device copy, read and written", copy, "GB/s")
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    link = host.numel() / seconds(lambda: other[: 1 << 28].copy_(host, non_blocking=True), 3) / 1e9
    yield shown("link", "page-locked copy to the device", link, "GB/s")
    call = library.call("paged_attention")
    for sequences, rows, tokens in ((1, 1, 2048), (32, 1, 2048), (32, 4, 2048), (32, 16, 2048), (1, 1, 131072)):
        work, read = attention(call, sequences, rows, tokens)
        time = seconds(work)
        name = f"attention, {sequences} x {rows} rows, {tokens} tokens"
        yield shown(f"attention-{sequences}-{rows}-{tokens}-us", name, time * 1e6, "us")
        yield shown(f"attention-{sequences}-{rows}-{tokens}", f"{name}: of a device copy", read / time / 1e9 / copy, "")
    work, read = scoring(library.call("transform_score"), 8192)
    time = seconds(work)
    yield shown("transform-score-us", "transform_score, 8192 blocks", time * 1e6, "us")
    yield shown("transform-score", "transform_score, 8192 blocks: of a device copy", read / time / 1e9 / copy, "")
    yield shown(
        "select-us",
        "select, 8 heads x 8192 blocks, 128 places",
        seconds(selecting(library.call("select"), 8192, 128)) * 1e6,
        "us",
    )
    gather = library.call("copy_blocks")
    crossing = 0
    for exponent in range(12, 21):
        slot_bytes = 1 << exponent
        pairs = min(256, (1 << 26) // slot_bytes)
        kernel, copies = (
            pairs * slot_bytes / seconds(work, 5) / 1e9 for work in gathering(gather, host, other, slot_bytes, pairs)
        )
        what = f"{pairs} slots of {slot_bytes >> 10} KiB from the host"
        yield shown(f"gather-{slot_bytes}", f"{what}, kernel: of a page-locked copy", kernel / link, "")
        yield shown(f"copies-{slot_bytes}", f"{what}, a copy each: of a page-locked copy", copies / link, "")
        if not crossing and copies > kernel:
            crossing = slot_bytes
    yield shown("cross-over", "slots from which a copy each is faster than the kernel (0: none)", crossing / 1024, "KiB")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-checks", action="store_true", help="measure only")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu needs a CUDA device")
    raise SystemExit(run("gpu", __doc__ or "", measure, _options))
