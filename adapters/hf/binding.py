"""Ties a cache to its model: switches the attention implementation on, watches that the cache is really used, undoes both.

Every forward of a bound model is checked twice: before it, that the cache goes where the model will find it, and after it, that
all full-attention layers were served. So a cache that a model would ignore or misread is an error, and never a silently dense
or wrong run.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import PreTrainedModel

from oasiskv.errors import InputError, StateError

from . import attention
from .forward_checks import check_tokens

if TYPE_CHECKING:
    from .cache import OasisCache

_bindings: weakref.WeakKeyDictionary[PreTrainedModel, Binding] = weakref.WeakKeyDictionary()


class Binding:
    """One per model, shared by all its caches."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self._users = 0
        self._original = ""
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    @staticmethod
    def of(model: PreTrainedModel) -> Binding:
        """The binding of a model."""
        if model not in _bindings:
            _bindings[model] = Binding(model)
        return _bindings[model]

    def attach(self) -> None:
        """One more cache uses the model."""
        model = self._model()
        if model is not None and self._users == 0:
            self._original = model.config._attn_implementation
            model.set_attn_implementation(attention.NAME)
            self._hooks = [
                model.register_forward_pre_hook(_before, with_kwargs=True),
                model.register_forward_hook(_after, with_kwargs=True, always_call=True),
            ]
        self._users += 1

    def detach(self) -> None:
        """One cache less; after the last one the model is as it was."""
        self._users -= 1
        model = self._model()
        if model is None or self._users:
            return
        for hook in self._hooks:
            hook.remove()
        if model.config._attn_implementation == attention.NAME:
            model.set_attn_implementation(self._original)


def cache_keyword(model: PreTrainedModel) -> str:
    """The name under which this model's forward takes a cache: `cache` from transformers 5.20 on, else `past_key_values`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _caches(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Iterator[tuple[str, OasisCache]]:
    """Every `OasisCache` among the arguments, with its name; positional ones have their place as a name."""
    from .cache import OasisCache

    named = [*((str(place), value) for place, value in enumerate(arguments)), *keywords.items()]
    return ((name, value) for name, value in named if isinstance(value, OasisCache))


def _before(model: PreTrainedModel, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Refuse a forward that would ignore the cache, or that it cannot serve."""
    taken = cache_keyword(model)
    for name, cache in _caches(arguments, keywords):
        if not name.isdigit() and name not in (taken, "past_key_values"):
            raise InputError(
                f"the OasisCache was passed as {name}=, which {type(model).__name__} of transformers "
                f"{transformers.__version__} ignores; pass it as {taken}= (OasisCache.keyword tells)"
            )
        implementation = model.config.get_text_config(decoder=True)._attn_implementation
        if implementation != attention.NAME:
            raise StateError(
                f"{type(model).__name__} runs with attn_implementation={implementation!r}, which cannot use an OasisCache; "
                f"leave it at {attention.NAME!r} while the cache is open"
            )
        check_tokens((*arguments[:1], keywords.get("input_ids"), keywords.get("inputs_embeds")), cache.columns)
        cache.before_forward(model)


def _after(model: PreTrainedModel, arguments: tuple[Any, ...], keywords: dict[str, Any], output: object) -> None:
    """Refuse the output of a forward in which some full-attention layer did not reach the cache. Called after errors as well,
    without an output."""
    for _, cache in _caches(arguments, keywords):
        cache.after_forward(model, output is not None)
