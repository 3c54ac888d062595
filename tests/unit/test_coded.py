import anyio
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasiskv.errors import ConfigError
from oasiskv.tiers import Location, Outcome, Read, SegmentLayout
from oasiskv.tiers.codecs import CODECS
from oasiskv.tiers.coded import CodedStore

from .moody import Hang, Moody, key

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYOUT = SegmentLayout(2, 3, 16, 64)
codecs = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def bytes_of(values, layout):
    return memoryview(values.to(DTYPES[layout.dtype]).contiguous().view(torch.uint8).numpy().tobytes())


def tensor_of(data, layout):
    values = torch.frombuffer(bytearray(data), dtype=DTYPES[layout.dtype])
    return values.view(-1, 2, layout.block_size, layout.head_dim)


def there_and_back(codec, values, layout):
    data = bytes_of(values, layout)
    coded = codec.encode(data, layout)
    assert len(coded) == len(data) // layout.slot_bytes * codec.slot_bytes(layout)
    into = memoryview(bytearray(data.nbytes))
    codec.decode(memoryview(coded), into, layout)
    return tensor_of(into, layout), tensor_of(data, layout)


def keys_with_large_channels(slots=40, layout=LAYOUT):
    """As keys are: two channels are large throughout, in every token."""
    values = torch.randn(slots, 2, layout.block_size, layout.head_dim)
    values[:, 0, :, :2] = values[:, 0, :, :2] * 2 + 30
    return values


@codecs
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_of_a_number_is_at_most_half_a_step_of_its_channel(codec, dtype):
    layout = SegmentLayout(1, 1, 16, 64, dtype)
    back, values = there_and_back(codec, keys_with_large_channels(layout=layout), layout)
    back, values = back.float(), values.float()
    largest = values.abs().amax(2, keepdim=True)
    span = values.amax(2, keepdim=True) - values.amin(2, keepdim=True)
    step = {"fp8/1": largest / 16, "int8/1": largest / 127, "int4/1": span / 15}[codec.name]
    assert ((back - values).abs() <= 0.5 * step + largest * 2**-7).all()


def test_a_scale_per_channel_spares_the_small_ones():
    back, values = there_and_back(CODECS["int8"], keys_with_large_channels(), LAYOUT)
    error = (back - values).float()[:, 0, :, 2:].abs().max()
    assert error < 0.03  # with one scale per slot it is 36 / 127 / 2
    assert error > 0


@codecs
def test_large_numbers_stay_finite(codec):
    for dtype, kind in DTYPES.items():
        layout = SegmentLayout(1, 1, 4, 8, dtype)
        back, values = there_and_back(codec, torch.full((2, 2, 4, 8), torch.finfo(kind).max / 4), layout)
        assert back.isfinite().all()
        assert torch.allclose(back.float(), values.float(), rtol=0.02)
        most, _ = there_and_back(codec, torch.full((2, 2, 4, 8), torch.finfo(torch.float16).max), layout)
        assert most.isfinite().all()


@codecs
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_makes_its_channel_nan_and_nothing_else(codec, odd):
    values = torch.randn(3, 2, 16, 64)
    values[1, 0, 5, 7] = odd
    back, _ = there_and_back(codec, values, LAYOUT)
    assert back[1, 0, :, 7].isnan().all()
    assert back.isnan().sum() == 16


@codecs
def test_zeros_and_the_smallest_numbers_stay_what_they_are(codec):
    layout = SegmentLayout(1, 1, 4, 8, "float32")
    values = torch.zeros(1, 2, 4, 8)
    values[0, 0] = 1e-45
    back, _ = there_and_back(codec, values, layout)
    assert back.abs().max() <= 1e-40


