"""Ctrl-C at function entries of every call, at all of them with a stride of 1.

A sequence is as before, or as after, or refuses to be used until it is freed; others are not touched; nothing leaks. The right
outputs come from naive attention over what the driver remembers.
"""

import pytest

from oasiskv import KVManager
from oasiskv.errors import StateError
from oasiskv.tiers import SegmentLayout
from oasiskv.tiers.memory import MemoryStore

from .driver import PAGE_BYTES, SHAPE, Driver, Part, close_to, tiny
from .interrupts import interrupted


def plain(**changes):
    return KVManager(SHAPE, tiny(**changes))


def tiered(**changes):
    config = tiny(arena_bytes=60 * PAGE_BYTES, segment_blocks=2, **changes)
    return KVManager(SHAPE, config, tier=MemoryStore(SegmentLayout.of(SHAPE, config)))


MANAGERS = {"arena": plain, "tier": tiered}


class Scene:
    """A manager with some sequences, a call that changes them, and their texts before and after it."""

    def __init__(self, make):
        self.driver = Driver(make())
        self.manager = self.driver.manager
        gone = self.driver.create(60)  # what other people's values would come from
        self.driver.free(gone)
        self.after = {}

    def close(self):
        self.manager.close()

    def sparse(self, tokens):
        sequence = self.driver.create(tokens)
        self.driver.decode(sequence)
        return sequence

    def crop(self, sequence, length):
        self.after = {sequence: tuple(tensor[:, :length] for tensor in self.driver.texts[sequence])}
        return lambda: self.manager.crop(sequence, length)

    def step(self, *parts):
        """One whole step."""
        driver = self.driver
        before = dict(driver.texts)
        for part in parts:
            part.rows = driver.draw(part.tokens)
        driver.remember(*parts)
        self.after = {part.sequence: driver.texts[part.sequence] for part in parts}
        driver.texts = before

        def call():
            step = driver.begin(*parts)
            for layer in range(SHAPE.num_layers):
                driver.attend(step, layer, *parts)
            step.commit([part.kept for part in parts])

        return call

    def check(self):
        """After an interrupt."""
        manager, driver = self.manager, self.driver
        if manager.open_step is not None:  # the interrupt came before the call did anything, or when it had begun the step
            manager.open_step.abort()
        manager.check_integrity()
        for sequence, before in list(driver.texts.items()):
            if sequence not in manager.sequences:  # freed by the call
                del driver.texts[sequence]
            elif sequence.torn is not None:
                assert sequence in self.after, "a sequence that the call does not change was torn"
                for use in (manager.fork, lambda s: manager.begin_step([s], [1]), lambda s: manager.full_kv(s, 0)):
                    with pytest.raises(StateError, match="ended in the middle and left the sequence half changed; free it"):
                        use(sequence)
                driver.free(sequence)
            else:
                after = self.after.get(sequence, before)
                assert sequence.length in (before[0].shape[1], after[0].shape[1])
                driver.texts[sequence] = before if sequence.length == before[0].shape[1] else after
        for stray in set(manager.sequences) - set(driver.texts):  # made by the call, complete, and never handed out
            manager.free(stray)
        driver.check()
        for sequence in list(driver.texts):  # the outputs are right, also of the next steps
            if sequence.length:
                self.check_output(sequence)
        driver.check()
        for sequence in list(driver.texts):
            driver.free(sequence)
        manager.check_integrity()
        assert not manager.sequences
        assert manager.rooms.arena.used_pages == 0
        assert manager.rooms.pool.free_strips == manager.rooms.pool.num_strips

    def check_output(self, sequence):
        """The next step goes well. Of a sparse sequence, whose selection depends on when the call was interrupted, `check`
        compares every resident block; the output of a dense one is that of full attention."""
        driver = self.driver
        part = Part(sequence, 1, rows=driver.draw(1))
        text = driver.texts[sequence]
        output = driver.run(part)[0]
        assert output.isfinite().all()
        if sequence.phase.value == "dense":
            now, driver.texts[sequence] = driver.texts[sequence], text
            close_to(output, driver.full(sequence, part.rows))
            driver.texts[sequence] = now


def crop_to_dense(scene):
    return scene.crop(scene.sparse(90), 30)


def crop_sparse(scene):
    return scene.crop(scene.sparse(90), 62)


def crop_dense(scene):
    return scene.crop(scene.driver.create(38), 21)


def fork_sparse(scene):
    sequence = scene.sparse(70)
    return lambda: scene.manager.fork(sequence)


def fork_dense(scene):
    sequence = scene.driver.create(30)
    return lambda: scene.manager.fork(sequence)


def free_sparse(scene):
    sequence = scene.sparse(70)
    scene.after = {sequence: scene.driver.texts[sequence]}
    return lambda: scene.manager.free(sequence)


def create_first(scene):
    return scene.manager.create


def prompt(scene):
    return scene.step(Part(scene.driver.create(), 33))


def long_prompt(scene):
    return scene.step(Part(scene.driver.create(), 70))


def more_prompt(scene):
    return scene.step(Part(scene.sparse(60), 25))


def first_decode(scene):
    return scene.step(Part(scene.driver.create(70), 1))


def decode_that_seals(scene):
    return scene.step(Part(scene.sparse(70), 1))


def drafts(scene):
    return scene.step(Part(scene.sparse(69), 4, drafts=3, accepted=2), Part(scene.driver.create(30), 1))


def rejected_prompt_drafts(scene):
    return scene.step(Part(scene.sparse(60), 30, drafts=20, accepted=12))


def abort(scene):
    sequence, driver = scene.sparse(70), scene.driver
    part = Part(sequence, 1, rows=driver.draw(1))
    scene.after = {sequence: driver.texts[sequence]}
    step = driver.begin(part)
    driver.attend(step, 0, part)
    return step.abort


CALLS = [
    crop_to_dense,
    crop_sparse,
    crop_dense,
    fork_sparse,
    fork_dense,
    free_sparse,
    create_first,
    prompt,
    long_prompt,
    more_prompt,
    first_decode,
    decode_that_seals,
    drafts,
    rejected_prompt_drafts,
    abort,
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it may come where Python drops exceptions
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stride", [61, pytest.param(7, marks=pytest.mark.sweep)], ids=["few", "many"])
@pytest.mark.parametrize("make", MANAGERS.values(), ids=MANAGERS)
@pytest.mark.parametrize("prepare", CALLS, ids=lambda call: call.__name__)
def test_an_interrupt_at_any_function_entry_harms_nothing(prepare, make, stride):
    at = 1 + len(prepare.__name__) % stride  # so that the same entries of what calls share are not met each time
    reached = True
    while reached:
        scene = Scene(make)
        scene.sparse(50)  # a bystander
        try:
            call = prepare(scene)
            reached = interrupted(call, at)
            if reached:
                scene.check()
        except BaseException as error:
            error.add_note(f"at entry {at}")
            raise
        finally:
            scene.close()
        at += stride
    assert at > stride, "the call enters no function"
