"""Finds the decoder layer around an attention layer. vLLM tells an attention backend nothing of it, but torch tells who takes
in which module while a model is built."""

from __future__ import annotations

import weakref

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

_parents: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
_watch: RemovableHandle | None = None


def watch_modules() -> None:
    """Remember from now on which module takes in which."""
    global _watch
    if _watch is None:
        _watch = register_module_module_registration_hook(_remember)


def forget_modules() -> None:
    """Stop that, and forget what was remembered."""
    global _watch
    if _watch is not None:
        _watch.remove()
    _watch = None
    _parents.clear()


def _remember(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if child is not None:
        _parents[child] = weakref.ref(parent)


def parent_of(module: nn.Module) -> nn.Module | None:
    """The module that took this one in last, if it was watched and is alive."""
    found = _parents.get(module)
    return found() if found is not None else None


def decoder_layers_around(attention: nn.Module) -> tuple[nn.ModuleList, int] | None:
    """The model's decoder layers, and which one holds an attention layer; `None` if the model is built differently."""
    holder = parent_of(attention)
    layer = parent_of(holder) if holder is not None else None
    layers = parent_of(layer) if layer is not None else None
    if not isinstance(layers, nn.ModuleList) or layer is None:
        return None
    return layers, list(layers).index(layer)
