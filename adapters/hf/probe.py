"""Whether a model's full-attention layers do what a cache relies on, seen in forwards of a few tokens before there is a cache.

A model says too little in its config: layers may read each other's keys, change them between cache and attention, bias their
logits, or ignore transformers' attention interface. The forwards show it. They allocate nothing, and leave the model as it was.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from oasiskv.errors import UnsupportedModel
from oasiskv.types import Rotary, turn

from .attention import OasisLength, marked
from .binding import Binding, cache_keyword

_ROWS = 3
"""Tokens of the forward. The first is padding, so that the padding mask is seen on its way; the others are alike."""
_ROTATION_TOLERANCE = 0.05
"""How far a key may be from what the rotary angles say, as a share of its length: bfloat16 has errors of 0.01."""


@dataclass(frozen=True)
class Attention:
    """What the full-attention layers of a model have in common.

    Attributes:
        query_heads, kv_heads, head_dim: of every layer.
        dtype: of queries, keys and values.
        turned: whether the keys of most layers are turned by the rotary angles that were asked about.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    turned: bool = True


_seen: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[torch.dtype, torch.device], Attention | None]]
_seen = weakref.WeakKeyDictionary()
"""Models that have been probed: a server may make a cache per request, and the answer stays the same."""


def probe(model: PreTrainedModel, device: torch.device, full: list[int], rotary: Rotary | None) -> Attention | None:
    """The attention of a model whose full-attention layers can be served; `None` if it does not run on tokens alone.

    Args:
        device: where the model is.
        full: see `stock_layers`.
        rotary: the angles that the model may turn its keys by.

    Raises:
        UnsupportedModel: what about the layers cannot be served.
    """
    answers = _seen.setdefault(model, {})
    key = model.dtype, device
    if key not in answers:
        answers[key] = _Probe(model, device, full, rotary).run()
    return answers[key]


