"""Order and lifetimes of the stream scheduler, on streams that only keep account of who waits for whom. No GPU has run it."""

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch

from oasiskv import KVManager
from oasiskv import manager as manager_module
from oasiskv.errors import StateError, WorkerError
from oasiskv.scheduler import InlineScheduler, ThreadScheduler
from oasiskv.streams import StreamScheduler

from .driver import SHAPE, Driver, Part, tiny

STAGES = ("predict", "select", "mark", "transfer")
DEVICE = torch.device("cuda")


class FakeEvent:
    def __init__(self, cuda, seen):
        self.cuda, self.seen = cuda, seen

    def query(self):
        return self.cuda.all_done or self in self.cuda.finished

    def synchronize(self):
        self.cuda.host_waits += 1
        self.cuda.all_done = True


class FakeStream:
    """Knows everything that must have happened before what it does next."""

    def __init__(self, cuda, name, priority=None):
        self.cuda, self.name, self.priority, self.seen = cuda, name, priority, frozenset()

    def do(self, what):
        self.cuda.before[what] = self.seen
        self.cuda.where[what] = self.name
        self.seen |= {what}

    def record_event(self):
        return FakeEvent(self.cuda, self.seen)

    def wait_event(self, event):
        self.seen |= event.seen


class FakeCuda:
    def __init__(self):
        self.before, self.where, self.finished = {}, {}, set()
        self.all_done, self.host_waits = False, 0
        self.made = []
        self.foreground = self.current = FakeStream(self, "foreground")

    def Stream(self, device, priority):
        self.made.append(FakeStream(self, f"stream {len(self.made)}", priority))
        return self.made[-1]

    def current_stream(self, device):
        return self.current

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Work:
    def __init__(self, cuda, layer, tag="", fails=None):
        self.layer, self._cuda, self._tag, self._fails = layer, cuda, tag, fails

    def end(self):
        pass

    def pending_blocks(self):
        return 0

    def _stage(self, name):
        assert not torch.is_grad_enabled()
        if name == self._fails:
            raise ArithmeticError(f"no {name} today")
        self._cuda.current.do((self.layer, self._tag, name))

    def predict(self):
        self._stage("predict")

    def select(self):
        self._stage("select")

    def mark(self):
        self._stage("mark")

    def transfer(self):
        self._stage("transfer")


@pytest.fixture
def cuda():
    return FakeCuda()


@pytest.fixture
def scheduler(cuda):
    return StreamScheduler(DEVICE, cuda)


def step(cuda, scheduler, layers, tag, skip=False):
    """A step's attention and submissions, as decoding does them."""
    for layer in layers:
        if ticket := scheduler._last.get(layer):
            ticket.skip() if skip else ticket.wait()
        cuda.foreground.do((layer, tag, "attention"))
        scheduler.submit(Work(cuda, layer, tag))


def test_stages_follow_the_attention_of_their_layer(cuda, scheduler):
    step(cuda, scheduler, [0, 1], "a")
    for layer in (0, 1):
        for number, stage in enumerate(STAGES):
            earlier = {(layer, "a", name) for name in ("attention", *STAGES[:number])}
            assert earlier <= cuda.before[layer, "a", stage]


def test_background_and_foreground_do_not_wait_for_each_other(cuda, scheduler):
    step(cuda, scheduler, [0, 1], "a")
    assert not {(0, "a", stage) for stage in STAGES} & cuda.before[1, "a", "attention"]
    assert (0, "a", "transfer") not in cuda.before[1, "a", "predict"]  # one layer chooses while another one moves
    assert cuda.where[0, "a", "select"] != cuda.where[0, "a", "transfer"] != "foreground"
    assert {stream.priority for stream in cuda.made} == {0}
    assert cuda.host_waits == 0


def test_a_layer_attends_after_its_transfer(cuda, scheduler):
    step(cuda, scheduler, [0, 1], "a")
    step(cuda, scheduler, [0, 1], "b")
    for layer in (0, 1):
        assert (layer, "a", "transfer") in cuda.before[layer, "b", "attention"]
    assert (1, "a", "transfer") not in cuda.before[0, "b", "attention"]


def test_a_layer_that_skips_attends_after_the_mark_only(cuda, scheduler):
    step(cuda, scheduler, [0, 1], "a")
    step(cuda, scheduler, [0, 1], "b", skip=True)
    assert (1, "a", "mark") in cuda.before[1, "b", "attention"]
    assert (1, "a", "transfer") not in cuda.before[1, "b", "attention"]
    assert (1, "a", "transfer") in cuda.before[1, "b", "select"]


