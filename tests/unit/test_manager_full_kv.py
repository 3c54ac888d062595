import pytest
import torch

from oasiskv import KVManager, ModelShape, Phase
from oasiskv.errors import InputError

from .driver import SHAPE, Driver, Part, close_to, tiny


@pytest.fixture(params=["minmax", "transform"])
def driver(request):
    with KVManager(SHAPE, tiny(summary=request.param)) as manager:
        yield Driver(manager)


def sparse(driver, tokens=60):
    sequence = driver.create(tokens)
    driver.decode(sequence)
    assert sequence.phase is Phase.SPARSE
    return sequence


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nothing_is_lost_in_any_dtype(dtype):
    shape = ModelShape(num_layers=2, query_heads=6, kv_heads=2, head_dim=8, dtype=dtype)
    with KVManager(shape, tiny(arena_bytes=None)) as manager:
        driver = Driver(manager)
        sequence = driver.create(53)
        for drafts, accepted in ((0, 1), (5, 2), (15, 16), (3, 1)):
            driver.decode(sequence, drafts + 1, drafts, accepted)
            driver.check()


@pytest.mark.parametrize("chunk", [1, 4, 5, 16, 17, 30, 100])
def test_after_a_prompt_in_chunks(driver, chunk):
    sequence = driver.create()
    for start in range(0, 90, chunk):
        driver.run(Part(sequence, min(chunk, 90 - start)))
        driver.check()


def test_after_every_decoded_token_from_empty_to_sparse(driver):
    sequence = driver.create()
    for _ in range(60):
        driver.decode(sequence)
        driver.check()
    assert sequence.phase is Phase.SPARSE


@pytest.mark.parametrize("start", [3, 30, 41, 60])
def test_after_drafts_with_rejection(driver, start):
    sequence = driver.create(start)
    chance = torch.Generator().manual_seed(start)
    for _ in range(12):
        drafts = int(torch.randint(1, 16, (), generator=chance))
        driver.decode(sequence, drafts + 1, drafts, int(torch.randint(1, drafts + 2, (), generator=chance)))
        driver.check()


@pytest.mark.parametrize("drafts", [1, 5, 19])
def test_after_a_prompt_with_rejected_drafts(driver, drafts):
    sequence = driver.create()
    driver.run(Part(sequence, 45, drafts, 45 - drafts))
    driver.check()
    driver.decode(sequence)
    driver.check()


@pytest.mark.parametrize("length", [59, 57, 56, 52, 50, 45, 41, 40, 39, 36, 20, 5, 4, 3, 1, 0])
@pytest.mark.parametrize("phase", [Phase.SPARSE, Phase.UNSETTLED])
def test_after_a_crop(driver, length, phase):
    sequence = driver.create(60)
    if phase is Phase.SPARSE:
        driver.decode(sequence)
    assert sequence.phase is phase
    driver.crop(sequence, length)
    driver.check()
    assert (sequence.phase is Phase.DENSE) == (length <= 40)
    for tokens in (1, 3, 20, 1):
        driver.run(Part(sequence, tokens))
        driver.check()


def test_after_a_crop_to_the_budget_attention_is_full_again(driver):
    sequence = sparse(driver, 70)
    driver.crop(sequence, 37)
    for tokens in (1, 1, 1):
        part = Part(sequence, tokens, rows=driver.draw(tokens))
        expected = driver.full(sequence, part.rows)
        close_to(driver.run(part)[0], expected)


