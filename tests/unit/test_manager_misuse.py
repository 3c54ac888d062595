import dataclasses

import pytest
import torch

from oasiskv import KVManager, OasisError, Phase
from oasiskv.errors import InputError, StateError

from .driver import SHAPE, Driver, Part, tiny


@pytest.fixture
def driver():
    with KVManager(SHAPE, tiny()) as manager:
        yield Driver(manager)


def open_step(driver, sequence, tokens=1, drafts=0):
    part = Part(sequence, tokens, drafts, rows=driver.draw(tokens))
    return driver.begin(part), part


@pytest.mark.parametrize(
    ("tokens", "drafts", "prompt"),
    [([], None, None), ([1, 1], None, None), ([1], [0, 0], None), ([1], [], None), ([1], [0], []), ([1], None, [True, True])],
)
def test_lists_of_different_lengths(driver, tokens, drafts, prompt):
    sequence = driver.create(5)
    with pytest.raises(InputError, match="one num_tokens, one num_drafts and one prompt per sequence: got 1 sequences"):
        driver.manager.begin_step([sequence], tokens, drafts, prompt)


def test_a_step_without_sequences(driver):
    with pytest.raises(InputError, match="got 0 sequences"):
        driver.manager.begin_step([], [])


@pytest.mark.parametrize("tokens", [0, -1])
def test_a_step_without_tokens(driver, tokens):
    with pytest.raises(InputError, match=f"num_tokens is {tokens}"):
        driver.manager.begin_step([driver.create(5)], [tokens])


@pytest.mark.parametrize(("tokens", "drafts"), [(1, 1), (3, 3), (3, 4), (3, -1)])
def test_more_drafts_than_can_be(driver, tokens, drafts):
    with pytest.raises(InputError, match=f"num_drafts is {drafts} of {tokens} tokens"):
        driver.manager.begin_step([driver.create(5)], [tokens], [drafts])


def test_a_sequence_twice_in_one_step(driver):
    sequence = driver.create(5)
    with pytest.raises(InputError, match="listed twice; fork it"):
        driver.manager.begin_step([sequence, sequence], [1, 1])


def test_a_second_step_while_one_is_open(driver):
    first, second = driver.create(5), driver.create(5)
    step, _ = open_step(driver, first)
    with pytest.raises(StateError, match="another step is open"):
        driver.manager.begin_step([second], [1])
    step.abort()
    driver.decode(second)


def test_nothing_is_open_after_a_refusal(driver):
    sequence = driver.create(5)
    with pytest.raises(InputError):
        driver.manager.begin_step([sequence], [0])
    assert driver.manager.open_step is None
    driver.decode(sequence)
    driver.check()


def test_layers_out_of_order(driver):
    sequence = driver.create(5)
    step, part = open_step(driver, sequence)
    with pytest.raises(StateError, match="layer 1 attends, but layer 0 is next"):
        driver.attend(step, 1, part)
    driver.attend(step, 0, part)
    with pytest.raises(StateError, match="layer 0 attends, but layer 1 is next"):
        driver.attend(step, 0, part)
    driver.attend(step, 1, part)
    assert step.complete
    with pytest.raises(StateError, match="layer 1 attends, but layer 2 is next"):
        driver.attend(step, 1, part)
    step.commit()


@pytest.mark.parametrize("name", ["queries", "keys", "values"])
@pytest.mark.parametrize("fault", ["rows", "heads", "head_dim", "dtype"])
def test_tensors_that_do_not_fit(driver, name, fault):
    sequence = driver.create(5)
    step, part = open_step(driver, sequence, 2)
    good = part.rows._asdict()
    tensor = good[name][0]
    bad = {
        "rows": tensor[:1],
        "heads": tensor[:, :1],
        "head_dim": tensor[..., :4],
        "dtype": tensor.to(torch.bfloat16),
    }[fault]
    arguments = {key: bad if key == name else value[0] for key, value in good.items()}
    with pytest.raises(InputError, match=f"^{name} (has shape|is torch.bfloat16)"):
        step.attend(0, **arguments)
    assert step.next_layer == 0
    for layer in range(2):
        driver.attend(step, layer, part)
    step.commit()
    driver.remember(part)
    driver.check()


def test_commit_before_the_last_layer(driver):
    sequence = driver.create(5)
    step, part = open_step(driver, sequence)
    driver.attend(step, 0, part)
    with pytest.raises(StateError, match="1 of 2 layers have attended"):
        step.commit()
    driver.attend(step, 1, part)
    step.commit()