def test_slots_that_one_layer_gives_up_are_filled_by_another_after_its_attention(cuda, scheduler):
    step(cuda, scheduler, range(4), "a", skip=True)
    step(cuda, scheduler, range(4), "b", skip=True)
    for giver in range(4):
        for taker in range(giver + 1, 4):
            assert {(giver, "b", "attention"), (giver, "b", "mark")} <= cuda.before[taker, "b", "mark"]
            assert (giver, "b", "attention") in cuda.before[taker, "b", "transfer"]


def test_skipping_says_whether_the_work_is_done(cuda, scheduler):
    work = Work(cuda, 0)
    ticket = scheduler.submit(work)
    assert ticket.skip() is work
    cuda.finished.add(ticket.done)
    assert ticket.skip() is None


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_reaches_the_waiter_once_and_leaves_the_order(cuda, scheduler, stage):
    ticket = scheduler.submit(Work(cuda, 3, "a", fails=stage))
    with pytest.raises(WorkerError, match=f"layer 3 failed: ArithmeticError: no {stage} today"):
        ticket.wait()
    ticket.wait()
    cuda.foreground.do((3, "b", "attention"))
    done = {(3, "a", name) for name in STAGES[: STAGES.index(stage)]}
    assert done <= cuda.before[3, "b", "attention"]


@pytest.mark.parametrize("done", [False, True])
def test_an_error_that_nobody_asked_for_surfaces_with_the_next_ticket(cuda, scheduler, done):
    scheduler.submit(Work(cuda, 0, "a", fails="select"))
    cuda.all_done = done
    scheduler.submit(Work(cuda, 1))
    ticket = scheduler.submit(Work(cuda, 0, "b"))
    with pytest.raises(WorkerError, match="no select today"):
        ticket.skip()


def test_work_lives_until_the_device_is_done_with_it(cuda, scheduler):
    works = [Work(cuda, layer) for layer in range(3)]
    alive = [weakref.ref(work) for work in works]
    tickets = [scheduler.submit(work) for work in works]
    cuda.finished.update(ticket.done for ticket in tickets[:2])
    del works, tickets
    scheduler.submit(Work(cuda, 9))
    gc.collect()
    assert [reference() is not None for reference in alive] == [False, False, True]


def test_the_foreground_frees_memory_after_all_choosing(cuda, scheduler):
    step(cuda, scheduler, [0, 1], "a")
    scheduler.fence()
    cuda.foreground.do("frees")
    assert {(1, "a", stage) for stage in ("predict", "select", "mark")} <= cuda.before["frees"]
    assert (1, "a", "transfer") not in cuda.before["frees"]
    assert cuda.host_waits == 0


def test_draining_waits_on_the_host(cuda, scheduler):
    scheduler.drain()
    assert cuda.host_waits == 0
    scheduler.submit(Work(cuda, 0))
    scheduler.drain()
    assert cuda.host_waits == 1


def test_closing_drains_and_refuses_more(cuda, scheduler):
    scheduler.submit(Work(cuda, 0))
    scheduler.close()
    scheduler.close()
    assert cuda.host_waits == 1
    with pytest.raises(StateError, match="closed"):
        scheduler.submit(Work(cuda, 0))


@pytest.mark.parametrize("budget_per", ["head", "sequence"])
def test_a_manager_decodes_as_it_does_inline(cuda, scheduler, budget_per):
    cuda.all_done = True  # the host runs all work when it is submitted
    outputs = []
    for given in (None, scheduler):
        manager = KVManager(SHAPE, tiny(correction_blocks=1, budget_per=budget_per), scheduler=given)
        driver = Driver(manager)
        first, second = driver.create(70), driver.create(90)
        outputs.append([])
        for number in range(20):
            drafts = number % 3
            outputs[-1].extend(driver.run(Part(first, drafts + 1, drafts, 1), Part(second, 1)))
        driver.check()
        manager.close()
    assert all(torch.equal(inline, streamed) for inline, streamed in zip(*outputs, strict=True))


def test_a_manager_on_a_gpu_has_streams_unless_it_has_no_workers(monkeypatch, cuda):
    monkeypatch.setattr(manager_module, "StreamScheduler", lambda device: ("streams", device))
    assert manager_module.default_scheduler(torch.device("cuda"), 1) == ("streams", torch.device("cuda"))
    assert isinstance(manager_module.default_scheduler(torch.device("cuda"), 0), InlineScheduler)
    threads = manager_module.default_scheduler(torch.device("cpu"), 2)
    assert isinstance(threads, ThreadScheduler)
    threads.close()
