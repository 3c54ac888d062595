"""What transformers and users do to a cache between forwards: crop, choose and repeat sequences, reset, copy, close."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from . import order, stock
from .binding import BoundCache
from .forward import Turn, in_turn
from .refusals import NoLayerAlone, NoStaticTensors
from .shared import Shared


class ChangingCache(NoStaticTensors, BoundCache):
    """The part of `OasisCache` that is not about forwards. Whatever changes several layers changes all of them, or none.

    Attributes:
        columns: of the batch so far, padding included.
    """

    _config: PreTrainedConfig

    def _join(self, shared: Shared, layers: list[CacheLayerMixin]) -> None:
        """Begin without sequences, over a manager that other caches may use too."""
        super().__init__(layers=layers)
        self.manager = shared.manager
        self.columns = 0
        self._in_forward = False
        self._shared = shared
        self._batch = shared.join(hybrid=bool(self._stock))
        self._close = weakref.finalize(self, shared.leave, self._batch)

    @property
    def _turn(self) -> Turn:
        return self._shared.turn

    @property
    def _stock(self) -> list[CacheLayerMixin]:
        """The layers that are transformers' own."""
        return [layer for layer in self.layers if not isinstance(layer, NoLayerAlone)]

    def _settle(self) -> None:
        """Come to rest before something changes. Raises `StateError` for a cache that is closed or torn."""
        self._shared.claim(self._batch)
        if self._in_forward:  # an interrupt has ended it
            self._in_forward = False
            self._batch.cut_short()
        self._shared.finish_step()
        self._batch.check_whole()

    def _changing(self, what: str) -> AbstractContextManager[None]:
        """All layers change, or none of them."""
        return self._batch.changing(what, stock.Kept(self._stock).restore)

    @in_turn
    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` columns of the batch. After a forward with drafts this is what accepts the other
        columns, also with 0.

        Raises:
            InputError: for a positive number, or more tokens than there are.
            StateError: a stock layer of a hybrid model cannot go back that far. Nothing has changed.
            TierError: see `KVManager.crop`.
        """
        count = order.tokens_removed(tokens_to_remove, self.columns)
        self._shared.claim(self._batch)
        step = self._shared.step_of(self._batch)
        if step is None or not step.complete:
            self._settle()
            step = None
        self._batch.check_whole()
        with self._changing("crop"):
            stock.crop_layers(self._stock, count)
            if step is None:
                self._batch.crop(count)
            elif all(count < tokens for tokens in step.num_tokens):
                step.commit([tokens - count for tokens in step.num_tokens])
            else:
                step.commit()
                self._batch.crop(count)
            self.columns -= count

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make sequence `i` continue sequence `beam_idx[i]`: beam search. Raises as `batch_select_indices`."""
        self._choose("reorder_cache", lambda batch: order.reordered(batch, beam_idx))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences at `indices`, in that order and as often as listed, or those where a boolean is true.

        Raises:
            BatchIndexError: indices that do not fit the batch, or that keep nothing.
            PoolExhausted: no room for the forks of sequences that are listed twice.

        Nothing has changed then.
        """
        self._choose("batch_select_indices", lambda batch: order.selected(batch, indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times; 1 or more. Raises as `batch_select_indices`."""
        most = self._batch.most
        self._choose("batch_repeat_interleave", lambda batch: order.repeated(batch, repeats, most))

    @in_turn
    def _choose(self, method: str, choice: Callable[[int], list[int]]) -> None:
        self._settle()
        if not self.columns:  # as for stock caches: a batch is what the first forward brings
            return
        numbers = choice(len(self._batch.sequences))
        with self._changing(method):
            for layer in self._stock:
                layer.reorder_cache(torch.tensor(numbers))
            self._batch.select(numbers)

    @in_turn
    def reset(self) -> None:
        """Forget all sequences; the cache is as new, also after an error. Its copies keep theirs."""
        self._shared.claim(self._batch)
        self._batch.torn = "a reset of an OasisCache was cut short"
        self._shared.reset(self._batch)
        self.columns = 0
        self._in_forward = False
        fresh = stock.new_layers(self._config)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, NoLayerAlone):
                layer.record_past = layer.is_initialized = False
            else:  # replaced: some versions of transformers only zero them at a reset, and keep their length
                self.layers[index] = fresh[index]
        self._batch.forget()

    # Copies

    @in_turn
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A cache with the same content, to continue in another way: a fork of each sequence, which shares what is sealed, and
        copies of the stock layers. Copies share the manager, take turns, and are closed one by one.

        Raises:
            StateError: the cache is closed, or a change of it was cut short.
            PoolExhausted: no room for the forks.
        """
        self._settle()
        clone = object.__new__(type(self))
        memo[id(self)] = clone
        layers = [
            layer.copied(clone) if isinstance(layer, NoLayerAlone) else copy.deepcopy(layer, memo) for layer in self.layers
        ]
        clone._join(self._shared, layers)
        try:
            clone._model, clone._config, clone.keyword, clone.columns = self._model, self._config, self.keyword, self.columns
            for name in vars(self).keys() - vars(clone).keys():  # of a subclass, or set by the user
                setattr(clone, name, copy.deepcopy(vars(self)[name], memo))
            clone._batch.recorded = self._batch.recorded
            clone._batch.sequences = self._batch.forks(self._batch.sequences)
        except BaseException:
            clone.close()
            raise
        return clone

    @in_turn
    def close(self) -> None:
        """Give its memory back, and with the last of its copies leave the model. Idempotent.

        Raises:
            StateError: another thread uses the cache or a copy of it.
        """
        self._in_forward = False
        self._close()
        self._shared.sweep()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
