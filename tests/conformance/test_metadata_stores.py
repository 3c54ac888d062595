from oasiskv.testing.metadata_kit import MetadataStoreTests
from oasiskv.tiers.memory_metadata import MemoryMetadata
from oasiskv.tiers.sqlite_metadata import SqliteMetadata


class TestMemory(MetadataStoreTests):
    def make(self, folder):
        return MemoryMetadata()


class TestSqlite(MetadataStoreTests):
    shared = True

    def make(self, folder):
        return SqliteMetadata(folder / "metadata.sqlite")
