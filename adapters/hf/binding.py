"""Ties caches to their model: lets transformers call the adapter for them, and watches that they are really used.

Every forward that gets an `OasisCache` is checked twice: before it, that the cache goes where the model will find it, and after
it, that all full-attention layers were served. So a cache that a model would ignore or misread is an error, and never a
silently dense or wrong run. Hooks see by their arguments whether a call has one of our caches, and leave all others alone.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from oasiskv.errors import InputError

from . import interfaces
from .attention import uncompiled
from .forward_checks import check_tokens

_bindings: weakref.WeakKeyDictionary[PreTrainedModel, Binding] = weakref.WeakKeyDictionary()
_open: set[object] = set()
_lock = threading.RLock()
"""Of all bindings and of transformers' registries. Reentrant, since finalisers of caches run in any thread at any moment."""


class BoundCache(Cache):
    """A cache whose model has a `Binding`; it is called before and after each forward, and for each decoder layer.

    Attributes:
        columns: that it holds.
    """

    columns: int = 0

    def before_forward(self, model: PreTrainedModel) -> None:
        """A forward of `model` gets this cache."""

    def after_forward(self, model: PreTrainedModel, completed: bool) -> None:
        """It has ended."""

    def see(self, index: int, hidden: torch.Tensor) -> None:
        """`(batch, rows, hidden_size)` enters decoder layer `index`."""


class Binding:
    """One per model, shared by all its caches. Its users are tokens, one for each open cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self._users: set[object] = set()
        self._watchers: set[object] = set()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._layer_hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._eager: list[Any] = []

    @staticmethod
    def of(model: PreTrainedModel) -> Binding:
        """The binding of a model."""
        with _lock:
            if model not in _bindings:
                _bindings[model] = Binding(model)
            return _bindings[model]

    def attach(self, user: object, watch: bool = False) -> None:
        """One more cache uses the model, and wants to see what enters its decoder layers if `watch`."""
        with _lock:
            model = self._model()
            if model is not None:
                self._eager += interfaces.serve_model(model)
            _open.add(user)
            self._users.add(user)
            if watch:
                self._watchers.add(user)
            self._settle()

    def unwatch(self, user: object) -> None:
        """A cache does not want to see the decoder layers any more."""
        with _lock:
            self._watchers.discard(user)
            self._settle()

    def detach(self, user: object) -> None:
        """One cache less. After its last one the model is as it was; after the last of all models the registries are."""
        with _lock:
            self._users.discard(user)
            self._watchers.discard(user)
            self._settle()
            if not self._users:
                for config in self._eager:
                    if config._attn_implementation is interfaces.EAGER:
                        config._attn_implementation = "eager"
                self._eager.clear()
            _open.discard(user)
            if not _open:
                interfaces.restore()

    def check(self) -> None:
        """See to it that the implementation that the model has now is served, whatever was set or registered since."""
        model = self._model()
        if model is None:
            return
        name = model.config.get_text_config(decoder=True)._attn_implementation
        if name is interfaces.EAGER:
            return
        with _lock:
            if name == interfaces.EAGER:
                self._eager += interfaces.serve_model(model)
            else:
                interfaces.serve(name)

    def _settle(self) -> None:
        model = self._model()
        if model is None:
            return
        if self._users and not self._hooks:
            self._hooks = [
                model.register_forward_pre_hook(_Hook(_before), with_kwargs=True),
                model.register_forward_hook(_Hook(_after), with_kwargs=True, always_call=True),
            ]
        if self._watchers and not self._layer_hooks:
            self._layer_hooks = [
                layer.register_forward_pre_hook(_Hook(_seer(index)), with_kwargs=True)
                for index, layer in enumerate(decoder_layers(model) or [])
            ]
        for wanted, hooks in ((self._users, self._hooks), (self._watchers, self._layer_hooks)):
            while hooks and not wanted:
                hooks.pop().remove()


def cache_keyword(model: PreTrainedModel) -> str:
    """The name under which this model's forward takes a cache: `cache` from transformers 5.20 on, else `past_key_values`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """The list of decoder layers, if it is where transformers keeps it."""
    layers = getattr(model.get_decoder(), "layers", None)
    return layers if isinstance(layers, nn.ModuleList) else None


class _Hook:
    """A forward hook that does not go along when its model is copied or pickled. Dynamo traces it."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> None:  # noqa: ANN401 - as torch calls hooks
        self._function(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _no_hook, ()


def _nothing(*_: object) -> None:
    """What is left of a hook in a copy of its model."""


def _no_hook() -> Callable[..., None]:
    return _nothing


def _before(model: PreTrainedModel, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    for cache in (*arguments, *keywords.values()):
        if isinstance(cache, BoundCache):
            _check(model, cache, arguments, keywords)
            return


def _after(model: PreTrainedModel, arguments: tuple[Any, ...], keywords: dict[str, Any], output: object) -> None:
    """Called after errors as well, without an output."""
    for cache in (*arguments, *keywords.values()):
        if isinstance(cache, BoundCache):
            _end(model, cache, output is not None)
            return


def _seer(index: int) -> Callable[..., None]:
    def see(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        for cache in (*arguments, *keywords.values()):
            if isinstance(cache, BoundCache):
                _show(cache, index, arguments[0] if arguments else keywords["hidden_states"])
                return

    return see


@uncompiled
def _check(model: PreTrainedModel, cache: BoundCache, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Refuse a forward that would ignore the cache, or that it cannot serve."""
    taken = cache_keyword(model)
    for name, value in keywords.items():
        if isinstance(value, BoundCache) and name not in (taken, "past_key_values"):
            raise InputError(
                f"the OasisCache was passed as {name}=, which {type(model).__name__} of transformers "
                f"{transformers.__version__} ignores; pass it as {taken}= (OasisCache.keyword tells)"
            )
    check_tokens((*arguments[:1], keywords.get("input_ids"), keywords.get("inputs_embeds")), cache.columns)
    Binding.of(model).check()
    cache.before_forward(model)


@uncompiled
def _end(model: PreTrainedModel, cache: BoundCache, completed: bool) -> None:
    cache.after_forward(model, completed)


@uncompiled
def _show(cache: BoundCache, index: int, hidden: torch.Tensor) -> None:
    cache.see(index, hidden)
