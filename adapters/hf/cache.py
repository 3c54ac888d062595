"""`OasisCache`: a transformers cache whose full-attention layers keep a bounded working set on the device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from oasiskv import KVManager, ModelShape, OasisConfig, Sequence, Stats, Step, Trace
from oasiskv.errors import InputError, StateError, UnsupportedModel

from .attention import OasisLength, marked
from .binding import Binding, cache_keyword
from .forward_checks import check_mode
from .projection import HFProjection, ResidualStream
from .shape import model_shape, stock_layers


class OasisLayer(CacheLayerMixin):
    """One full-attention layer of an `OasisCache`. It holds no tensors: the manager does."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, cache: OasisCache, index: int) -> None:
        super().__init__()
        self._cache = weakref.ref(cache)
        self.index = index
        self.record_past = False

    @property
    def cache(self) -> OasisCache:
        """The cache that the layer belongs to."""
        cache = self._cache()
        if cache is None:
            raise StateError("the OasisCache of this layer is gone; keep a reference to it while its model runs")
        return cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: memory is taken as the sequences need it."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ANN401 - the signature of transformers
        **kwargs: Any,  # noqa: ANN401 - the signature of transformers
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mark the new rows, `(batch, kv_heads, rows, head_dim)`, for the attention function, which stores them."""
        self.cache.check_rows(key_states)
        self.is_initialized = True
        return marked(key_states, self), value_states

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """See `oasis_attention`."""
        return self.cache.attend(self.index, query, key, value, mask, scale, softcap)

    def activate_past_recording(self) -> None:
        """From now on rows may be cropped after each forward: they are drafts until `crop` says how many were accepted."""
        self.record_past = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys, for the mask."""
        return OasisLength(self.get_seq_length() + query_length), 0

    def get_seq_length(self) -> int:
        """Columns of the batch so far, padding included."""
        return self.cache.columns

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def reset(self) -> None:
        """Part of `OasisCache.reset`."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Part of `OasisCache.reorder_cache`."""


