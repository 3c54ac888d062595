"""`OasisCache`: a transformers cache whose full-attention layers keep a bounded working set on the device."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from oasiskv import KVManager, ModelShape, OasisConfig, Stats, Step, Trace
from oasiskv.errors import InputError, StateError

from .attention import OasisLength, marked, uncompiled
from .binding import Binding, cache_keyword
from .changes import ChangingCache
from .forward import Forward
from .forward_checks import check_mode
from .gradients import attend_without_gradient, wants_gradient
from .projection import HFProjection, ResidualStream
from .refusals import NoLayerAlone
from .shape import model_shape, stock_layers
from .shared import Shared


class OasisLayer(NoLayerAlone):
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

    @uncompiled
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
        cache = self.cache
        attend = partial(cache.attend, self.index, query, key, value, mask, scale, softcap)
        return attend_without_gradient(attend, (query, key, value), cache.history_recorded(key, value))

    def activate_past_recording(self) -> None:
        """From now on rows may be cropped after each forward: they are drafts until `crop` says how many were accepted."""
        self.record_past = True

    @uncompiled
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys, for the mask."""
        return OasisLength(self.get_seq_length() + query_length), 0

    @uncompiled
    def get_seq_length(self) -> int:
        """Columns of the batch so far, padding included."""
        return self.cache.columns

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def copied(self, cache: OasisCache) -> OasisLayer:
        """The same layer of a copy of the cache."""
        layer = OasisLayer(cache, self.index)
        layer.record_past, layer.is_initialized = self.record_past, self.is_initialized
        return layer