def test_after_crops_again_and_again(driver):
    sequence = driver.create(30)
    chance = torch.Generator().manual_seed(0)
    for _ in range(25):
        driver.run(Part(sequence, int(torch.randint(1, 30, (), generator=chance))))
        driver.crop(sequence, int(torch.randint(sequence.length // 2, sequence.length + 1, (), generator=chance)))
        driver.check()


def test_a_crop_to_the_present_length_changes_nothing(driver):
    sequence = sparse(driver)
    before = driver.selected(sequence, 0)
    driver.crop(sequence, sequence.length)
    assert driver.selected(sequence, 0) == before
    driver.check()


@pytest.mark.parametrize("length", [-1, 8])
def test_a_crop_beyond_the_sequence_is_refused(driver, length):
    sequence = driver.create(7)
    with pytest.raises(InputError, match=f"crop to {length} tokens, but the sequence has 7; pass 0 to 7"):
        driver.manager.crop(sequence, length)
    driver.check()


@pytest.mark.parametrize("tokens", [0, 3, 4, 30, 60])
@pytest.mark.parametrize("settled", [False, True])
def test_a_fork_holds_the_same_and_goes_its_own_way(driver, tokens, settled):
    parent = driver.create(tokens)
    if settled:
        driver.decode(parent)
    child = driver.fork(parent)
    driver.check()
    assert child.phase is parent.phase
    for _ in range(5):
        driver.decode(parent)
        driver.decode(child, 3, 2, 2)
        driver.check()
    driver.crop(parent, parent.length // 2)
    driver.check()
    driver.free(parent)
    driver.check()
    driver.decode(child)
    driver.check()


def test_a_fork_shares_sealed_blocks_and_answers_alike(driver):
    parent = sparse(driver)
    used = driver.manager.rooms.arena.used_pages
    child = driver.fork(parent)
    assert driver.manager.rooms.arena.used_pages == used
    rows = driver.draw(1)
    first, second = driver.run(Part(parent, 1, rows=rows), Part(child, 1, rows=rows))
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


def test_forks_of_forks_share_until_the_last_one_is_freed(driver):
    family = [driver.create(50)]
    for _ in range(4):
        family.append(driver.fork(family[-1]))
    for sequence in family:
        driver.decode(sequence, 2, 1, 1)
    driver.check()
    for sequence in family:
        driver.free(sequence)
        driver.check()
    assert driver.manager.rooms.arena.used_pages == 0
    assert driver.manager.rooms.pool.free_strips == driver.manager.rooms.pool.num_strips


@pytest.mark.parametrize("layers_done", [0, 1, 2])
@pytest.mark.parametrize(("tokens", "drafts"), [(1, 0), (6, 0), (16, 15), (25, 0)])
@pytest.mark.parametrize("start", [0, 7, 38, 60, 61])
def test_an_aborted_step_never_was(driver, layers_done, tokens, drafts, start):
    sequence = driver.create(start)
    if start > 40:
        driver.decode(sequence)
        driver.decode(sequence, 5, 4, 2)
    part = Part(sequence, tokens, drafts, rows=driver.draw(tokens))
    step = driver.begin(part)
    for layer in range(layers_done):
        driver.attend(step, layer, part)
    used = driver.manager.rooms.arena.peak_bytes
    step.abort()
    step.abort()
    driver.check()
    driver.run(part)
    driver.check()
    assert driver.manager.rooms.arena.peak_bytes <= used + 5 * driver.manager.rooms.arena.page_bytes


def test_reading_in_the_middle_of_a_step_gives_the_committed_tokens(driver):
    sequence = sparse(driver)
    part = Part(sequence, 7, 6, 3, driver.draw(7))
    step = driver.begin(part)
    for layer in range(2):
        driver.attend(step, layer, part)
        keys, values = driver.manager.full_kv(sequence, layer)
        assert torch.equal(keys, driver.texts[sequence][0][layer].transpose(0, 1))
        assert torch.equal(values, driver.texts[sequence][1][layer].transpose(0, 1))
    step.commit([3])
    driver.remember(part)
    driver.check()


def test_what_is_read_is_a_copy(driver):
    sequence = driver.create(11)
    for tensor in driver.manager.full_kv(sequence, 0):
        tensor.fill_(9.0)
    driver.check()


def test_an_empty_sequence_reads_as_nothing(driver):
    sequence = driver.create()
    keys, values = driver.manager.full_kv(sequence, 1)
    assert keys.shape == values.shape == (2, 0, 8)
    assert keys.dtype == SHAPE.dtype
