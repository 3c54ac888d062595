"""Ties a cache to its model: switches the attention implementation on, watches that the cache is really used, undoes both."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from oasiskv.errors import InputError

from . import attention

_bindings: weakref.WeakKeyDictionary[PreTrainedModel, Binding] = weakref.WeakKeyDictionary()


class Binding:
    """One per model, shared by all its caches."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self._users = 0
        self._original = ""
        self._hook: torch.utils.hooks.RemovableHandle | None = None

    @staticmethod
    def of(model: PreTrainedModel) -> Binding:
        """The binding of a model."""
        return _bindings.setdefault(model, Binding(model))

    def attach(self) -> None:
        """One more cache uses the model."""
        model = self._model()
        if model is not None and self._users == 0:
            self._original = model.config._attn_implementation
            model.set_attn_implementation(attention.NAME)
            self._hook = model.register_forward_pre_hook(_check_call, with_kwargs=True)
        self._users += 1

    def detach(self) -> None:
        """One cache less; after the last one the model is as it was."""
        self._users -= 1
        model = self._model()
        if model is None or self._users:
            return
        if self._hook is not None:
            self._hook.remove()
        if model.config._attn_implementation == attention.NAME:
            model.set_attn_implementation(self._original)


def cache_keyword(model: PreTrainedModel) -> str:
    """The name under which this model's forward takes a cache: `cache` from transformers 5.20 on, else `past_key_values`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _check_call(model: PreTrainedModel, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Refuse a forward that would ignore an `OasisCache` and run dense without a word, or that it cannot serve."""
    from .cache import OasisCache

    taken = cache_keyword(model)
    for name, value in keywords.items():
        if isinstance(value, OasisCache) and name not in (taken, "past_key_values"):
            raise InputError(
                f"the OasisCache was passed as {name}=, which {type(model).__name__} of transformers "
                f"{transformers.__version__} ignores; pass it as {taken}= (OasisCache.keyword tells)"
            )
        if isinstance(value, OasisCache):
            value.before_forward(model)
            for tokens in (*arguments[:1], keywords.get("input_ids"), keywords.get("inputs_embeds")):
                if isinstance(tokens, torch.Tensor) and tokens.shape[1] == 0:
                    raise InputError("the forward has no tokens; a prompt needs at least one")
