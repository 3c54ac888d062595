from oasiskv.testing.tier_kit import TierStoreTests
from oasiskv.tiers.codecs import Codec
from oasiskv.tiers.coded import CodedStore
from oasiskv.tiers.memory import MemoryStore
from oasiskv.tiers.tiered import TieredStore


class Backwards(Codec):
    """Loses nothing, so that the kit can compare bytes, and changes every byte and the size."""

    name = "backwards/1"

    def slot_bytes(self, layout):
        return layout.slot_bytes + 3

    def encode(self, data, layout):
        size = layout.slot_bytes
        slots = [bytes(data[start : start + size][::-1]) for start in range(0, len(data), size)]
        return bytearray(b"".join(b"pad" + slot for slot in slots))

    def decode(self, coded, into, layout):
        size = self.slot_bytes(layout)
        into[:] = b"".join(bytes(coded[start + 3 : start + size])[::-1] for start in range(0, len(coded), size))


def coded(layout, limit_bytes=None):
    codec = Backwards()
    return CodedStore(MemoryStore(codec.coded(layout), limit_bytes), layout, codec)


class TestCoded(TierStoreTests):
    def make(self, folder, layout, limit_bytes):
        return coded(layout, limit_bytes)


class TestCodedBelow(TierStoreTests):
    takes_limit = False  # each tier has its own

    def make(self, folder, layout, limit_bytes):
        return TieredStore([MemoryStore(layout, layout.slot_bytes), coded(layout)])
