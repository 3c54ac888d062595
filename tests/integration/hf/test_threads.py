"""Any number of threads run one model at once; the right values are those of stock transformers, computed alone."""

import copy
import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import DynamicCache

from oasiskv import OasisConfig
from oasiskv.adapters.hf import OasisCache
from oasiskv.errors import InputError, StateError

from .families import prompt, tiny

WIDE = OasisConfig(budget_tokens=512, window_tokens=32, workers=0, arena_bytes=32 << 20)
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def switch_often():
    """Let threads take turns every few bytecodes."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def together(*works):
    """Run each in a thread of its own, all from the same moment on; their results, or the first error."""
    barrier = threading.Barrier(len(works))

    def begin(work):
        barrier.wait()
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result() for future in [pool.submit(begin, work) for work in works]]


def steps(model, ids, held, keyword):
    """Logits of a prompt and eight single tokens."""
    with torch.no_grad():
        return torch.cat([model(part, **{keyword: held}).logits for part in ids.split([60, *[1] * 8], dim=1)], dim=1)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_stock_calls_and_two_caches_at_once(family, implementation):
    model = tiny(family)
    model.set_attn_implementation(implementation)
    texts = [prompt(1, 68, seed=seed) for seed in range(4)]
    with OasisCache.for_model(model, WIDE) as cache:
        keyword = cache.keyword
    alone = [steps(model, ids, DynamicCache(config=model.config), keyword) for ids in texts]
    generated = [model.generate(ids, **GREEDY) for ids in texts]

    def stock(ids, logits):
        for _ in range(4):
            assert torch.equal(steps(model, ids, DynamicCache(config=model.config), keyword), logits)

    def ours(ids, logits, tokens):
        with OasisCache.for_model(model, WIDE) as cache:
            for _ in range(3):
                torch.testing.assert_close(steps(model, ids, cache, keyword), logits, atol=1e-3, rtol=0)
                cache.reset()
                assert torch.equal(model.generate(ids, **{keyword: cache}, **GREEDY), tokens)
                assert cache._shared.stream.checked
                cache.manager.check_integrity()
                cache.reset()

    together(
        lambda: stock(texts[0], alone[0]),
        lambda: ours(texts[1], alone[1], generated[1]),
        lambda: stock(texts[2], alone[2]),
        lambda: ours(texts[3], alone[3], generated[3]),
    )
    assert model.config._attn_implementation == implementation
    assert not model._forward_pre_hooks
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_caches_come_and_go_beside_stock_calls(implementation):
    model, ids = tiny("llama"), prompt(1, 68)
    model.set_attn_implementation(implementation)
    expected = steps(model, ids, DynamicCache(config=model.config), "past_key_values")
    done = threading.Event()

    def stock():
        rounds = 0
        while not done.is_set() or not rounds:
            assert torch.equal(steps(model, ids, DynamicCache(config=model.config), "past_key_values"), expected)
            rounds += 1

    def come_and_go(dropped):
        for _ in range(6):
            cache = OasisCache.for_model(model, WIDE)
            with torch.no_grad():
                torch.testing.assert_close(model(ids[:, :9], past_key_values=cache).logits, expected[:, :9], atol=1e-3, rtol=0)
            if dropped:
                del cache
                gc.collect()
            else:
                cache.close()

    def all_of_it():
        try:
            together(lambda: come_and_go(False), lambda: come_and_go(True))
        finally:
            done.set()

    together(stock, all_of_it)
    assert type(model.config._attn_implementation) is str
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


class Paused:
    """A forward of a model, in a thread of its own, that stands still in the middle."""

    def __init__(self, model, **arguments):
        self.inside, self.go_on = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(model, arguments))
        self.output, self.error = None, None
        handle = model.model.layers[1].mlp.register_forward_hook(self._wait)
        self._thread.start()
        assert self.inside.wait(30)
        handle.remove()

    def _wait(self, *_):
        if threading.current_thread() is self._thread:
            self.inside.set()
            assert self.go_on.wait(30)

    def _run(self, model, arguments):
        try:
            with torch.no_grad():
                self.output = model(**arguments).logits
        except Exception as error:  # noqa: BLE001 - raised again where it is waited for
            self.error = error

    def finish(self):
        self.go_on.set()
        self._thread.join()
        if self.error is not None:
            raise self.error
        return self.output


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_one_cache_in_two_threads_is_refused_before_anything_changes(family):
    model, ids = tiny(family), prompt(2, 68)
    expected = model(ids).logits
    with OasisCache.for_model(model, WIDE) as cache:
        model(ids[:, :60], **{cache.keyword: cache})
        paused = Paused(model, input_ids=ids[:, 60:64], **{cache.keyword: cache})
        for call in (
            lambda: model(ids[:, 60:64], **{cache.keyword: cache}),
            lambda: cache.crop(-1),
            lambda: cache.reorder_cache(torch.tensor([1, 0])),
            lambda: cache.batch_repeat_interleave(2),
            cache.reset,
            cache.close,
        ):
            with pytest.raises(StateError, match=r"OasisCache while thread .* uses it"):
                call()
        torch.testing.assert_close(paused.finish(), expected[:, 60:64], atol=1e-3, rtol=0)
        rest = model(ids[:, 64:], **{cache.keyword: cache}).logits
        torch.testing.assert_close(rest, expected[:, 64:], atol=1e-3, rtol=0)
        cache.manager.check_integrity()


def test_a_part_of_the_model_in_another_thread_gets_no_turn():
    model, ids = tiny("llama"), prompt(1, 68)
    expected = model(ids).logits
    with OasisCache.for_model(model, WIDE) as cache:
        paused = Paused(model, input_ids=ids, **{cache.keyword: cache})
        with pytest.raises(InputError, match="part of its model"):
            model.model(ids[:, :1], **{cache.keyword: cache})
        torch.testing.assert_close(paused.finish(), expected, atol=1e-3, rtol=0)
        assert cache._shared.stream.checked


def test_another_cache_of_the_model_runs_in_the_middle_of_a_forward():
    model, ids = tiny("gemma3"), prompt(1, 68)
    expected = model(ids).logits
    with OasisCache.for_model(model, WIDE) as first, OasisCache.for_model(model, WIDE) as second:
        paused = Paused(model, input_ids=ids, **{first.keyword: first})
        assert torch.equal(model(ids).logits, expected)
        for part, logits in ((ids[:, :60], expected[:, :60]), (ids[:, 60:], expected[:, 60:])):
            torch.testing.assert_close(model(part, **{second.keyword: second}).logits, logits, atol=1e-3, rtol=0)
        torch.testing.assert_close(paused.finish(), expected, atol=1e-3, rtol=0)


def test_a_cache_that_is_dropped_in_the_middle_of_another_forward():
    model, ids = tiny("llama"), prompt(1, 68)
    expected = model(ids).logits
    first, second = OasisCache.for_model(model, WIDE), OasisCache.for_model(model, WIDE)
    model(ids, **{second.keyword: second})
    paused = Paused(model, input_ids=ids, **{first.keyword: first})
    manager = second.manager
    del second
    gc.collect()
    assert manager.closed
    torch.testing.assert_close(paused.finish(), expected, atol=1e-3, rtol=0)
    first.close()


def test_copies_of_a_cache_in_two_threads():
    """They share a manager: a forward of one in the middle of another's is refused, and one that is dropped waits."""
    model, ids = tiny("gemma3"), prompt(1, 68)
    expected = model(ids).logits
    with OasisCache.for_model(model, WIDE) as cache:
        model(ids[:, :60], **{cache.keyword: cache})
        clone, dropped = copy.deepcopy(cache), copy.deepcopy(cache)
        paused = Paused(model, input_ids=ids[:, 60:64], **{cache.keyword: cache})
        with pytest.raises(StateError, match="or a copy of it"):
            model(ids[:, 60:], **{cache.keyword: clone})
        del dropped
        gc.collect()
        torch.testing.assert_close(paused.finish(), expected[:, 60:64], atol=1e-3, rtol=0)
        for held, rest in ((clone, slice(60, 68)), (cache, slice(64, 68))):
            logits = model(ids[:, rest], **{cache.keyword: held}).logits
            torch.testing.assert_close(logits, expected[:, rest], atol=1e-3, rtol=0)
        assert len(cache.manager.sequences) == 2
        cache.manager.check_integrity()
        clone.close()


