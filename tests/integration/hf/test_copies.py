"""`copy.deepcopy` of a cache: a fork, cheap and independent, with the same content. Stock deep copies are the judge."""

import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch

from oasiskv import OasisConfig
from oasiskv.adapters.hf import OasisCache
from oasiskv.errors import OasisError, PoolExhausted, StateError, UnsupportedModel

from .families import prompt, tiny
from .judge import WIDE, continued, read, stock_cache, stop_recording
from .test_batches import assert_nothing_is_left, pool_of, wide
from .test_hybrid_changes import tiny_hybrid

GREEDY = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
NARROW = OasisConfig(budget_tokens=96, block_size=8, sink_tokens=8, window_tokens=16, workers=0)


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture(scope="module", params=["llama", "sliding", "conv", "recurrent"])
def any_model(request):
    return tiny("llama") if request.param == "llama" else tiny_hybrid(request.param)


def answers(model, cache, ids, **options):
    """Many continuations of one prompt, as the documentation of transformers makes them; then one with the cache itself."""
    texts = [torch.cat([ids, prompt(len(ids), 3 + number, seed=40 + number)], dim=1) for number in range(4)]
    results = []
    for text, held in [*((text, copy.deepcopy(cache)) for text in texts), (texts[0], cache)]:
        if "num_beams" in options:
            held.batch_repeat_interleave(options["num_beams"])
        results.append(model.generate(text, past_key_values=held, **GREEDY, **options))
    return results


@pytest.mark.parametrize("batch", [1, 2])
def test_continuations_of_a_prompt(any_model, batch):
    ids = prompt(batch, 100)
    stock = stock_cache(any_model)
    read(any_model, stock, ids)
    with OasisCache.for_model(any_model, WIDE) as cache:
        read(any_model, cache, ids)
        for ours, wanted in zip(answers(any_model, cache, ids), answers(any_model, stock, ids), strict=True):
            assert torch.equal(ours, wanted)
        cache.manager.check_integrity()


def test_beams_from_a_prompt(model):
    """Assisted generation has no such test: transformers reads the whole text again over what the cache holds."""
    ids = prompt(1, 100)
    stock = stock_cache(model)
    read(model, stock, ids)
    with OasisCache.for_model(model, WIDE) as cache:
        read(model, cache, ids)
        for ours, wanted in zip(answers(model, cache, ids, num_beams=3), answers(model, stock, ids, num_beams=3), strict=True):
            assert torch.equal(ours, wanted)


def test_copies_of_a_sparse_cache_answer_as_it_does(model):
    """Without a copy, the same prompt is read again for each answer."""
    ids = prompt(2, 240)
    fresh = []
    for _ in range(2):
        with OasisCache.for_model(model, NARROW) as cache:
            read(model, cache, ids)
            read(model, cache, ids[:, :1])
            assert cache.stats().sparse_sequences == 2
            fresh.append(continued(model, cache, 2))
    with OasisCache.for_model(model, NARROW) as cache:
        read(model, cache, ids)
        read(model, cache, ids[:, :1])
        for clone in (copy.deepcopy(cache), copy.deepcopy(copy.deepcopy(cache)), cache):
            torch.testing.assert_close(continued(model, clone, 2), fresh[0])


def test_a_copy_shares_what_is_sealed(model):
    """What full copies would take is arithmetic; a copy takes its strips, and no page of the arena."""
    with OasisCache.for_model(model, NARROW) as cache:
        read(model, cache, prompt(1, 400))
        read(model, cache, prompt(1, 1))
        before = cache.manager.rooms.arena.used_pages
        clones = [copy.deepcopy(cache) for _ in range(10)]
        assert cache.manager.rooms.arena.used_pages == before == 400 // 8
        assert cache.stats().tokens == 11 * 401
        for clone in clones:
            continued(model, clone, 1)
        assert cache.manager.rooms.arena.used_pages == before
        cache.manager.check_integrity()


