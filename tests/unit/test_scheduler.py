import gc
import threading

import pytest
import torch

from oasiskv.errors import ConfigError, StateError, WorkerError
from oasiskv.scheduler import InlineScheduler, ThreadScheduler

STAGES = ("predict", "select", "mark", "transfer")


class Work:
    """Records its stages; waits for `gates[stage]`, and says `reached[stage]` first; fails in `fails`."""

    def __init__(self, layer, log, fails=None, gates=(), tag=None):
        self.layer = layer
        self._tag = layer if tag is None else tag
        self._log = log
        self._fails = fails
        self.gates = {stage: threading.Event() for stage in gates}
        self.reached = {stage: threading.Event() for stage in STAGES}

    def end(self):
        pass

    def pending_blocks(self):
        return 0

    def _stage(self, name):
        self.reached[name].set()
        if name in self.gates:
            assert self.gates[name].wait(10)
        if name == self._fails:
            raise ArithmeticError(f"no {name} today")
        self._log.append((self._tag, name))

    def predict(self):
        self._stage("predict")

    def select(self):
        self._stage("select")

    def mark(self):
        self._stage("mark")

    def transfer(self):
        self._stage("transfer")


@pytest.fixture(params=["inline", "one thread", "three threads"])
def scheduler(request):
    made = InlineScheduler() if request.param == "inline" else ThreadScheduler(1 if request.param == "one thread" else 3)
    yield made
    made.close()


@pytest.fixture
def threads():
    made = ThreadScheduler(2)
    yield made
    made.close()


def test_stages_run_in_order(scheduler):
    log = []
    scheduler.submit(Work(0, log)).wait()
    assert log == [(0, stage) for stage in STAGES]


def test_work_of_one_layer_runs_in_the_order_of_submission(scheduler):
    logs = [[] for _ in range(4)]
    for number in range(20):
        for layer, log in enumerate(logs):
            scheduler.submit(Work(layer, log, tag=number))
    scheduler.drain()
    for log in logs:
        assert log == [(number, stage) for number in range(20) for stage in STAGES]


def test_order_holds_when_the_first_work_is_slow(threads):
    log = []
    first, second = Work(3, log, gates=["predict"], tag="first"), Work(3, log, tag="second")
    threads.submit(first)
    threads.submit(second)
    first.gates["predict"].set()
    threads.drain()
    assert log == [(tag, stage) for tag in ("first", "second") for stage in STAGES]


def test_a_slow_layer_does_not_hold_up_another_ones_thread(threads):
    log = []
    slow = Work(0, log, gates=["predict"])
    ticket = threads.submit(slow)
    threads.submit(Work(1, log)).wait()
    assert log == [(1, stage) for stage in STAGES]
    slow.gates["predict"].set()
    ticket.wait()


def test_submitting_does_not_wait_for_the_work(threads):
    slow = Work(0, [], gates=["predict"])
    ticket = threads.submit(slow)
    assert slow.reached["predict"].wait(10)
    slow.gates["predict"].set()
    ticket.wait()


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_surfaces_once_with_its_cause_and_its_layer(scheduler, stage):
    log = []
    ticket = scheduler.submit(Work(5, log, fails=stage))
    scheduler.drain()
    with pytest.raises(WorkerError, match=rf"layer 5 failed: ArithmeticError: no {stage} today") as caught:
        ticket.wait()
    assert isinstance(caught.value.__cause__, ArithmeticError)
    ticket.wait()
    assert log == [(5, before) for before in STAGES[: STAGES.index(stage)]]


def test_an_error_surfaces_on_skip_as_well(scheduler):
    ticket = scheduler.submit(Work(0, [], fails="select"))
    scheduler.drain()
    with pytest.raises(WorkerError):
        ticket.skip()
    assert ticket.skip() is None


def test_work_goes_on_after_an_error(scheduler):
    log = []
    failed = scheduler.submit(Work(0, log, fails="predict"))
    with pytest.raises(WorkerError):
        failed.wait()
    scheduler.submit(Work(0, log)).wait()
    assert log == [(0, stage) for stage in STAGES]


def test_skip_of_finished_work_has_nothing_to_report(scheduler):
    ticket = scheduler.submit(Work(0, []))
    scheduler.drain()
    assert ticket.skip() is None
    assert ticket.skip() is None


