import pytest
import torch

from oasiskv import ops

from .codebooks import make_book
from .test_native_step import step_case
from .test_ops_attention import make_case


def _tables():
    return (
        torch.rand(2, 2, 6),
        torch.tensor([[[0, -1], [3, 4]], [[-1, -1], [5, 0]]]),
        torch.tensor([1, 0]),
        torch.tensor([5, 6]),
    )


def _transform(writing):
    torch.manual_seed(0)
    book = make_book(torch.tensor([[4.0, 2.0, 1.0, 0.5], [2.0, 1.0, 0.1, 0.01]]), 3, 8)
    pages = torch.tensor([2, 0])
    if writing:
        return book.codes(3, 4), pages, torch.randn(2, 2, 4, 8), *book.write_arguments()
    return book.codes(3, 4), pages[None], torch.randn(1, 3, 4, 8), *book.score_arguments(), 0.5


def _bounds4(pages, heads=2):
    return torch.randint(256, (pages, heads, 2, 4), dtype=torch.uint8), torch.rand(pages, heads, 2, 2).half()


def _codes2(pages, heads=2):
    return torch.randint(256, (pages, heads, 4, 2), dtype=torch.uint8)


def _arguments():
    torch.manual_seed(0)
    attention = make_case()
    mass, resident, low, high = _tables()
    pool = torch.randn(6, 2, 4, 8)
    raw = torch.randn(2, 3, 2, 6)
    selected = torch.tensor([[[3, 4], [1, -1]]]), torch.tensor([[[5, 6], [7, 8]]]), torch.tensor([[[1, 2], [3, 4]]])
    kept = torch.tensor([[[3, -1], [-1, -1]]])
    swaps = torch.tensor([0]), kept, torch.tensor([[[1], [0]]]), torch.tensor([[[0], [1]]]), kept + 5
    return {
        "append_rows": (pool, torch.randn(2, 2, 8), torch.randn(2, 2, 8), torch.tensor([[0, 1], [4, 5]]), torch.tensor([3, 0])),
        "copy_blocks": (pool, torch.randn(3, 2, 4, 8), torch.tensor([5, -1]), torch.tensor([0, 1])),
        "paged_attention": attention,
        "exact_logits": (torch.randn(1, 2, 4, 8), pool, torch.tensor([[2, 0, -1]]), 2, 0.5),
        "block_mass": (torch.randn(2, 3, 4, 5), torch.tensor([5, 0]), 2),
        "top_missing": (mass, resident, low, high, 3),
        "select": (mass, resident, torch.zeros_like(resident), low, high, torch.tensor([-1.0, 0.2]), 7, 1, 1, 0.1, 0.5),
        "exchange_slots": (
            torch.tensor([[[4, -1], [5, 6]]]),
            torch.tensor([[7, -1, -1]]),
            torch.tensor([1]),
            torch.tensor([0]),
            torch.tensor([[[9, -1], [-1, 8]]]),
            torch.tensor([[[1], [-1]]]),
        ),
        "corrected_attention": step_case(rows=2),
        "mark_places": (*selected[:2], *swaps[:3]),
        "load_blocks": (pool, torch.randn(8, 2, 4, 8), torch.tensor([[[2, 0, -1], [1, 3, 2]]]), swaps[3], swaps[3] + 1),
        "publish_blocks": (*selected[1:], *swaps),
        "guess_queries": (raw.half(), torch.randn(4, 2, 6), torch.tensor([3, 0]), torch.randn(2, 3, 2, 2)),
        "learn_errors": (
            torch.randn(4, 2, 6),
            torch.tensor([3, 0]),
            raw,
            raw + 1,
            torch.randn(2, 3, 2, 2),
            torch.arange(6).view(2, 3),
            torch.arange(6).view(2, 3),
            1.5,
            0.8,
        ),
        "minmax_write": (torch.zeros(4, 2, 2, 8), torch.tensor([3, 1]), torch.randn(2, 2, 4, 8)),
        "minmax_score": (torch.randn(4, 2, 2, 8), torch.tensor([[3, -1]]), torch.randn(1, 2, 4, 8), 0.5),
        "minmax4_write": (*_bounds4(4), torch.tensor([3, 1]), torch.randn(2, 2, 4, 8), True),
        "minmax4_read": (*_bounds4(4), torch.tensor([[3, -1, 0]])),
        "bit2_write": (_codes2(4), torch.tensor([3, 1]), torch.randn(2, 2, 4, 8), torch.randn(2, 2, 2, 8)),
        "bit2_score": (
            _codes2(4).flatten(0, 1),
            torch.tensor([[[3, -1, 0], [7, 4, 1]]]),
            torch.randn(1, 2, 3, 2, 8),
            torch.randn(1, 2, 4, 8),
            0.5,
        ),
        "transform_write": _transform(writing=True),
        "transform_score": _transform(writing=False),
    }