@codecs
@given(
    slots=st.integers(1, 5),
    block=st.integers(1, 9),
    dim=st.integers(1, 70),
    dtype=st.sampled_from(sorted(DTYPES)),
    shift=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_any_shape_at_any_address_and_slot_by_slot(codec, slots, block, dim, dtype, shift):
    layout = SegmentLayout(1, slots, block, dim, dtype)
    data = bytes_of(torch.randn(slots, 2, block, dim, generator=torch.Generator().manual_seed(slots)), layout)
    shifted = memoryview(bytearray(shift) + bytearray(data))[shift:]
    coded = memoryview(codec.encode(shifted, layout))
    size = codec.slot_bytes(layout)
    whole = memoryview(bytearray(shift + data.nbytes))[shift:]
    codec.decode(coded, whole, layout)
    for slot in range(slots):
        part = slice(slot * layout.slot_bytes, (slot + 1) * layout.slot_bytes)
        assert codec.encode(data[part], layout) == coded[slot * size : (slot + 1) * size]
        one = memoryview(bytearray(layout.slot_bytes))
        codec.decode(coded[slot * size : (slot + 1) * size], one, layout)
        assert one == whole[part]


def test_the_sizes_are_what_the_documentation_says():
    plain = LAYOUT.slot_bytes
    sizes = {name: codec.coded(LAYOUT).slot_bytes / plain for name, codec in CODECS.items()}
    assert sizes == {"fp8": 0.5625, "int8": 0.5625, "int4": 0.375}


def test_layouts_of_different_codecs_are_different():
    layouts = [LAYOUT, *(codec.coded(LAYOUT) for codec in CODECS.values())]
    assert len({layout.fingerprint for layout in layouts}) == 4
    assert layouts[1].offset(1, 2) == 5 * layouts[1].slot_bytes
    with pytest.raises(ConfigError, match="coded again"):
        CODECS["int8"].coded(layouts[1])
    with pytest.raises(ConfigError, match="both or neither"):
        SegmentLayout(1, 1, 1, 1, codec="int8/1")


@pytest.fixture
def coded():
    codec = CODECS["int8"]
    return CodedStore(Moody(codec.coded(LAYOUT)), LAYOUT, codec)


def segment(seed):
    torch.manual_seed(seed)
    return bytes_of(torch.randn(6, 2, 16, 64), LAYOUT)


@pytest.mark.anyio
async def test_ranges_of_coded_segments_are_read(coded):
    async with coded as store:
        await store.store([(key(1), segment(1)), (key(2), segment(2)[: 2 * LAYOUT.slot_bytes])])
        assert store.used_bytes == 8 * 0.5625 * LAYOUT.slot_bytes
        assert (store.plain_bytes, store.coded_bytes) == (8 * LAYOUT.slot_bytes, store.used_bytes)
        reads = [
            Read(key(1), 2 * LAYOUT.slot_bytes, memoryview(bytearray(3 * LAYOUT.slot_bytes))),
            Read(key(2), LAYOUT.slot_bytes, memoryview(bytearray(2 * LAYOUT.slot_bytes))),
            Read(key(3), 0, memoryview(bytearray(LAYOUT.slot_bytes))),
        ]
        assert await store.load(reads) == [Outcome.HIT, Outcome.MISS, Outcome.MISS]
        right = tensor_of(segment(1), LAYOUT)[2:5].float()
        assert (tensor_of(reads[0].into, LAYOUT).float() - right).norm() < 0.01 * right.norm()
        assert not any(reads[1].into)
        assert await store.contains([key(1), key(3)]) == [True, False]
        await store.delete([key(1)])
        assert await store.contains([key(1)]) == [False]


@pytest.mark.anyio
async def test_a_cancelled_load_leaves_the_buffer_alone(coded):
    async with coded as store:
        await store.store([(key(1), segment(1))])
        store._inner.hang = Hang()
        read = Read(key(1), 0, memoryview(bytearray(LAYOUT.slot_bytes)))
        with anyio.move_on_after(0.02):
            await store.load([read])
        store._inner.hang.end()
        await anyio.sleep(0.02)
        assert not any(read.into)
        assert not store.unsettled(read.into)


def test_the_inner_store_must_have_the_coded_layout():
    with pytest.raises(ConfigError, match="the inner store has the layout"):
        CodedStore(Moody(LAYOUT), LAYOUT, CODECS["int8"])
    with pytest.raises(ConfigError, match="codec=int8"):
        CodedStore.at(Location.parse("coded:"), LAYOUT)