@pytest.mark.parametrize("stage", ["predict", "select"])
def test_skip_cancels_work_that_has_not_begun_its_transfer(threads, stage):
    log = []
    work = Work(0, log, gates=[stage])
    ticket = threads.submit(work)
    assert work.reached[stage].wait(10)
    assert ticket.skip() is work
    assert ticket.skip() is work
    work.gates[stage].set()
    ticket.wait()
    assert log == [(0, "predict"), (0, "select")]


def test_skip_cancels_work_that_still_queues(threads):
    log = []
    first, second = Work(0, log, gates=["predict"], tag="first"), Work(0, log, tag="second")
    threads.submit(first)
    ticket = threads.submit(second)
    assert ticket.skip() is second
    first.gates["predict"].set()
    ticket.wait()
    assert ("first", "transfer") in log
    assert ("second", "mark") not in log
    assert ("second", "transfer") not in log


def test_skip_does_not_cancel_work_inside_its_transfer(threads):
    log = []
    work = Work(0, log, gates=["transfer"])
    ticket = threads.submit(work)
    assert work.reached["transfer"].wait(10)
    assert ticket.skip() is work
    work.gates["transfer"].set()
    ticket.wait()
    assert log == [(0, stage) for stage in STAGES]
    assert ticket.skip() is None


def test_skip_waits_for_a_mark_in_progress_so_that_no_half_marked_table_is_read(threads):
    log, answers = [], []
    work = Work(0, log, gates=["mark", "transfer"])
    ticket = threads.submit(work)
    assert work.reached["mark"].wait(10)
    foreground = threading.Thread(target=lambda: answers.append((ticket.skip(), list(log))))
    foreground.start()
    foreground.join(0.05)
    assert foreground.is_alive()
    work.gates["mark"].set()
    foreground.join(10)
    assert answers == [(work, [(0, "predict"), (0, "select"), (0, "mark")])]
    work.gates["transfer"].set()
    ticket.wait()


def test_an_error_that_nobody_asked_for_is_kept_for_the_next_ticket_of_its_layer(scheduler):
    scheduler.submit(Work(1, [], fails="predict"))
    other, same = scheduler.submit(Work(0, [])), scheduler.submit(Work(1, []))
    other.wait()
    with pytest.raises(WorkerError, match="ArithmeticError: no predict today"):
        same.wait()
    scheduler.submit(Work(1, [])).wait()


def test_background_work_records_no_gradients(scheduler):
    seen = []
    work = Work(0, [])
    work.predict = lambda: seen.append(torch.is_grad_enabled())
    with torch.enable_grad():
        scheduler.submit(work).wait()
    assert seen == [False]


def test_drain_waits_for_all_layers_and_keeps_errors_for_the_tickets(threads):
    log = []
    tickets = [threads.submit(Work(layer, log, fails="transfer" if layer == 2 else None)) for layer in range(4)]
    threads.drain()
    assert sum(stage == "mark" for _, stage in log) == 4
    for layer in (0, 1, 3):
        tickets[layer].wait()
    with pytest.raises(WorkerError):
        tickets[2].wait()


def test_close_finishes_the_work_and_may_be_repeated(scheduler):
    log = []
    for layer in range(3):
        scheduler.submit(Work(layer, log))
    scheduler.close()
    scheduler.close()
    assert len(log) == 3 * len(STAGES)


def test_submitting_after_close_is_refused(scheduler):
    scheduler.close()
    with pytest.raises(StateError, match="closed"):
        scheduler.submit(Work(0, []))


def test_drain_after_close_returns(scheduler):
    scheduler.submit(Work(0, []))
    scheduler.close()
    scheduler.drain()


def test_close_ends_the_threads():
    before = threading.active_count()
    made = ThreadScheduler(3)
    assert threading.active_count() == before + 3
    made.close()
    assert threading.active_count() == before


def test_threads_need_at_least_one_worker():
    with pytest.raises(ConfigError, match="workers is 0"):
        ThreadScheduler(0)


def test_nothing_is_raised_where_nobody_waits():
    made = ThreadScheduler(1)
    made.submit(Work(0, [], fails="predict"))
    made.close()
    gc.collect()


class Asking(Work):
    """Asks how many threads torch would use for its transfer."""

    def transfer(self):
        self.threads = torch.get_num_threads()


@pytest.fixture
def two_torch_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_background_thread_keeps_to_one_core(two_torch_threads, threads):
    work = Asking(0, [])
    threads.submit(work).wait()
    assert work.threads == 1
    assert torch.get_num_threads() == 2  # the foreground's are its own


def test_inline_work_runs_on_the_threads_of_its_caller(two_torch_threads):
    work = Asking(0, [])
    InlineScheduler().submit(work).wait()
    assert work.threads == 2