def test_every_op_is_covered():
    assert sorted(_arguments()) == sorted(ops.NAMES)


@pytest.mark.parametrize("name", ops.NAMES)
def test_schema_and_shape_function_agree_with_the_implementation(name):
    torch.library.opcheck(getattr(torch.ops.oasiskv, name).default, _arguments()[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_in_half_precision_agrees_with_its_shape_function(dtype):
    torch.library.opcheck(torch.ops.oasiskv.paged_attention.default, make_case(dtype))


def test_attention_without_an_arena_agrees_with_its_shape_function():
    case = make_case()
    torch.library.opcheck(torch.ops.oasiskv.paged_attention.default, (*case[:4], None, None, None, *case[7:]))


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 3), (3, 1), (2, 2)])
@pytest.mark.parametrize("rows", [1, 3])
def test_scores_agree_with_their_shape_functions_for_every_grouping_of_heads(kv_heads, group, rows):
    torch.manual_seed(1)
    queries, pages = torch.randn(2, rows, kv_heads * group, 8), torch.tensor([[2, 0, -1], [1, 1, 2]])
    torch.library.opcheck(ops.exact_logits, (queries, torch.randn(3 * kv_heads, 2, 4, 8), pages, kv_heads, 0.5))
    torch.library.opcheck(ops.minmax_score, (torch.randn(3, kv_heads, 2, 8), pages, queries, 0.5))
    torch.library.opcheck(ops.block_mass, (torch.randn(2, rows, kv_heads * group, 5), torch.tensor([5, 2]), kv_heads))
    slots = torch.where(pages < 0, -1, pages * kv_heads)[:, None] + torch.arange(kv_heads)[:, None]
    bounds = torch.randn(2, kv_heads, 3, 2, 8)
    torch.library.opcheck(ops.bit2_score, (_codes2(3, kv_heads).flatten(0, 1), slots, bounds, queries, 0.5))
    book = make_book(torch.tensor([[4.0, 2.0, 1.0, 0.5]]).expand(kv_heads, -1), 2 * kv_heads, 8)
    torch.library.opcheck(ops.transform_score, (book.codes(3, 4), pages, queries, *book.score_arguments(), 0.5))


@pytest.mark.parametrize("shape", [(3,), (2, 1), (1, 2, 2)])
def test_bounds_agree_with_their_shape_function_for_every_table(shape):
    codes, ranges = _bounds4(3)
    rows = torch.randint(-1, 3, shape)
    torch.library.opcheck(ops.minmax4_read, (codes, ranges, rows))
    torch.library.opcheck(ops.minmax4_read, (codes.flatten(0, 1), ranges.flatten(0, 1), rows))


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 3), (3, 1)])
def test_attention_agrees_with_its_shape_function_for_one_row(kv_heads, group):
    slots = torch.arange(2 * kv_heads).view(2, kv_heads, 1)
    pool, queries = torch.randn(2 * kv_heads, 2, 4, 8), torch.randn(2, 1, kv_heads * group, 8)
    tables = slots, torch.zeros_like(slots), None, None, None, torch.tensor([[3], [1]])
    torch.library.opcheck(ops.paged_attention, (queries, pool, *tables, 0.5))


@pytest.mark.parametrize("pooled", [0, 99])
@pytest.mark.parametrize("max_new", [0, 2, 9])
def test_select_agrees_with_its_shape_function_at_the_ends_of_its_width(max_new, pooled):
    mass, resident, low, high = _tables()
    floor = torch.tensor([-1.0, 0.2])
    arguments = (mass, resident, torch.zeros_like(resident), low, high, floor, 7, max_new, pooled, 0.1, 0.5)
    torch.library.opcheck(torch.ops.oasiskv.select.default, arguments)


@pytest.mark.parametrize("name", ops.NAMES)
def test_the_module_offers_the_registered_op(name):
    assert getattr(ops, name) is getattr(torch.ops.oasiskv, name).default