def test_a_copy_with_the_default_configuration(model):
    """Whose arena is address space of the size of the machine's memory."""
    with OasisCache.for_model(model) as cache:
        read(model, cache, prompt(1, 40))
        before = cache.manager.rooms.arena.peak_bytes
        with copy.deepcopy(cache) as clone:
            assert clone.manager is cache.manager
            assert cache.manager.rooms.arena.peak_bytes == before
            assert clone.get_seq_length() == 40


def test_copies_do_not_see_each_other(any_model):
    ids = prompt(2, 20)
    with OasisCache.for_model(any_model, WIDE) as cache:
        read(any_model, cache, ids)
        cropped, chosen, repeated, reset, same = (copy.deepcopy(cache) for _ in range(5))
        if not any(cache.is_linear):
            cropped.crop(-5)
        chosen.batch_select_indices([1])
        repeated.batch_repeat_interleave(2)
        reset.reset()
        read(any_model, same, prompt(2, 30, seed=8))
        stock = stock_cache(any_model)
        read(any_model, stock, ids)
        wanted = continued(any_model, stock, 2)
        torch.testing.assert_close(continued(any_model, cache, 2), wanted, atol=1e-3, rtol=0)
        for clone, content in (
            (cropped, ids if any(cache.is_linear) else ids[:, :-5]),
            (chosen, ids[1:]),
            (repeated, ids.repeat_interleave(2, 0)),
            (same, torch.cat([ids, prompt(2, 30, seed=8)], dim=1)),
        ):
            stock = stock_cache(any_model)
            read(any_model, stock, content)
            wanted = continued(any_model, stock, len(content))
            torch.testing.assert_close(continued(any_model, clone, len(content)), wanted, atol=1e-3, rtol=0)
        assert reset.get_seq_length() == 0
        cache.manager.check_integrity()


def test_forwards_of_copies_alternate(any_model):
    """One after another, token by token."""
    ids = prompt(1, 60)
    stocks = [stock_cache(any_model)]
    read(any_model, stocks[0], ids)
    with OasisCache.for_model(any_model, WIDE) as cache:
        read(any_model, cache, ids)
        ours = [cache, copy.deepcopy(cache), copy.deepcopy(cache)]
        stocks = [*stocks, *(copy.deepcopy(stocks[0]) for _ in range(2))]
        for turn in range(4):
            for number, (mine, stock) in enumerate(zip(ours, stocks, strict=True)):
                rows = prompt(1, 1 + turn % 2, seed=100 + 10 * turn + number)
                torch.testing.assert_close(read(any_model, mine, rows), read(any_model, stock, rows), atol=1e-3, rtol=0)
        cache.manager.check_integrity()


@pytest.mark.parametrize("kind", ["llama", "sliding"])
@pytest.mark.parametrize("between", ["forward", "copy", "crop", "reset", "close"])
def test_drafts_that_wait_for_their_crop(kind, between):
    """Another copy begins meanwhile: the drafts are taken for tokens, until `crop` removes those that were rejected."""
    model = tiny("llama") if kind == "llama" else tiny_hybrid(kind)
    ids, drafts = prompt(1, 60), prompt(1, 5, seed=21)
    with OasisCache.for_model(model, WIDE) as cache:
        cache.activate_past_recording()
        read(model, cache, ids)
        cache.crop(0)
        clone = copy.deepcopy(cache)
        read(model, cache, drafts)
        assert cache.manager.open_step is not None
        if between == "forward":
            read(model, clone, drafts[:, :2])
        elif between == "copy":
            copy.deepcopy(cache)
        elif between == "crop":
            clone.crop(0)
        elif between == "reset":
            clone.reset()
        else:
            clone.close()
        cache.crop(-3)
        stop_recording(cache)
        stock = stock_cache(model)
        read(model, stock, torch.cat([ids, drafts[:, :2]], dim=1))
        torch.testing.assert_close(continued(model, cache, 1), continued(model, stock, 1), atol=1e-3, rtol=0)
        cache.manager.check_integrity()