def test_a_turn_ends_with_its_thread():
    """An interrupt skips the hooks behind a forward."""
    model, ids = tiny("llama"), prompt(1, 68)
    expected = model(ids).logits
    with OasisCache.for_model(model, WIDE) as cache:

        def interrupt(*_):
            raise KeyboardInterrupt

        def forward():
            with pytest.raises(KeyboardInterrupt):
                model(ids, **{cache.keyword: cache})

        handle = model.model.layers[1].mlp.register_forward_hook(interrupt)
        together(forward)
        handle.remove()
        torch.testing.assert_close(model(ids, **{cache.keyword: cache}).logits, expected, atol=1e-3, rtol=0)
        cache.manager.check_integrity()


def test_threads_take_turns_with_one_cache():
    model, ids = tiny("llama"), prompt(1, 68)
    expected = model(ids).logits
    with OasisCache.for_model(model, WIDE) as cache:
        for first in range(0, 68, 17):
            part = slice(first, first + 17)
            (logits,) = together(lambda part=part: model(ids[:, part], **{cache.keyword: cache}).logits)
            torch.testing.assert_close(logits, expected[:, part], atol=1e-3, rtol=0)


def test_what_a_finaliser_wants_waits_for_the_end_of_the_turn():
    from oasiskv.adapters.hf.forward import Forward, Turn

    turn, done = Turn(), []
    turn.when_free(lambda: done.append("at once"))
    turn.begin(Forward(1))
    turn.when_free(lambda: done.append("later"))
    together(lambda: turn.when_free(lambda: done.append("last")))
    assert done == ["at once"]
    turn.end()
    assert done == ["at once", "later", "last"]
    with turn.hold("a call"):
        together(turn.end)
        turn.when_free(lambda: done.append("after the call"))
        assert done[-1] == "last"
    assert done[-1] == "after the call"
