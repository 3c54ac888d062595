"""Bugs that are put into the kernels must be found: by the emulator, or by comparison with the reference."""

import pytest
import torch

from oasiskv.ops import reference

from ..unit.test_ops_attention import make_case
from .calls import Calls
from .emulator import Emulator, Finding
from .test_attention import check, long_case
from .test_selection import tables


def attend_half(emulator):
    check(emulator, long_case(torch.float16, 40, 20, block_size=16, heads=66))  # four stages in a split: buffers are used again


def attend_float(emulator):
    check(emulator, long_case(torch.float32, 30, 10))


def attend_causally(emulator):
    check(emulator, make_case(torch.float16, 64, 16, 2, 5))


def attend_in_two_ways(emulator):
    attend_half(emulator)
    attend_causally(emulator)


def rank(emulator):
    mass, resident, low, high = tables(2, 3, 700, 8, seed=0)
    best, _ = Calls(emulator).top_missing(mass, resident, low, high, 50)
    assert torch.equal(best, reference.top_missing(mass, resident, low, high, 50)[0])


def score_exactly(emulator):
    queries, arena, pages = torch.randn(1, 2, 4, 8), torch.randn(14, 2, 16, 8), torch.randperm(7)[None]
    logits = Calls(emulator).exact_logits(queries, arena, pages, 2, 0.5)
    torch.testing.assert_close(logits, reference.exact_logits(queries, arena, pages, 2, 0.5))


def weigh(emulator):
    logits = torch.randn(1, 2, 4, 30)
    mass = Calls(emulator).block_mass(logits, torch.tensor([30]), 2)
    torch.testing.assert_close(mass, reference.block_mass(logits, torch.tensor([30]), 2))


def entries_outside(emulator):
    pool, target = torch.randn(3, 2, 4, 8), torch.zeros(3, 2, 4, 8)
    Calls(emulator).copy_blocks(pool, target, torch.tensor([2, 900000]), torch.tensor([0, 1]))


RACE = "without a barrier|that nobody wrote|yet to write"
LAST_BARRIER = "        __syncthreads(); // all have read it: it may be overwritten\n"
PARTLY = "        if (warp < 2) __syncthreads();\n"
WAIT = "wait_async<1>(); // this stage is here; the next may be under way"
BALLOT = "const uint32_t all = __ballot_sync(kWarp, seen);"
SUMS = "2 * kWarps * kTile * sizeof(float)"

ATOMIC = "atomicAdd(&histogram[keys[n] >> shift & 255u], 1)"
FIRST = "const int64_t first = work % pieces * kPiece + threadIdx.x;\n"
SHIFTED = "source = reinterpret_cast<const Unit *>(reinterpret_cast<const char *>(source) + 4);\n"
WAIT_AND_BARRIER = f"{WAIT}\n        __syncthreads();"
IN_RANGE, IN_ANY_RANGE = "entry >= 0 && entry < limit ? entry", "entry >= 0 && limit >= 0 ? entry"
LISTED = "list.tokens[place] + offset <= list.last_position;"

LISTED_ALL = "        if (lane == 0) *count = listed;\n    }"

