"""Blocks of vLLM read as blocks of ours, whatever order its kernels keep them in."""

import pytest
import torch

from oasiskv.adapters.vllm.device_blocks import BlockReader, check_layout, storage_of
from oasiskv.errors import ConfigError

HEADS, TOKENS, HEAD_DIM = 2, 32, 64


def plain(block, keys, values):
    """Keys, then values, `(tokens, head_dim)` each."""
    half = TOKENS * HEAD_DIM
    block[:, :half] = keys.flatten(1)
    block[:, half:] = values.flatten(1)


def interleaved(block, keys, values):
    """Key and value of a token side by side."""
    block[:] = torch.cat([keys, values], dim=2).flatten(1)


def transposed(block, keys, values):
    """Keys with their channels outside."""
    plain(block, keys.transpose(1, 2), values)


def paired(block, keys, values):
    """Keys transposed, two channels of a token together, as tiles of bfloat16 want them."""
    pairs = keys.reshape(HEADS, TOKENS, HEAD_DIM // 2, 2).transpose(1, 2)
    plain(block, pairs.flatten(1), values)


def scattered(block, keys, values):
    """No rule at all."""
    interleaved(block, keys, values)
    block[:] = block[:, torch.randperm(block.shape[1], generator=torch.Generator().manual_seed(1))]


def writer(order):
    def write(keys, values, cache, mapping):
        for block in (mapping // TOKENS).unique():
            mine = mapping // TOKENS == block
            flat = cache[block].view(HEADS, -1)
            order(flat, keys[mine].transpose(0, 1), values[mine].transpose(0, 1))

    return write


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", [plain, interleaved, transposed, paired, scattered])
@pytest.mark.parametrize("size", [8, 16, 32])
def test_every_order_is_understood(order, dtype, size):
    torch.manual_seed(0)
    cache = torch.zeros((5, HEADS, TOKENS, 2 * HEAD_DIM), dtype=dtype)
    keys = torch.randn((3 * TOKENS, HEADS, HEAD_DIM)).to(dtype)
    values = torch.randn((3 * TOKENS, HEADS, HEAD_DIM)).to(dtype)
    blocks = torch.tensor([4, 1, 3])
    mapping = (blocks[:, None] * TOKENS + torch.arange(TOKENS)).flatten()
    writer(order)(keys, values, cache, mapping)
    got = BlockReader(cache, writer(order), size).read(cache, blocks)
    both = torch.stack([keys, values], dim=1).view(-1, size, 2, HEADS, HEAD_DIM)
    assert torch.equal(got, both.permute(0, 3, 2, 1, 4))


@pytest.mark.parametrize(("order", "copied"), [(plain, 2), (interleaved, 2), (transposed, 2), (paired, 2), (scattered, 0)])
def test_an_order_with_a_rule_is_copied_along_strides(order, copied):
    """To look up every element takes ten times as long."""
    cache = torch.zeros((2, HEADS, TOKENS, 2 * HEAD_DIM))
    assert len(BlockReader(cache, writer(order), 16)._places) == copied


def test_a_backend_that_loses_something_is_refused():
    cache = torch.zeros((2, HEADS, TOKENS, 2 * HEAD_DIM))

    def careless(keys, values, cache, mapping):
        writer(plain)(keys, keys, cache, mapping)

    with pytest.raises(ConfigError, match=r"32 tokens, 2 kv heads .* cannot read"):
        BlockReader(cache, careless, 16)


def test_blocks_must_be_in_one_piece():
    check_layout("layer", torch.zeros((3, HEADS, TOKENS, 128)), TOKENS)
    with pytest.raises(ConfigError, match="VLLM_KV_CACHE_LAYOUT=LBHNC"):
        check_layout("layer", torch.zeros((3, TOKENS, HEADS, 128)).transpose(1, 2), TOKENS)
    with pytest.raises(ConfigError, match="layer"):
        check_layout("layer", torch.zeros((3, TOKENS)), TOKENS)


def test_blocks_must_be_those_of_the_scheduler():
    with pytest.raises(ConfigError, match="want blocks of 32 tokens, and the scheduler's have 64: --block-size 32"):
        check_layout("layer", torch.zeros((3, HEADS, TOKENS, 128)), 64)


@pytest.mark.parametrize(("gap", "offset", "fits"), [(0, 0, True), (1, 3, True), (0.5, 0, False), (0, 0.5, False)])
def test_blocks_must_be_whole_heads_apart(gap, offset, fits):
    """Otherwise a slot would begin in the middle of another one."""
    head = TOKENS * 128
    memory = torch.zeros(20 * head)
    cache = memory.as_strided((3, HEADS, TOKENS, 128), (int((HEADS + gap) * head), head, 128, 1), int(offset * head))
    if fits:
        check_layout("layer", cache, TOKENS)
    else:
        with pytest.raises(ConfigError, match="in one piece"):
            check_layout("layer", cache, TOKENS)


def test_the_storage_is_all_of_it():
    whole = torch.arange(24.0)
    view = whole[4:12].view(2, 4)
    assert torch.equal(storage_of(view), whole)


def test_no_blocks_are_no_blocks():
    cache = torch.zeros((2, HEADS, TOKENS, 2 * HEAD_DIM))
    reader = BlockReader(cache, writer(plain), 16)
    assert reader.read(cache, torch.tensor([], dtype=torch.int64)).shape == (0, HEADS, 2, 16, HEAD_DIM)
