"""Batches that change when memory is short, when something raises, and when the user interrupts."""

import sys
from pathlib import Path

import pytest
import torch

from oasiskv import OasisConfig
from oasiskv.adapters.hf import OasisCache, batch, changes, order, shared, stock
from oasiskv.errors import OasisError, PoolExhausted, StateError

from .families import prompt, tiny
from .judge import continued, outcome, read, stock_cache

SIZE = 8
"""Tokens of a block."""


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


def wide(**settings):
    """All tokens stay on the device, in a pool of a few strips if `strips` says so."""
    return OasisConfig(budget_tokens=512, block_size=SIZE, window_tokens=32, workers=0, **settings)


def pool_of(strips):
    """Bytes of so many blocks over three layers of two kv heads of dimension 8, in float32, keys and values."""
    return strips * 3 * 2 * 2 * SIZE * 8 * 4


def after(model, ids):
    """What follows a text, by stock transformers."""
    cache = stock_cache(model)
    read(model, cache, ids)
    return continued(model, cache, len(ids))


def assert_holds(model, cache, ids):
    torch.testing.assert_close(continued(model, cache, len(ids)), after(model, ids), atol=1e-3, rtol=0)
    cache.manager.check_integrity()


def assert_nothing_is_left(cache):
    """After a reset the memory is as that of a new cache."""
    cache.reset()
    rooms = cache.manager.rooms
    assert cache.manager.sequences == []
    assert (rooms.pool.free_strips, rooms.arena.used_pages) == (rooms.pool.num_strips, 0)
    cache.manager.check_integrity()


def test_a_repeat_that_the_pool_cannot_hold_changes_nothing(model):
    """40 tokens are 5 strips; 2 sequences of 3 times as many would need 30."""
    ids = prompt(2, 40)
    with OasisCache.for_model(model, wide(pool_bytes=pool_of(25))) as cache:
        read(model, cache, ids)
        sequences = cache.manager.sequences
        with pytest.raises(PoolExhausted, match=rf"pool_bytes must be at least {pool_of(30)}"):
            cache.batch_repeat_interleave(3)
        assert cache.manager.sequences == sequences
        assert cache.manager.rooms.pool.free_strips == 15
        assert_holds(model, cache, ids)
        assert_nothing_is_left(cache)


def test_a_fork_that_cannot_succeed_turns_nothing_sparse(model):
    """Others give way to a fork, as long as that helps."""
    narrow = {"budget_tokens": 96, "dense_threshold": 400, "sink_tokens": 8, "window_tokens": 16}
    ids = prompt(2, 240)
    with OasisCache.for_model(model, OasisConfig(block_size=SIZE, workers=0, pool_bytes=pool_of(80), **narrow)) as cache:
        read(model, cache, ids)
        with pytest.raises(PoolExhausted):
            cache.batch_repeat_interleave(8)
        assert cache.stats().sparse_sequences == 0
        assert_holds(model, cache, ids)


def test_sequences_that_go_make_room_for_those_that_come(model):
    """A pool that is full of three beams holds the next three."""
    ids = prompt(3, 40)
    with OasisCache.for_model(model, wide(pool_bytes=pool_of(18))) as cache:
        read(model, cache, ids)
        for order in ([1, 1, 1], [0, 2, 0], [2, 1, 1]):
            cache.reorder_cache(torch.tensor(order))
            ids = ids[order]
        assert cache.manager.rooms.pool.free_strips == 3
        assert_holds(model, cache, ids)