@pytest.mark.parametrize("kind", ["llama", "sliding"])
def test_a_copy_whose_forward_broke_does_not_disturb_the_others(kind):
    model = tiny("llama") if kind == "llama" else tiny_hybrid(kind)
    ids = prompt(1, 60)
    with OasisCache.for_model(model, WIDE) as cache:
        read(model, cache, ids)
        clone = copy.deepcopy(cache)
        handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            read(model, clone, ids)
        handle.remove()
        stock = stock_cache(model)
        read(model, stock, ids)
        torch.testing.assert_close(continued(model, cache, 1), continued(model, stock, 1), atol=1e-3, rtol=0)
        if kind == "llama":
            assert clone.get_seq_length() == 60
        else:
            with pytest.raises(StateError, match=r"call reset\(\)"):
                copy.deepcopy(clone)
        cache.manager.check_integrity()


def test_a_forward_within_the_forward_of_a_copy(model):
    """The inner one is served; the outer one says that it was overtaken."""
    ids = prompt(1, 40)
    with OasisCache.for_model(model, WIDE) as cache:
        read(model, cache, ids)
        clone, calls = copy.deepcopy(cache), []

        def inner(*_):
            handle.remove()
            calls.append(read(model, clone, ids[:, :1]))

        handle = model.model.layers[1].mlp.register_forward_hook(inner)
        with pytest.raises(OasisError):
            read(model, cache, ids[:, :1])
        stock = stock_cache(model)
        read(model, stock, ids)
        wanted = read(model, copy.deepcopy(stock), ids[:, :1])
        torch.testing.assert_close(calls[0], wanted, atol=1e-3, rtol=0)
        torch.testing.assert_close(read(model, cache, ids[:, :1]), wanted, atol=1e-3, rtol=0)


def test_the_last_one_closes_the_manager():
    model = tiny("llama")
    cache = OasisCache.for_model(model, WIDE)
    read(model, cache, prompt(2, 40))
    first, second = copy.deepcopy(cache), copy.deepcopy(cache)
    manager = cache.manager
    assert len(manager.sequences) == 6
    cache.close()
    cache.close()
    assert (len(manager.sequences), manager.closed) == (4, False)
    assert model._forward_pre_hooks
    with pytest.raises(StateError, match="the OasisCache is closed"):
        read(model, cache, prompt(2, 1))
    with first:
        continued(model, first, 2)
    assert (len(manager.sequences), manager.closed) == (2, False)
    continued(model, second, 2)
    second.close()
    assert manager.closed
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_pre_hooks


def test_a_copy_that_is_collected_gives_its_memory_back(model):
    """By the next call, since a collector may run in the middle of another one's forward."""
    with OasisCache.for_model(model, WIDE) as cache:
        read(model, cache, prompt(2, 40))
        clone = copy.deepcopy(cache)
        read(model, clone, prompt(2, 9))
        gone = weakref.ref(clone)
        del clone
        gc.collect()
        assert gone() is None
        read(model, cache, prompt(2, 1))
        assert len(cache.manager.sequences) == 2
        cache.manager.check_integrity()
        assert_nothing_is_left(cache)


def test_a_copy_that_is_collected_while_another_one_runs(model):
    ids = prompt(1, 40)
    with OasisCache.for_model(model, WIDE) as cache:
        read(model, cache, ids)
        clones = [copy.deepcopy(cache)]
        clones[0].activate_past_recording()
        handle = model.model.layers[1].register_forward_hook(lambda *_: clones.clear())
        stock = stock_cache(model)
        read(model, stock, ids)
        wanted = continued(model, stock, 1)
        torch.testing.assert_close(continued(model, cache, 1), wanted, atol=1e-3, rtol=0)
        handle.remove()
        assert len(cache.manager.sequences) == 1


def test_the_original_may_go_first():
    """With the predictor that is shown the residual stream."""
    model = tiny("llama")
    config = OasisConfig(budget_tokens=96, block_size=8, sink_tokens=8, window_tokens=16, workers=0, predictor="layer-ahead")
    ids = prompt(1, 200)
    with OasisCache.for_model(model, config) as alone:
        read(model, alone, ids)
        wanted = continued(model, alone, 1)
    cache = OasisCache.for_model(model, config)
    read(model, cache, ids)
    clone = copy.deepcopy(cache)
    del cache
    gc.collect()
    torch.testing.assert_close(continued(model, clone, 1), wanted)
    shown = []
    clone._show = lambda *_: shown.append(1)
    read(model, clone, ids[:, :1])
    assert shown, "the copy is not shown the residual stream"
    clone.close()
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)


