"""Puts the adapter's functions in front of those that transformers has for a name, in its two registries.

A model's `attn_implementation` stays what it is. While a cache is open, the entries of the names in use are functions that look
for the marks of our caches, and pass every other call on to the function that was there before. Only `"eager"` has no entry:
each modeling file has an eager function of its own. A model that runs eager gets `EAGER` as its implementation, a name that
equals `"eager"` but has entries.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from oasiskv.errors import UnsupportedModel

from .attention import is_marked, is_of_cache, oasis_attention

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


class _Eager(str):
    """`"eager"` for comparisons, and a key of its own in dictionaries; copies are the plain word."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(_Eager)

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return str(self)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


EAGER = _Eager("eager")
"""The implementation of models that run eager while a cache is open."""

_eager_functions: dict[type[nn.Module], Attention] = {}
"""The eager function of each attention module that runs under `EAGER`."""


def attention_before(stock: Attention) -> Attention:
    """An attention function that serves our caches, and passes all other calls on to `stock`."""

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        *arguments: Any,  # noqa: ANN401 - whatever the model passes on
        **keywords: Any,  # noqa: ANN401 - whatever the model passes on
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if is_marked(key):
            if stock is sdpa_attention_forward:
                keywords.pop("softcap", None)  # sdpa has no soft cap, in stock models neither
            return oasis_attention(module, query, key, *arguments, **keywords)
        return stock(module, query, key, *arguments, **keywords)

    return attention


def mask_before(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A mask function that hands the 2-d padding mask through to our layers, which mask by position.

    A model may make masks that none of its layers uses, so a pattern of its own is refused where it is used: as a 4-d mask.
    """

    def mask(**keywords: Any) -> Any:  # noqa: ANN401 - whatever transformers passes on, and masks of any kind
        return keywords.get("attention_mask") if is_of_cache(keywords) else stock(**keywords)

    return mask


class _Registry:
    """The entries of one registry: of its class, and of the instance that modeling files share, which may override them."""

    def __init__(self, shared: Any, before: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:  # noqa: ANN401 - untyped in transformers
        self._shared = shared
        self._before = before
        self._ours: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._stock: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._names: set[str] = set()

    def serve(self, name: str) -> None:
        """Put our function in front of the one that `name` has, if it has one."""
        self._names.add(name)
        self._replace(name, lambda function: function if function in self._stock else self._in_front_of(function))

    def restore(self) -> None:
        """Undo all of it; what others have registered since stays."""
        while self._names:
            self._replace(self._names.pop(), lambda function: self._stock.get(function, function))

    def _replace(self, name: str, other: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        general = type(self._shared)()
        if name in general and other(general[name]) is not general[name]:
            self._shared.register(name, other(general[name]))
        if name in self._shared and other(self._shared[name]) is not self._shared[name]:
            self._shared[name] = other(self._shared[name])

    def _in_front_of(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Always the same function for the same one: compiled code is guarded by its identity."""
        if stock not in self._ours:
            self._ours[stock] = self._before(stock)
            self._stock[self._ours[stock]] = stock
        return self._ours[stock]


_registries = (
    _Registry(ALL_ATTENTION_FUNCTIONS, attention_before),
    _Registry(ALL_MASK_ATTENTION_FUNCTIONS, mask_before),
)


def serve(name: str) -> None:
    """Put our functions in front of those of an attention implementation."""
    for registry in _registries:
        registry.serve(name)


def restore() -> None:
    """Take our functions out of the registries."""
    for registry in _registries:
        registry.restore()


def serve_model(model: PreTrainedModel) -> list[Any]:
    """Serve the implementations of a model's decoder; returns the configurations that got `EAGER`.

    Raises:
        UnsupportedModel: it runs eager, and a module's eager function cannot be told.
    """
    text = model.config.get_text_config(decoder=True)
    eager = {id(text): text} if _is_plain_eager(text) else {}
    functions: dict[type[nn.Module], Attention] = {}
    names = {text._attn_implementation}
    for module in model.get_decoder().modules():
        config = getattr(module, "config", None)
        names.add(getattr(config, "_attn_implementation", None))
        if _is_plain_eager(config) and _calls_interface(module):
            function = _eager_function(module)
            if function is not None:
                functions[type(module)] = function
                eager[id(config)] = config
            elif config is text:
                raise UnsupportedModel(
                    f"{type(module).__name__} runs with attn_implementation='eager' and has no eager_attention_forward to go "
                    "back to; call model.set_attn_implementation('sdpa')"
                )
    _eager_functions.update(functions)
    for config in eager.values():
        config._attn_implementation = EAGER
    for name in names - {None, "eager"}:
        serve(name)
    return list(eager.values())


def _calls_interface(module: nn.Module) -> bool:
    return "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(type(module).forward).__code__.co_names


def _eager_function(module: nn.Module) -> Attention | None:
    """What the module falls back to: by the convention of transformers, `eager_attention_forward` of its file."""
    function = inspect.unwrap(type(module).forward)
    name = "eager_attention_forward"
    return function.__globals__.get(name) if name in function.__code__.co_names else None


def _is_plain_eager(config: Any) -> bool:  # noqa: ANN401 - every model type has its own config class
    return getattr(config, "_attn_implementation", None) == "eager" and config._attn_implementation is not EAGER


def _eager_attention(
    module: nn.Module,
    *arguments: Any,  # noqa: ANN401 - whatever the model passes on
    **keywords: Any,  # noqa: ANN401 - whatever the model passes on
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return _eager_functions[type(module)](module, *arguments, **keywords)


def _eager_mask(**keywords: Any) -> Any:  # noqa: ANN401 - whatever transformers passes on, and masks of any kind
    return ALL_MASK_ATTENTION_FUNCTIONS["eager"](**keywords)


AttentionInterface.register(EAGER, attention_before(_eager_attention))
AttentionMaskInterface.register(EAGER, mask_before(_eager_mask))