@pytest.mark.parametrize("error", [PoolExhausted("full"), KeyboardInterrupt(), MemoryError(), OSError("store")], ids=repr)
@pytest.mark.parametrize("call", range(3))
@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ("batch_repeat_interleave", 2),
        ("batch_select_indices", [2, 2, 2, 2]),
        ("reorder_cache", torch.tensor([0, 0, 0, 1, 1])),
    ],
)
def test_a_fork_that_fails_leaves_the_cache_as_it_was(model, monkeypatch, error, call, change, argument):
    ids = prompt(3, 40)
    with OasisCache.for_model(model, wide(pool_bytes=pool_of(60))) as cache:  # so that no sequence has to go first
        read(model, cache, ids)
        sequences, fork, calls = cache.manager.sequences, cache.manager.fork, iter(range(100))

        def broken(sequence):
            if next(calls) == call:
                raise error
            return fork(sequence)

        with monkeypatch.context() as patch:
            patch.setattr(cache.manager, "fork", broken)
            with pytest.raises(type(error)):
                getattr(cache, change)(argument)
        assert cache.manager.sequences == sequences
        assert_holds(model, cache, ids)
        assert_nothing_is_left(cache)


class Interrupted:
    """Raises `KeyboardInterrupt` before the n-th line that the adapter runs."""

    FILES = frozenset(str(Path(module.__file__)) for module in (batch, changes, order, shared, stock))

    def __init__(self, line):
        self.left = line

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, _):
        if frame.f_code.co_filename not in self.FILES:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._trace


CHANGES = {
    "select": (lambda cache: cache.batch_select_indices([1, 1, 0]), lambda ids: ids[[1, 1, 0]]),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), lambda ids: ids[[1, 1]]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), lambda ids: ids.repeat_interleave(2, 0)),
    "crop": (lambda cache: cache.crop(-13), lambda ids: ids[:, :-13]),
    "reset": (lambda cache: cache.reset(), None),
}


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_an_interrupt_at_any_line_completes_undoes_or_refuses(change):
    """The lines of the core are tested with the core."""
    model, (act, expected) = tiny("gemma3"), CHANGES[change]
    ids = prompt(2, 24)
    results = {False: after(model, ids)}
    if expected is not None:
        results[True] = after(model, expected(ids))
    ended, interrupted = set(), 0
    with OasisCache.for_model(model, wide()) as cache:
        while True:
            read(model, cache, ids)
            try:
                with Interrupted(interrupted + 1):
                    act(cache)
            except KeyboardInterrupt:
                interrupted += 1
            else:
                break
            output = outcome(continued, model, cache, len(cache._batch.sequences) or 2)
            if isinstance(output, Exception):
                assert isinstance(output, StateError)
                assert "call reset()" in str(output)
                ended.add("refuses")
            else:
                same = [
                    done
                    for done, wanted in results.items()
                    if output.shape == wanted.shape and torch.allclose(output, wanted, atol=1e-3)
                ]
                assert same or expected is None, f"line {interrupted} leaves something else"
                ended.add("done" if same == [True] else "undone")
            assert_nothing_is_left(cache)
    assert interrupted > 10
    assert expected is None or "undone" in ended


def test_reset_frees_what_no_cache_lists(model):
    """Whatever an interrupt left behind in the manager."""
    with OasisCache.for_model(model, wide()) as cache:
        read(model, cache, prompt(2, 40))
        cache.manager.fork(cache.manager.sequences[0])
        cache.manager.create()
        assert_nothing_is_left(cache)


def test_reset_after_background_work_that_failed(model, monkeypatch):
    """The error is told once for each layer, to nobody here."""
    config = OasisConfig(budget_tokens=96, block_size=SIZE, sink_tokens=8, window_tokens=16, workers=1, correction_blocks=0)
    with OasisCache.for_model(model, config) as cache:
        read(model, cache, prompt(2, 200))
        with monkeypatch.context() as patch:
            patch.setattr(cache.manager.rooms.predictor, "aggregate", lambda *_: (_ for _ in ()).throw(ValueError("broken")))
            with pytest.raises(OasisError):
                model.generate(prompt(2, 210), past_key_values=cache, max_new_tokens=6, do_sample=False)
            assert_nothing_is_left(cache)
        read(model, cache, prompt(2, 200))
