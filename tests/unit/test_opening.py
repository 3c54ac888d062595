from importlib.metadata import EntryPoint

import anyio
import pytest

from oasiskv import registry
from oasiskv.errors import ConfigError, PluginError
from oasiskv.tiers import SegmentLayout
from oasiskv.tiers.coded import CodedStore
from oasiskv.tiers.memory import MemoryStore
from oasiskv.tiers.opening import store_at
from oasiskv.tiers.tiered import TieredStore

from .moody import LAYOUT, key

TALL = SegmentLayout(2, 2, 16, 64)


class Clumsy(MemoryStore):
    @classmethod
    def at(cls, location, layout):
        return cls(layout, int(location.path))


POINTS = (
    EntryPoint("memory", "oasiskv.tiers.memory:MemoryStore", registry.TIER_STORES),
    EntryPoint("file", "oasiskv.tiers.file:FileStore", registry.TIER_STORES),
    EntryPoint("clumsy", f"{__name__}:Clumsy", registry.TIER_STORES),
    EntryPoint("broken", "no_such_module_at_all:Store", registry.TIER_STORES),
)


@pytest.fixture(autouse=True)
def _points(monkeypatch):
    def find(group, name=None):
        return [point for point in POINTS if point.group == group and name in (None, point.name)]

    monkeypatch.setattr(registry, "entry_points", find)


def test_one_location_is_its_store():
    store = store_at("memory:?limit=4KiB", LAYOUT)
    assert type(store) is MemoryStore
    assert (store.layout, store.limit_bytes) == (LAYOUT, 4096)


def test_several_are_tiers_from_fast_to_slow():
    store = store_at(["memory:?limit=4KiB", "memory:?limit=1MiB"], LAYOUT)
    assert type(store) is TieredStore
    assert store.limit_bytes == 4096 + (1 << 20)


@pytest.mark.parametrize(("codec", "share"), [("fp8", 0.5625), ("int8", 0.5625), ("int4", 0.375)])
def test_a_codec_wraps_the_store_of_its_location(codec, share):
    store = store_at(f"memory:?codec={codec}&limit=1MiB", TALL)
    assert type(store) is CodedStore
    assert store.layout == TALL
    assert store._inner.layout.slot_bytes == share * TALL.slot_bytes
    assert store.limit_bytes == 1 << 20


@pytest.mark.anyio
async def test_tiers_of_different_codecs_work_together():
    data = memoryview(bytes(TALL.segment_bytes))
    async with store_at(["memory:", "memory:?codec=int4"], TALL) as store:
        await store.store([(key(1), data)])
        await store.flush()
        assert store.used_bytes == 1.375 * TALL.segment_bytes


@pytest.mark.parametrize(
    ("locations", "match"),
    [
        ([], "there are no tiers"),
        ("/var/cache/kv", "is no location"),
        ("memory:?codec=int5", "must be one of fp8, int8, int4"),
        ("memory:?size=4", "no option 'size'; its options are: codec, limit"),
        (["memory:", "memory:?limit=none"], "must be a size"),
    ],
)
def test_what_is_wrong_with_a_configuration_is_said(locations, match):
    with pytest.raises(ConfigError, match=match):
        store_at(locations, LAYOUT)


def test_a_broken_plugin_breaks_its_own_name_only():
    for text, match in (("broken:", "fails to import"), ("nothing:", "no plug-in 'nothing'"), ("clumsy:x", "invalid literal")):
        with pytest.raises(PluginError, match=match):
            store_at(["memory:", text], LAYOUT)
    assert store_at("memory:", LAYOUT).layout == LAYOUT


@pytest.mark.parametrize("codec", ["", "int8"])
def test_a_limit_has_room_for_a_segment(tmp_path, codec):
    """At the least limit that is named, a segment is kept."""
    for name in ("memory:", f"file:{tmp_path}/{codec}"):
        with pytest.raises(
            ConfigError, match=r"option limit of tier .* is 1 bytes, and one segment takes \d+; .* limit=\d+"
        ) as caught:
            store_at(f"{name}?limit=1" + (f"&codec={codec}" if codec else ""), TALL)
        least = str(caught.value).rpartition("=")[2]
        anyio.run(_keeps_one, f"{name}?limit={least}" + (f"&codec={codec}" if codec else ""))


async def _keeps_one(location):
    async with store_at(location, TALL) as store:
        await store.store([(key(1), memoryview(bytes(TALL.segment_bytes)))])
        assert await store.contains([key(1)]) == [True]


def test_a_folder_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for text, folder in (("file:~/kv", "kv"), ("file:./~/kv", "~/kv")):
        anyio.run(_keeps_one, text)
        assert (tmp_path / folder).is_dir()
        assert ("~" in folder) == (tmp_path / "~").exists()
    with pytest.raises(ConfigError, match=r"home directory of a user that this machine does not have; write the whole path"):
        store_at("file:~nobody-of-this-name/kv", LAYOUT)