class _Probe:
    def __init__(self, model: PreTrainedModel, device: torch.device, full: list[int], rotary: Rotary | None) -> None:
        self.name, self._model, self._device, self._full, self._rotary = type(model).__name__, model, device, full, rotary
        self._found: dict[int, Attention] = {}
        self._order: list[int] = []
        self._cache = self._stock()
        self._num_layers = len(self._cache.layers)
        for index in full:
            self._cache.layers[index] = _ProbeLayer(self, index)

    def run(self) -> Attention | None:
        try:
            self._forward(self._cache, self._all_served)
        except (UnsupportedModel, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self._fails_with_stock_layers():
                return None  # it wants more than tokens: its first real forward is checked as well
            reason = f"{type(error).__name__}: {(str(error).strip() or 'without a message').splitlines()[0]}"
            raise UnsupportedModel(
                f"{self.name} cannot run with a cache that keeps keys and values elsewhere: {reason}"
            ) from error
        kinds = [replace(found, turned=True) for found in self._found.values()]
        for index, kind in zip(self._found, kinds, strict=True):
            if kind != kinds[0]:
                raise UnsupportedModel(
                    f"{self.name} has full-attention layers that differ: layer {self._full[0]} has {_heads(kinds[0])}, and "
                    f"layer {index} {_heads(kind)}; all must be alike"
                )
        turned = sum(found.turned for found in self._found.values())
        return replace(kinds[0], turned=2 * turned > len(kinds))

    def _all_served(self) -> None:
        if len(self._cache.layers) != self._num_layers:
            raise UnsupportedModel(
                f"{self.name} changes its cache while it runs: from {self._num_layers} layers to {len(self._cache.layers)}"
            )
        missing = [index for index in self._full if index not in self._order]
        if missing:
            raise UnsupportedModel(
                f"{self.name} does not hand the keys of layers {missing} from the cache to transformers' attention interface "
                "as they are; it attends, or changes them, by itself"
            )

    def see(self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: torch.Tensor | None) -> None:
        """Check one layer's call of attention; all tensors are `(batch, heads, rows, head_dim)`."""
        if index in self._order:
            raise UnsupportedModel(
                f"{self.name} has layers that share keys and values: those of layer {index} are attended to more than once"
            )
        if self._order and index < self._order[-1]:
            raise UnsupportedModel(f"{self.name} runs layer {index} after layer {self._order[-1]}, not in order")
        self._order.append(index)
        if given is None or value.data_ptr() != given.data_ptr() or value.shape != given.shape:
            raise UnsupportedModel(f"{self.name} changes the values of layer {index} between cache and attention")
        if value.shape != key.shape or query.shape[3] != key.shape[3] or query.shape[1] % key.shape[1]:
            raise UnsupportedModel(
                f"{self.name} makes queries, keys and values of shapes {tuple(query.shape)}, {tuple(key.shape)} and "
                f"{tuple(value.shape)} in layer {index} (batch, heads, rows, head_dim); all must have one head_dim, keys and "
                "values the same heads, and queries a multiple of them"
            )
        if not query.dtype == key.dtype == value.dtype:
            raise UnsupportedModel(
                f"{self.name} makes queries, keys and values in {query.dtype}, {key.dtype} and {value.dtype} in layer {index}; "
                "they must be of one dtype: convert the model with model.to(dtype), and use no autocast"
            )
        if key.shape[2] == _ROWS:
            turned = self._turns(key, value)
            self._found[index] = Attention(query.shape[1], key.shape[1], key.shape[3], key.dtype, turned)

    def _turns(self, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether the keys of the two tokens that are alike differ by the angles of one position. Where something before the
        layer has told the tokens apart, their values differ as well, and nothing can be said."""
        rotary = self._rotary
        first, second = key[0, :, -2].float(), key[0, :, -1].float()
        if rotary is None or not torch.allclose(value[0, :, -2], value[0, :, -1], rtol=1e-2, atol=1e-5):
            return True
        angles = torch.tensor(rotary.angles, device=key.device)
        if 2 * len(angles) > first.shape[-1]:
            return False
        return bool((turn(first, angles.cos(), angles.sin()) - second).norm() <= _ROTATION_TOLERANCE * second.norm())

    def _stock(self) -> DynamicCache:
        return DynamicCache(config=self._model.config.get_text_config(decoder=True))

    def _fails_with_stock_layers(self) -> bool:
        try:
            self._forward(self._stock(), lambda: None)
        except Exception:  # noqa: BLE001 - whatever it is, it has nothing to do with a cache of ours
            return True
        return False

    def _forward(self, cache: Cache, check: Callable[[], None]) -> None:
        """A prompt of `_ROWS` tokens and one more, all alike; `check` after each."""
        model = self._model
        token = int(model.config.get_text_config(decoder=True).vocab_size) // 3
        binding, user = Binding.of(model), object()
        with torch.no_grad(), _rng_kept(self._device), _attributes_kept(model), _uncompiled():
            binding.attach(user)
            try:
                model.eval()  # dropout, and layers that are checkpointed, come into it in training only
                for rows, columns in ((_ROWS, _ROWS), (1, _ROWS + 1)):
                    self._order = []
                    ids = torch.full((1, rows), token, device=self._device)
                    mask = torch.tensor([[0] + [1] * (columns - 1)], device=self._device)
                    model(input_ids=ids, attention_mask=mask, **{cache_keyword(model): cache}, use_cache=True)
                    check()
            finally:
                binding.detach(user)


class _ProbeLayer(CacheLayerMixin):
    """A full-attention layer that keeps nothing of the past but its length, and tells the probe what it sees."""

    is_compileable = False
    is_sliding = False

    def __init__(self, probe: _Probe, index: int) -> None:
        super().__init__()
        self._probe = weakref.proxy(probe)
        self._index = index
        self._values: torch.Tensor | None = None
        self._columns = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheLayerMixin:
        raise UnsupportedModel(
            f"{self._probe.name} runs some layers several times and copies layers of its cache for that, which a working set "
            "cannot follow"
        )

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to allocate."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ANN401 - the signature of transformers
        **kwargs: Any,  # noqa: ANN401 - the signature of transformers
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mark the rows for the attention function."""
        self._values = value_states
        self._columns += key_states.shape[2]
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
        """What attention over tokens that are alike gives: their values."""
        self._probe.see(self._index, query, key, value, self._values)
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys."""
        return OasisLength(self._columns + query_length), 0

    def get_seq_length(self) -> int:
        """Columns of all forwards."""
        return self._columns

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


@contextmanager
def _attributes_kept(model: PreTrainedModel) -> Iterator[None]:
    """Put back what a forward sets on modules: some remember offsets of positions there, or angles."""
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            module._buffers.clear()
            module._buffers.update(buffers)
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)


def _heads(attention: Attention) -> str:
    a = attention
    return f"{a.query_heads} query heads and {a.kv_heads} kv heads of dimension {a.head_dim} in {a.dtype}"


def _rng_kept(device: torch.device) -> AbstractContextManager[None]:
    """Random numbers that the forward draws, as some experts' routers do, are drawn again."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _uncompiled() -> AbstractContextManager[Any]:
    """A compiled model runs as it is written. Only an imported dynamo can have compiled it; to import one takes seconds."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
