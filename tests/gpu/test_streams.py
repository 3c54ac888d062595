"""The stream scheduler on real streams."""

import time

import pytest
import torch

from oasiskv.streams import StreamScheduler

CYCLES = 200_000_000  # about a tenth of a second


@pytest.fixture
def scheduler():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    made = StreamScheduler(torch.device("cuda", torch.cuda.current_device()))
    yield made
    made.close()


class Slow:
    """Chooses and moves slowly: `table` loses its entry at the mark and gets it back after the move."""

    layer = 0

    def __init__(self, queries, table, memory):
        self._queries, self._table, self._memory = queries, table, memory

    def predict(self):
        self._chosen = self._queries * 2

    def select(self):
        torch.cuda._sleep(CYCLES)

    def mark(self):
        self._table.fill_(-1)

    def transfer(self):
        torch.cuda._sleep(CYCLES)
        self._memory.copy_(self._chosen)
        self._table.fill_(7)

    def end(self):
        pass

    def pending_blocks(self):
        return 1


def submit(scheduler):
    queries, table, memory = (
        torch.full((1 << 20,), 3.0, device="cuda"),
        torch.ones(1, device="cuda"),
        torch.zeros(1 << 20, device="cuda"),
    )
    torch.cuda.synchronize()
    start = time.perf_counter()
    ticket = scheduler.submit(Slow(queries, table, memory))
    del queries
    other = torch.full((1 << 20,), -9.0, device="cuda")  # must not get the memory of the queries
    return ticket, table, memory, other, start


def test_waiting_is_for_the_stream_and_not_for_the_host(scheduler):
    ticket, table, memory, _, start = submit(scheduler)
    ticket.wait()
    read, content = table.clone(), memory.clone()
    assert time.perf_counter() - start < 0.05
    assert read.item() == 7
    assert (content == 6).all()


def test_who_skips_sees_the_mark_and_no_half_filled_memory(scheduler):
    ticket, table, memory, _, start = submit(scheduler)
    assert ticket.skip() is not None
    read = table.clone()
    assert time.perf_counter() - start < 0.05
    assert read.item() == -1
    scheduler.drain()
    assert ticket.skip() is None
    assert table.item() == 7
    assert (memory == 6).all()