def test_reset_of_one_leaves_the_others(model):
    ids = prompt(2, 40)
    with OasisCache.for_model(model, WIDE) as cache:
        read(model, cache, ids)
        clone = copy.deepcopy(cache)
        cache.reset()
        assert len(cache.manager.sequences) == 2
        stock = stock_cache(model)
        read(model, stock, ids)
        torch.testing.assert_close(continued(model, clone, 2), continued(model, stock, 2), atol=1e-3, rtol=0)
        clone.close()
        assert_nothing_is_left(cache)


def test_a_copy_that_the_pool_cannot_hold(model):
    """40 tokens are 5 strips."""
    ids = prompt(2, 40)
    with OasisCache.for_model(model, wide(pool_bytes=pool_of(21))) as cache:
        read(model, cache, ids)
        with pytest.raises(PoolExhausted):
            _ = copy.deepcopy(cache), copy.deepcopy(cache)
        gc.collect()
        read(model, cache, prompt(2, 1))
        assert len(cache.manager.sequences) == 2
        cache.manager.check_integrity()


def test_copies_in_containers_and_of_outputs(model):
    with OasisCache.for_model(model, WIDE) as cache:
        output = model(prompt(1, 40), past_key_values=cache)
        clone = copy.deepcopy({"output": output, "cache": cache})
        assert clone["cache"] is not cache
        assert (clone["output"].past_key_values if "past_key_values" in output else clone["output"].cache) is clone["cache"]
        with pytest.raises(UnsupportedModel, match="copy the whole cache"):
            copy.deepcopy(cache.layers[0])


def test_a_subclass_and_its_attributes(model):
    class Named(OasisCache):
        pass

    with Named.for_model(model, WIDE) as cache:
        cache.notes = ["a note"]
        with copy.deepcopy(cache) as clone:
            assert type(clone) is Named
            assert clone.notes == ["a note"]
            assert clone.notes is not cache.notes


def test_another_thread_waits_for_its_turn(model):
    """A forward of a copy in the middle of a forward in another thread is refused; afterwards it is served."""
    ids = prompt(1, 40)
    with OasisCache.for_model(model, WIDE) as cache:
        read(model, cache, ids)
        clone, caught = copy.deepcopy(cache), []

        def other():
            try:
                clone.crop(-1)
            except StateError as error:
                caught.append(str(error))

        def run(*_):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

        handle = model.model.layers[1].register_forward_hook(run)
        read(model, cache, ids[:, :1])
        handle.remove()
        assert caught == [caught[0]]
        assert "uses it, or a copy of it" in caught[0]
        other()
        assert clone.get_seq_length() == 39


@pytest.mark.parametrize("write", [pickle.dumps, lambda cache: torch.save(cache, io.BytesIO())], ids=["pickle", "torch.save"])
def test_pickling_is_refused(model, write):
    with OasisCache.for_model(model, WIDE) as cache:
        read(model, cache, prompt(1, 10))
        with pytest.raises(UnsupportedModel, match=r"cannot be pickled or saved: .* copy.deepcopy"):
            write(cache)
        with pytest.raises(UnsupportedModel, match="no tensors of its own"):
            write(cache.layers[0])


def test_shallow_copies_are_refused(model):
    with (
        OasisCache.for_model(model, WIDE) as cache,
        pytest.raises(UnsupportedModel, match="second name for the same sequences"),
    ):
        copy.copy(cache)


def test_a_closed_cache_is_not_copied(model):
    cache = OasisCache.for_model(model, WIDE)
    cache.close()
    with pytest.raises(StateError, match="the OasisCache is closed"):
        copy.deepcopy(cache)