class OasisCache(Cache):
    """Pass it to `generate` under the name `OasisCache.keyword`; it may be kept for several turns.

        cache = OasisCache.for_model(model, OasisConfig(budget_tokens=1024))
        model.generate(**inputs, **{cache.keyword: cache}, max_new_tokens=256)

    Full-attention layers are served by a `KVManager`; the sliding-window, linear and other layers of a hybrid model stay
    stock. While a cache is open its model runs with `attn_implementation="oasis"`, which treats every other cache as sdpa
    does; `close` (or the end of a `with` block) puts the model back. One cache serves one `generate` at a time.
    """

    def __init__(self, model: PreTrainedModel, config: OasisConfig | None = None, trace: Trace | None = None) -> None:
        layers, full = stock_layers(model)
        shape = model_shape(model, full)
        projection = HFProjection.of(model, full, shape)
        self.manager = KVManager(shape, config, projection=projection, trace=trace)
        for number, index in enumerate(full):
            layers[index] = OasisLayer(self, number)
        super().__init__(layers=layers)
        self.keyword = cache_keyword(model)
        self.columns = 0
        self._config = model.config
        self._sequences: list[Sequence] = []
        self._running: list[Sequence] = []
        self._select: torch.Tensor | None = None
        self._torn = False
        self._in_forward, self._begun = False, False
        self._early_hints: list[tuple[int, torch.Tensor]] = []
        self._served = 0
        self._model = weakref.ref(model)
        wanted = self.manager.rooms.predictor.uses_hints
        self._stream = ResidualStream(model, full, projection, self._show) if projection and wanted else None
        self._close = weakref.finalize(self, _close, self.manager, Binding.of(model), self._stream)
        Binding.of(model).attach()

    @classmethod
    def for_model(cls, model: PreTrainedModel, config: OasisConfig | None = None, trace: Trace | None = None) -> OasisCache:
        """A new cache for `model`, which shows its steps in a trace if there is one.

        Raises:
            UnsupportedModel: the model has no full-attention layers with keys and values per head.
            ConfigError: see `OasisConfig`.
        """
        return cls(model, config, trace)

    @property
    def shape(self) -> ModelShape:
        """Of the layers that the cache serves."""
        return self.manager.shape

    @property
    def recording(self) -> bool:
        """Whether rows are drafts until `crop`."""
        return any(isinstance(layer, OasisLayer) and layer.record_past for layer in self.layers)

    def stats(self) -> Stats:
        """Memory, traffic and hit rate of the full-attention layers."""
        return self.manager.stats()

    # A forward, layer by layer

    def before_forward(self, model: PreTrainedModel) -> None:
        """Called before every forward that gets this cache. Raises `InputError` for another model than the cache's own, or a
        mode of it in which a cache cannot work, and `StateError` if stock layers were left in the middle of a forward."""
        if self._model() is not model:
            raise InputError(
                f"the OasisCache was made for another {type(self._model()).__name__}; call OasisCache.for_model for each model"
            )
        check_mode(model, self.shape)
        self._finish_forward()
        self._in_forward, self._begun = True, False
        self._early_hints.clear()
        self._served = 0

    def after_forward(self, model: PreTrainedModel, completed: bool) -> None:
        """Called after every forward that got this cache. Raises `StateError` unless each full-attention layer was served."""
        self._in_forward = False
        if completed and self._served != self.shape.num_layers:
            raise StateError(
                f"{self._served} of {self.shape.num_layers} full-attention layers of {type(model).__name__} reached the "
                "OasisCache; the model changes the keys between cache and attention, and the output is not to be trusted"
            )

    def check_rows(self, keys: torch.Tensor) -> None:
        """Raise `InputError` for keys that are not of this cache's model, or of another batch."""
        if not self._in_forward:
            raise InputError(
                "the OasisCache is closed, or is used by a model that it was not made for, or by a part of its model; call the "
                "model that was passed to OasisCache.for_model"
            )
        shape, batch = self.shape, len(self._sequences)
        if keys.dtype != shape.dtype or keys.device.type != shape.device.type:
            raise InputError(
                f"the cache was made for {shape.dtype} on {shape.device}, and gets keys in {keys.dtype} on {keys.device}; "
                "make the cache after moving or converting the model"
            )
        if keys.shape[1] != shape.kv_heads or keys.shape[3] != shape.head_dim:
            raise InputError(
                f"the cache was made for {shape.kv_heads} kv heads of dimension {shape.head_dim}, and gets keys of shape "
                f"{tuple(keys.shape)}; make one cache per model"
            )
        if batch and keys.shape[0] != batch:
            raise InputError(
                f"the cache holds a batch of {batch}, and gets one of {keys.shape[0]}; reset() it, or keep the batch"
            )

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Store and attend the rows of one layer; `(batch, rows, query_heads, head_dim)`."""
        try:
            if layer == 0:
                self._begin(query.shape[0], query.shape[2], mask)
            step = self._step()
            self._check_projection(layer, query)
            output = step.attend(layer, self._pack(query), self._pack(key), self._pack(value), scale, softcap)
            self._served += 1
            if step.complete:
                self.columns += query.shape[2]
                if step.certain:
                    step.commit()
        except BaseException:
            self._abort()
            self._in_forward = False
            raise
        return self._unpack(output, query)

    def _check_projection(self, layer: int, query: torch.Tensor) -> None:
        """In the first forward, compare a projected query with the real one; go without hints if they differ."""
        if self._stream is None or self._stream.checked or self._select is not None:
            return
        position = self._running[-1].length + query.shape[2] - 1
        if not self._stream.check(layer, query[-1, :, -1], position, self.shape):
            self.manager.rooms.predictor.bind(None)
            self._stream.detach()
            self._stream = None

    def _show(self, target: int, hidden: torch.Tensor) -> None:
        """Hint at a layer with a residual stream `(batch, rows, hidden_size)`; before the step has begun it waits for it."""
        if not self._in_forward:  # the model runs with another cache
            return
        if self._begun:
            self._step().hint(target, self._pack(hidden[:, None])[:, 0])
        else:
            self._early_hints.append((target, hidden))

    def _begin(self, batch: int, rows: int, mask: torch.Tensor | None) -> None:
        self._finish_forward()
        if not self._sequences:
            self._sequences = [self.manager.create() for _ in range(batch)]
        counts = [rows] * batch
        self._select = None
        if mask is not None and not bool(mask.all()):
            counts = self._unpadded(mask, rows)
            if any(count < rows for count in counts):
                self._select = mask[:, -rows:].bool()
        running = [(sequence, count) for sequence, count in zip(self._sequences, counts, strict=True) if count]
        self._running = [sequence for sequence, _ in running]
        tokens = [count for _, count in running]
        drafts = [count - 1 for count in tokens] if self.recording and self.columns else None
        self.manager.begin_step(self._running, tokens, drafts)
        self._begun = True
        for target, hidden in self._early_hints:
            self._show(target, hidden)

    def _unpadded(self, mask: torch.Tensor, rows: int) -> list[int]:
        """Rows of each sequence in this forward that are no padding. Padding must come first."""
        mask = mask.bool()
        total = mask.sum(1)
        width = mask.shape[1]
        first = torch.where(total > 0, mask.int().argmax(1), width)
        if bool((first + total != width).any()):
            raise InputError("the attention mask has zeros behind ones; pad on the left (tokenizer.padding_side = 'left')")
        counts = total.clamp(max=rows).tolist()
        for sequence, number, seen in zip(self._sequences, counts, total.tolist(), strict=True):
            if seen != sequence.length + number:
                raise InputError(
                    f"the attention mask shows {seen} tokens of a sequence that has {sequence.length} in the cache and "
                    f"{number} new; pass the mask of the whole text, cached turns included"
                )
        if not any(counts):
            raise InputError("the forward holds padding only; a prompt needs at least one token")
        return [int(count) for count in counts]

    def _pack(self, rows: torch.Tensor) -> torch.Tensor:
        """`(batch, heads, rows, head_dim)` to `(num_rows, heads, head_dim)`, without padding."""
        flat = rows.transpose(1, 2)
        return flat.reshape(-1, *flat.shape[2:]) if self._select is None else flat[self._select]

    def _unpack(self, packed: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        batch, heads, rows, head_dim = query.shape
        if self._select is None:
            return packed.view(batch, rows, heads, head_dim)
        output = packed.new_zeros((batch, rows, heads, head_dim))
        output[self._select] = packed
        return output

    def _step(self) -> Step:
        step = self.manager.open_step
        if step is None:
            raise StateError("a layer of the model runs before its first full-attention layer began a step")
        return step

    def _abort(self) -> None:
        step = self.manager.open_step
        if step is not None:
            step.abort()
        self._torn = bool(self._stock)

    def _finish_forward(self) -> None:
        """Commit the step of a forward that came to its end; drop that of one that did not."""
        step = self.manager.open_step
        if step is not None and step.complete:
            step.commit()
        elif step is not None:
            self._abort()
        if self._torn:
            raise StateError(
                "a forward of this hybrid model ended in the middle, and its sliding layers cannot be rolled back; call reset()"
            )

    # What transformers does to caches

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of every sequence. After a forward with drafts this is what accepts the
        others, also with 0.

        Raises:
            InputError: for a positive number, or more tokens than there are.
        """
        if tokens_to_remove > 0:
            raise InputError(f"crop({tokens_to_remove}): pass a negative number, how many tokens to remove from the end")
        count = -tokens_to_remove
        if count > self.columns:
            raise InputError(f"crop({tokens_to_remove}): the cache holds {self.columns} tokens")
        step = self.manager.open_step
        left = count
        if step is not None and step.complete:
            if all(left < tokens for tokens in step.num_tokens):
                step.commit([tokens - left for tokens in step.num_tokens])
                left = 0
            else:
                step.commit()
        else:
            self._finish_forward()
        if left:
            shortest = min(sequence.length for sequence in self._sequences)
            if left > shortest:
                raise InputError(f"crop({tokens_to_remove}): a sequence of the batch holds {shortest} tokens without padding")
            for sequence in self._sequences:
                self.manager.crop(sequence, sequence.length - left)
        self.columns -= count
        for layer in self._stock:
            if hasattr(layer, "crop"):
                layer.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make sequence `i` continue sequence `beam_idx[i]`: beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences at `indices`, in that order and as often as listed."""
        self._finish_forward()
        order = torch.as_tensor(indices).tolist()
        for sequence in [s for number, s in enumerate(self._sequences) if number not in set(order)]:
            self.manager.free(sequence)
        taken: set[int] = set()
        result = []
        for number in order:
            parent = self._sequences[number]
            result.append(self.manager.fork(parent) if number in taken else parent)
            taken.add(number)
        self._sequences = result
        for layer in self._stock:
            layer.reorder_cache(torch.as_tensor(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times."""
        self.batch_select_indices(torch.arange(len(self._sequences)).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget all sequences; the cache is as new, also after an error."""
        step = self.manager.open_step
        if step is not None:
            step.abort()
        for sequence in self._sequences:
            self.manager.free(sequence)
        self._sequences, self._running = [], []
        self.columns = 0
        self._torn, self._in_forward = False, False
        for layer in self.layers:
            if isinstance(layer, OasisLayer):
                layer.record_past = False
        self._renew_stock_layers()

    def _renew_stock_layers(self) -> None:
        """Replace the stock layers: some versions of transformers only zero them at a reset, and keep their length."""
        fresh = DynamicCache(config=self._config.get_text_config(decoder=True)).layers
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, OasisLayer):
                self.layers[index] = fresh[index]

    @property
    def _stock(self) -> list[CacheLayerMixin]:
        return [layer for layer in self.layers if not isinstance(layer, OasisLayer)]

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the signature of transformers
        """Static caches and exported graphs fix their shapes in advance; a working set does not."""
        raise UnsupportedModel("an OasisCache cannot be compiled or exported with static shapes; generate without compiling")

    def close(self) -> None:
        """Give all memory back and put the model's attention implementation back. Idempotent."""
        self._in_forward = False
        self._close()

    def __enter__(self) -> OasisCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(manager: KVManager, binding: Binding, stream: ResidualStream | None) -> None:
    if stream is not None:
        stream.detach()
    binding.detach()
    manager.close()