FOUND = {
    "no-barrier-before-overwriting": ("attention_half.cu", LAST_BARRIER, "", attend_half, RACE),
    "no-barrier-after-the-wait": ("attention_half.cu", WAIT_AND_BARRIER, WAIT, attend_half, RACE),
    "no-barrier-in-float": (
        "attention_float.cu",
        "        __syncthreads();\n        if (tid < kRows) {",
        "        if (tid < kRows) {",
        attend_float,
        RACE,
    ),
    "no-barrier-after-the-histogram": (
        "ranking.cuh",
        "        __syncthreads();\n        // Thread i has",
        "        // Thread i has",
        rank,
        RACE,
    ),
    "no-barrier-between-blocks": (
        "block_scores.cuh",
        "        __syncthreads();\n        for (int m = tid; m < rows",
        "        for (int m = tid; m < rows",
        score_exactly,
        RACE,
    ),
    "no-wait": ("attention_half.cu", WAIT, "", attend_half, "its wait is missing"),
    "a-wait-too-weak": ("attention_half.cu", WAIT, "wait_async<2>();", attend_half, "its wait is missing"),
    "no-wait-in-float": ("attention_float.cu", "wait_async<1>();", "", attend_float, "its wait is missing"),
    "shared-memory-too-small": ("attention_half.cu", SUMS, "16", attend_half, "of shared memory, which has"),
    "shared-memory-overrun": (
        "attention_half.cu",
        "const int target = (token * L::kStride + chunk) * 16;",
        "const int target = (token * L::kStride + chunk + 4 * L::kTokens * L::kStride) * 16;",
        attend_half,
        "shared memory",
    ),
    "no-barrier-between-lanes": ("attention.cuh", f"{LISTED_ALL}\n    __syncthreads();", LISTED_ALL, attend_half, RACE),
    "blocks-write-the-same": ("block_mass.cu", "parts[row * gridDim.x + part] =", "parts[part] =", weigh, "two threads write"),
    "counting-without-atomics": ("ranking.cuh", ATOMIC, "++histogram[keys[n] >> shift & 255u]", rank, RACE),
    "half-a-warp-votes": ("attention.cuh", BALLOT, f"if (lane >= 16) continue;\n{BALLOT}", attend_half, "deadlock"),
    "lanes-part": (
        "attention_half.cu",
        "top = not_below(top, __shfl_xor_sync(kWarp, top, 1));",
        "if (lane < 8) top = not_below(top, __shfl_xor_sync(kWarp, top, 1));",
        attend_half,
        "meet in|deadlock",
    ),
    "a-barrier-not-all-reach": ("attention_half.cu", LAST_BARRIER, PARTLY, attend_half, f"deadlock|{RACE}"),
    "entries-are-believed": ("common.cuh", IN_RANGE, IN_ANY_RANGE, entries_outside, "no tensor"),
    "misaligned": ("moves.cu", FIRST, FIRST + SHIFTED, entries_outside, "not aligned"),
}  # fmt: skip

WRONG = {
    "mask-off-by-one": ("attention_half.cu", "<= limits[half];", "< limits[half];"),
    "last-token-not-loaded": ("attention_half.cu", LISTED, LISTED.replace("<=", "<")),
    "fragments-swapped": ("attention_half.cu", "lane % 8 + lane / 16 * 8;", "lane % 8 + lane / 8 % 2 * 8;"),
    "not-transposed": ("attention_half.cu", "load_matrices_x4_transposed(four", "load_matrices_x4(four"),
    "old-sums-not-shrunk": ("attention_half.cu", "sum[half] *= shrink[half];", ""),
    "values-are-keys": ("attention_half.cu", "seen ? source + block_size * D : source", "source"),
    "splits-weigh-alike": ("attention.cu", "value += expf(plan.logsumexps[from] - base) *", "value +="),
}  # fmt: skip


@pytest.mark.parametrize("bug", FOUND)
def test_the_emulator_finds(checked_build, bug):
    file, before, after, use, message = FOUND[bug]
    with pytest.raises(Finding, match=message):
        use(Emulator(checked_build.with_change(bug, file, before, after)))


@pytest.mark.parametrize("bug", WRONG)
def test_the_reference_disagrees(checked_build, bug):
    file, before, after = WRONG[bug]
    emulator = Emulator(checked_build.with_change(bug, file, before, after))
    with pytest.raises(AssertionError, match=r"not close"):
        attend_in_two_ways(emulator)


@pytest.mark.parametrize("use", [attend_half, attend_float, attend_causally, rank, score_exactly, weigh, entries_outside])
def test_without_a_bug_nothing_is_found(emulator, use):
    use(emulator)
