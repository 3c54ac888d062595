"""Finds plug-ins by name through entry points: imported when asked for, and a broken one breaks its own name only."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TypeVar

from .errors import PluginError

PREDICTORS = "oasiskv.predictors"
KEY_SUMMARIES = "oasiskv.key_summaries"
TIER_STORES = "oasiskv.tier_stores"

T = TypeVar("T")


def names(group: str) -> list[str]:
    """Registered names of a group, sorted. Imports nothing."""
    return sorted({point.name for point in entry_points(group=group)})


def load(group: str, name: str, base: Callable[..., T]) -> Callable[..., T]:
    """The class registered as `name` in `group`, checked to be a `base`.

    Raises:
        PluginError: no such name, an import that fails, or a class of the wrong kind.
    """
    found = list(entry_points(group=group, name=name))
    if not found:
        known = ", ".join(names(group)) or "none; is oasiskv installed?"
        raise PluginError(f"no plug-in {name!r} in {group!r}; registered are: {known}")
    point = found[0]
    try:
        loaded = point.load()
    except Exception as error:
        raise PluginError(f"plug-in {name!r} of {group!r} ({point.value}) fails to import: {error}") from error
    if not (isinstance(loaded, type) and base in loaded.__mro__):
        kind = getattr(base, "__qualname__", base)
        raise PluginError(f"plug-in {name!r} of {group!r} ({point.value}) is not a subclass of {kind}")
    plugin: Callable[..., T] = loaded
    return plugin