@pytest.mark.parametrize(
    ("tokens", "drafts", "accepted"), [(1, 0, 0), (1, 0, 2), (4, 2, 1), (4, 2, 5), (30, 0, 29), (30, 5, 24)]
)
def test_accepting_too_few_or_too_many(driver, tokens, drafts, accepted):
    sequence = driver.create(5)
    step, part = open_step(driver, sequence, tokens, drafts)
    for layer in range(2):
        driver.attend(step, layer, part)
    with pytest.raises(InputError, match=f"accepted is {accepted}; this step has {tokens} rows, of which {drafts} are drafts"):
        step.commit([accepted])
    with pytest.raises(InputError, match="accepted has 2 entries for 1 sequences"):
        step.commit([tokens, tokens])
    step.commit()
    driver.remember(part)
    driver.check()


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_step_that_is_over(driver, end):
    sequence = driver.create(5)
    step, part = open_step(driver, sequence)
    for layer in range(2):
        driver.attend(step, layer, part)
    getattr(step, end)()
    with pytest.raises(StateError, match="begin a new one"):
        driver.attend(step, 0, part)
    with pytest.raises(StateError, match="begin a new one"):
        step.commit()
    with pytest.raises(StateError, match="begin a new one"):
        step.hint(0, torch.zeros(1, 4))
    step.abort()
    assert sequence.length == (6 if end == "commit" else 5)


@pytest.mark.parametrize("call", ["free", "fork", "crop"])
def test_changing_a_sequence_of_the_open_step(driver, call):
    sequence, other = driver.create(5), driver.create(5)
    step, _ = open_step(driver, sequence)
    arguments = (2,) if call == "crop" else ()
    with pytest.raises(StateError, match="takes part in the open step"):
        getattr(driver.manager, call)(sequence, *arguments)
    getattr(driver, call)(other, *arguments)
    step.abort()
    driver.check()


@pytest.mark.parametrize("call", ["free", "fork", "crop", "full_kv", "begin_step"])
@pytest.mark.parametrize("whose", ["freed", "foreign"])
def test_a_sequence_that_is_not_ours(driver, call, whose):
    with KVManager(SHAPE, tiny()) as other:
        if whose == "freed":
            sequence = driver.create(5)
            driver.free(sequence)
            driver.create(5)
        else:
            driver.create(5)
            sequence = other.create()
        arguments = {"crop": (sequence, 0), "full_kv": (sequence, 0), "begin_step": ([sequence], [1])}.get(call, (sequence,))
        with pytest.raises(StateError, match="was freed, or belongs to another manager"):
            getattr(driver.manager, call)(*arguments)
        driver.check()


def test_a_freed_handle_holds_nothing(driver):
    sequence = driver.create(50)
    driver.free(sequence)
    assert sequence.phase is Phase.FREED
    assert sequence.length == 0
    assert not sequence.pages
    assert not sequence.strips


def test_after_close_every_call_is_refused(driver):
    manager, sequence = driver.manager, driver.create(50)
    step, part = open_step(driver, sequence)
    manager.close()
    manager.close()
    for call in (
        manager.create,
        lambda: manager.begin_step([sequence], [1]),
        lambda: manager.fork(sequence),
        lambda: manager.free(sequence),
        lambda: manager.crop(sequence, 0),
        lambda: manager.full_kv(sequence, 0),
    ):
        with pytest.raises(StateError, match="the manager is closed; create a new one"):
            call()
    with pytest.raises(StateError):
        driver.attend(step, 0, part)
    with pytest.raises(StateError):
        step.commit()
    step.abort()
    assert sequence.phase is Phase.FREED
    assert manager.sequences == []


@pytest.mark.parametrize("workers", [0, 1])
def test_close_in_the_middle_of_a_step(workers):
    manager = KVManager(SHAPE, tiny(workers=workers))
    driver = Driver(manager)
    sequence = driver.create(60)
    driver.decode(sequence)
    step, part = open_step(driver, sequence)
    driver.attend(step, 0, part)
    manager.close()
    assert manager.rooms.arena.used_pages == 0
    with pytest.raises(StateError):
        driver.attend(step, 1, part)


def test_leaving_the_context_closes_also_after_an_error():
    with pytest.raises(KeyError), KVManager(SHAPE, tiny()) as manager:
        raise KeyError("the host's own")
    with pytest.raises(StateError):
        manager.create()


def test_the_errors_of_this_library_are_its_own():
    assert issubclass(InputError, OasisError)
    assert issubclass(InputError, ValueError)
    assert issubclass(StateError, RuntimeError)


@pytest.mark.parametrize("layer", [-1, 0, 2])
def test_a_hint_for_a_layer_that_is_over_or_does_not_exist(driver, layer):
    step, part = open_step(driver, driver.create(5))
    driver.attend(step, 0, part)
    with pytest.raises(StateError, match=f"hint for layer {layer} comes too late or too far: layer 1 attends next"):
        step.hint(layer, torch.zeros(1, 4))
    step.hint(1, torch.zeros(1, 4))
    step.abort()


@pytest.mark.parametrize("size", [(2, 4), (4,), (1, 1, 4)])
def test_a_hint_of_another_shape(driver, size):
    step, _ = open_step(driver, driver.create(5))
    with pytest.raises(InputError, match="hidden has shape"):
        step.hint(0, torch.zeros(size))
    step.abort()


def test_a_manager_takes_the_defaults():
    with KVManager(dataclasses.replace(SHAPE, num_layers=1)) as manager:
        assert manager.config.summary == "transform"
        assert manager.create().phase is Phase.DENSE