class OasisCache(ChangingCache):
    """Pass it to `generate` under the name `OasisCache.keyword`; it may be kept for several turns.

        cache = OasisCache.for_model(model, OasisConfig(budget_tokens=1024))
        model.generate(**inputs, **{cache.keyword: cache}, max_new_tokens=256)

    Full-attention layers are served by a `KVManager`; the sliding-window, linear and other layers of a hybrid model stay
    stock. Any number of threads may run the model at once, with caches of their own or with stock ones; an `OasisCache` and its
    copies are used by one thread at a time. `close` (or the end of a `with` block) gives the memory back.
    """

    def __init__(self, model: PreTrainedModel, config: OasisConfig | None = None, trace: Trace | None = None) -> None:
        layers, full = stock_layers(model)
        shape = model_shape(model, full)
        projection = HFProjection.of(model, full, shape)
        manager = KVManager(shape, config, projection=projection, trace=trace)
        shared = Shared(manager, Binding.of(model))
        for number, index in enumerate(full):
            layers[index] = OasisLayer(self, number)
        self.keyword = cache_keyword(model)
        self._config = model.config
        self._model = weakref.ref(model)
        self._join(shared, layers)
        if projection and manager.rooms.predictor.uses_hints:
            shared.stream = ResidualStream(full, projection)
        shared.attach()

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
        """Memory, traffic and hit rate of the full-attention layers, copies of the cache included."""
        return self.manager.stats()

    # A forward, layer by layer

    @property
    def _forward(self) -> Forward | None:
        """The forward that this thread runs with this cache."""
        return self._turn.forward(id(self))

    def before_forward(self, model: PreTrainedModel) -> None:
        """Called before every forward that gets this cache.

        Raises:
            InputError: for another model than the cache's own, or a mode of it in which a cache cannot work.
            StateError: another thread uses the cache or a copy of it, or stock layers were left in the middle of a forward.
        """
        if self._model() is not model:
            raise InputError(
                f"the OasisCache was made for another {type(self._model()).__name__}; call OasisCache.for_model for each model"
            )
        check_mode(model, self.shape)
        self._turn.begin(Forward(id(self)))
        try:
            self._settle()
        except BaseException:
            self._turn.end()
            raise
        self._in_forward = True
        if self._shared.stream is not None:
            self._shared.stream.forget()

    def after_forward(self, model: PreTrainedModel, completed: bool) -> None:
        """Called after every forward that got this cache. Raises `StateError` unless each full-attention layer was served."""
        forward = self._forward
        served = forward.served if forward else 0
        if forward is not None:
            self._turn.end()
            if self._in_forward and not completed:
                self._batch.cut_short()
            self._in_forward = False
        if completed and served != self.shape.num_layers:
            raise StateError(
                f"{served} of {self.shape.num_layers} full-attention layers of {type(model).__name__} reached the "
                "OasisCache; the model changes the keys between cache and attention, and the output is not to be trusted"
            )

    def check_rows(self, keys: torch.Tensor) -> None:
        """Raise `InputError` for keys that are not of this cache's model, or of another batch."""
        if self._forward is None:
            raise InputError(
                "the OasisCache is closed, or is used by a model that it was not made for, or by a part of its model; call the "
                "model that was passed to OasisCache.for_model"
            )
        shape, batch = self.shape, len(self._batch.sequences)
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
        forward = self._forward
        if forward is None:
            raise StateError("the forward of this OasisCache was ended by a call of it, or of a copy, in the middle")
        try:
            if layer == 0:
                self._begin(forward, query.shape[0], query.shape[2], mask)
            step = self._step()
            self._check_projection(forward, layer, query)
            queries, keys, values = (_pack(rows, forward.select) for rows in (query, key, value))
            output = step.attend(layer, queries, keys, values, scale, softcap)
            forward.served += 1
            if step.complete:
                self.columns += query.shape[2]
                if step.certain:
                    step.commit()
        except BaseException:
            self._shared.abort_step(self._batch)
            self._turn.end()
            self._in_forward = False
            raise
        return _unpack(output, query, forward.select)

    def _check_projection(self, forward: Forward, layer: int, query: torch.Tensor) -> None:
        """In the first forward, compare a projected query with the real one; go without hints if they differ."""
        stream = self._shared.stream
        if stream is None or stream.checked or forward.select is not None:
            return
        position = forward.running[-1].length + query.shape[2] - 1
        if not stream.check(layer, query[-1, :, -1], position, self.shape):
            self.manager.rooms.predictor.bind(None)
            self._shared.drop_stream()

    def see(self, index: int, hidden: torch.Tensor) -> None:
        """`(batch, rows, hidden_size)` enters decoder layer `index`."""
        if self._shared.stream is not None and self._forward is not None:
            self._shared.stream.see(index, hidden, self._show)

    def _show(self, target: int, hidden: torch.Tensor) -> None:
        """Hint at a layer with a residual stream `(batch, rows, hidden_size)`; before the step has begun it waits for it."""
        forward = self._forward
        if forward is None:
            return
        if forward.begun:
            self._step().hint(target, _pack(hidden[:, None], forward.select)[:, 0])
        else:
            forward.early_hints.append((target, hidden))

    def _begin(self, forward: Forward, batch: int, rows: int, mask: torch.Tensor | None) -> None:
        self._shared.finish_step()
        self._batch.check_whole()
        counts = [rows] * batch
        if mask is not None:
            mask = self._whole(mask, batch, rows)
            lengths = [sequence.length for sequence in self._batch.sequences] or [0] * batch
            if any(length < self.columns for length in lengths) or not bool(mask.all()):
                counts = self._unpadded(mask, lengths, rows)
            if any(count < rows for count in counts):
                forward.select = mask[:, -rows:]
        if not self._batch.sequences:
            self._batch.create(batch)
        running = [(sequence, count) for sequence, count in zip(self._batch.sequences, counts, strict=True) if count]
        forward.running = [sequence for sequence, _ in running]
        tokens = [count for _, count in running]
        drafts = [count - 1 for count in tokens] if self.recording and self.columns else None
        self._shared.begin_step(self._batch, forward.running, tokens, drafts)
        forward.begun = True
        for target, hidden in forward.early_hints:
            self._show(target, hidden)

    def _whole(self, mask: torch.Tensor, batch: int, rows: int) -> torch.Tensor:
        """The part of a mask that is about the cached and the new columns, as booleans."""
        columns = self.columns + rows
        if mask.shape[0] != batch or mask.shape[1] < columns:
            raise InputError(
                f"the attention mask has shape {tuple(mask.shape)}, and the forward needs ({batch}, {columns}): {self.columns} "
                f"cached columns and {rows} new ones; pass the mask of the whole text, cached turns included"
            )
        return mask[:, :columns].bool()

    def _unpadded(self, mask: torch.Tensor, lengths: list[int], rows: int) -> list[int]:
        """Rows of each sequence in this forward that are no padding. Padding must come first."""
        total = mask.sum(1)
        width = mask.shape[1]
        first = torch.where(total > 0, mask.int().argmax(1), width)
        if bool((first + total != width).any()):
            raise InputError("the attention mask has zeros behind ones; pad on the left (tokenizer.padding_side = 'left')")
        counts = total.clamp(max=rows).tolist()
        for length, number, seen in zip(lengths, counts, total.tolist(), strict=True):
            if seen != length + number:
                raise InputError(
                    f"the attention mask shows {seen} tokens of a sequence that has {length} in the cache and {number} new; "
                    "pass the mask of the whole text, cached turns included"
                )
        if not any(counts):
            raise InputError("the forward holds padding only; a prompt needs at least one token")
        return [int(count) for count in counts]

    def _step(self) -> Step:
        step = self._shared.step_of(self._batch)
        if step is None:
            raise StateError(
                "a layer of the model runs before its first full-attention layer began a step, or after a copy of the cache ran"
            )
        return step

    def history_recorded(self, *rows: torch.Tensor) -> bool:
        """Whether autograd recorded rows that the cache holds; from now on, too, if it records these."""
        recorded = self._batch.recorded and self.columns > 0
        self._batch.recorded = recorded or wants_gradient(*rows)
        return recorded


def _pack(rows: torch.Tensor, select: torch.Tensor | None) -> torch.Tensor:
    """`(batch, heads, rows, head_dim)` to `(num_rows, heads, head_dim)`, without padding."""
    flat = rows.transpose(1, 2)
    return flat.reshape(-1, *flat.shape[2:]) if select is None else flat[select]


def _unpack(packed: torch.Tensor, query: torch.Tensor, select: torch.Tensor | None) -> torch.Tensor:
    batch, heads, rows, head_dim = query.shape
    if select is None:
        return packed.view(batch, rows, heads, head_dim)
    output = packed.new_zeros((batch, rows, heads, head_dim))
    output[select] = packed
    return output
