"""From the locations in a configuration to one tier store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from .. import registry
from ..errors import ConfigError, OasisError, PluginError
from .abc import TierStore
from .codecs import CODECS
from .coded import CodedStore
from .location import Location
from .segments import SegmentLayout
from .tiered import TieredStore


def store_at(
    locations: str | Sequence[str],
    layout: SegmentLayout,
    *,
    promote: bool = True,
    queue_bytes: int = 256 << 20,
    wrap: Callable[[TierStore, str], TierStore] = lambda store, _: store,
) -> TierStore:
    """One tier store, not open yet, for a location or for several of them, from fast to slow.

    Any location takes the option `codec`: `file:/var/cache/kv?limit=20GiB&codec=int8` keeps coded slots (`fp8`, `int8`,
    `int4`). `promote` and `queue_bytes` are those of `TieredStore`, and used where there are several. `wrap` is given each of
    the stores, and its name, and what it returns takes the place of the store.

    Raises:
        ConfigError: a location that is none, or has options that its store or no codec knows.
        PluginError: a name that no plug-in has, or a plug-in that is broken.
    """
    if isinstance(locations, str):
        locations = [locations]
    if not locations:
        raise ConfigError("there are no tiers; give at least one location, such as file:/var/cache/kv?limit=20GiB")
    parsed = [Location.parse(text) for text in locations]
    stores = [wrap(_one(location, layout), location.name) for location in parsed]
    return stores[0] if len(stores) == 1 else TieredStore(stores, promote=promote, queue_bytes=queue_bytes)


def _one(location: Location, layout: SegmentLayout) -> TierStore:
    name = location.option("codec")
    if not name:
        return _made(location, layout)
    if name not in CODECS:
        raise ConfigError(f"option codec of tier {location.text!r} is {name!r}; it must be one of {', '.join(CODECS)}")
    codec = CODECS[name]
    return CodedStore(_made(location, codec.coded(layout)), layout, codec)


def _made(location: Location, layout: SegmentLayout) -> TierStore:
    plugin = cast("type[TierStore]", registry.load(registry.TIER_STORES, location.name, TierStore))
    try:
        return plugin.at(location, layout)
    except OasisError:
        raise
    except Exception as error:
        raise PluginError(f"plug-in {location.name!r} makes no store of {location.text!r}: {error!r}") from error
