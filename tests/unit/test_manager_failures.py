import contextlib

import pytest
import torch

from oasiskv import KVManager
from oasiskv.errors import WorkerError

from .driver import SHAPE, Driver, Part, close_to, tiny


class Fault:
    """Makes one background call of a manager fail in some layers, a number of times."""

    def __init__(self, monkeypatch, target, name):
        self.layers, self.times = set(), 0
        real = getattr(target, name)

        def call(layer, *rest):
            if layer in self.layers and self.times:
                self.times -= 1
                raise ArithmeticError("the predictor divided by zero")
            return real(layer, *rest)

        monkeypatch.setattr(target, name, call)

    def arm(self, *layers):
        self.layers, self.times = set(layers), len(layers)


@pytest.fixture(params=[(0, "wait"), (1, "wait"), (2, "wait"), (1, "skip")], ids=lambda pair: f"{pair[0]}-{pair[1]}")
def driver(request):
    workers, on_late = request.param
    with KVManager(SHAPE, tiny(workers=workers, on_late=on_late)) as manager:
        driver = Driver(manager)
        driver.sequence = driver.create(80)
        driver.decode(driver.sequence)
        yield driver


@pytest.fixture(params=["score", "aggregate"])
def fault(request, driver, monkeypatch):
    return Fault(monkeypatch, driver.manager.rooms.predictor, request.param)


def failing_step(driver, fault, *layers, drafts=0):
    driver.manager.drain()
    fault.arm(*layers)
    driver.decode(driver.sequence, drafts + 1, drafts, 1)
    driver.manager.scheduler.drain()
    assert not fault.times


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_failure_in_the_background_surfaces_at_the_next_attend_of_its_layer(driver, fault, layer, drafts):
    failing_step(driver, fault, layer, drafts=drafts)
    length = driver.sequence.length
    part = Part(driver.sequence, 1, rows=driver.draw(1))
    step = driver.begin(part)
    for before in range(layer):
        driver.attend(step, before, part)
    with pytest.raises(WorkerError, match=f"layer {layer} failed: ArithmeticError: the predictor divided") as caught:
        driver.attend(step, layer, part)
    assert isinstance(caught.value.__cause__, ArithmeticError)
    step.abort()
    assert driver.sequence.length == length
    driver.check()
    for _ in range(3):
        driver.decode(driver.sequence)
        driver.check()


def test_after_the_failure_the_outputs_are_those_of_the_old_working_set(driver, fault):
    failing_step(driver, fault, 0)
    part = Part(driver.sequence, 1, rows=driver.draw(1))
    step = driver.begin(part)
    with pytest.raises(WorkerError):
        driver.attend(step, 0, part)
    step.abort()
    driver.manager.drain()
    always, text = driver.always(driver.sequence), driver.texts[driver.sequence]
    seen = [driver.selected(driver.sequence, layer) for layer in range(2)]
    assert all(len(chosen) == 3 for heads in seen for chosen in heads)
    output = driver.run(part)[0]
    driver.texts[driver.sequence] = text
    close_to(output, driver.restricted(driver.sequence, part.rows, [[always | c for c in heads] for heads in seen]))


def test_failures_of_several_layers_surface_once_each(driver, fault):
    failing_step(driver, fault, 0, 1)
    errors = 0
    for _ in range(SHAPE.num_layers + 1):
        part = Part(driver.sequence, 1, rows=driver.draw(1))
        step = driver.begin(part)
        try:
            for layer in range(SHAPE.num_layers):
                driver.attend(step, layer, part)
        except WorkerError:
            errors += 1
            step.abort()
        else:
            step.commit()
            driver.remember(part)
    assert errors == SHAPE.num_layers
    driver.check()


@pytest.mark.parametrize("call", ["drain", "crop", "fork", "free", "check_integrity"])
def test_calls_between_steps_raise_it_once_and_change_nothing(driver, fault, call):
    failing_step(driver, fault, 1)
    manager, sequence = driver.manager, driver.sequence
    length = sequence.length

    def act():
        arguments = {"crop": (sequence, 50), "fork": (sequence,), "free": (sequence,)}.get(call, ())
        return getattr(manager, call)(*arguments)

    with pytest.raises(WorkerError):
        act()
    assert sequence.length == length
    driver.check()
    result = act()
    if call == "fork":
        driver.texts[result] = driver.texts[sequence]
    elif call == "crop":
        driver.texts[sequence] = tuple(tensor[:, :50] for tensor in driver.texts[sequence])
    elif call == "free":
        del driver.texts[sequence]
    driver.check()


@pytest.mark.parametrize("mixed", [False, True], ids=["prefill alone", "prefill beside a decoding sequence"])
def test_a_failure_during_a_prefill_loses_and_leaks_nothing(driver, fault, mixed):
    fresh = driver.create(30)
    driver.crop(fresh, 0)  # its room is there, so that nothing waits for the background before the commit does
    if not mixed:
        failing_step(driver, fault, 1)
    parts = [Part(fresh, 30, rows=driver.draw(30))]
    if mixed:
        parts.append(Part(driver.sequence, 1, rows=driver.draw(1)))
        driver.manager.drain()
        fault.arm(1)
    step = driver.begin(*parts)
    try:
        for layer in range(SHAPE.num_layers):
            driver.attend(step, layer, *parts)
        step.commit()
    except WorkerError:
        step.abort()
    else:
        driver.remember(*parts)
    with contextlib.suppress(WorkerError):
        driver.manager.drain()
    driver.check()
    driver.run(Part(driver.sequence, 1), Part(fresh, 20))
    driver.check()


def test_closing_after_a_failure_raises_nothing(driver, fault):
    failing_step(driver, fault, 0, 1)
    driver.manager.close()


def test_a_failed_load_leaves_its_places_out(monkeypatch):
    with KVManager(SHAPE, tiny()) as manager:
        driver = Driver(manager)
        sequence = driver.create(80)
        driver.decode(sequence)
        arena = manager.rooms.arena.layers[0]
        manager.rooms.arena.layers[0] = torch.empty((0, 2, 4, 8))  # no slot to copy from: the transfer fails after `mark`
        step = driver.begin(part := Part(sequence, 1, rows=driver.draw(1)))
        driver.attend(step, 0, part)
        manager.rooms.arena.layers[0] = arena
        driver.attend(step, 1, part)
        step.commit()
        driver.remember(part)
        with pytest.raises(WorkerError):
            manager.drain()
        assert any(len(chosen) < 3 for chosen in driver.selected(sequence, 0))
        driver.check()
        always, text = driver.always(sequence), driver.texts[sequence]
        seen = [driver.selected(sequence, layer) for layer in range(2)]
        output = driver.run(part)[0]
        after, driver.texts[sequence] = driver.texts[sequence], text
        close_to(output, driver.restricted(sequence, part.rows, [[always | c for c in heads] for heads in seen]))
        driver.texts[sequence] = after
        driver.decode(sequence)
        assert all(len(chosen) == 3 for chosen in driver.selected(sequence, 0))
        driver.check()
