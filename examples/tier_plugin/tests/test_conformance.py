"""The kit of OasisKV, on a real client and a local server."""

import pytest
from hypothesis import settings
from oasiskv_s3 import S3Store

from oasiskv.testing.tier_kit import TierStoreTests
from oasiskv.testing.tier_machine import TierStoreMachine
from oasiskv.tiers import Location

from .conftest import BUCKET


class TestS3Store(TierStoreTests):
    takes_limit = False

    @pytest.fixture(autouse=True)
    def _server(self, endpoint):
        self.endpoint = endpoint

    def make(self, folder, layout, limit_bytes):
        return S3Store.at(Location.parse(f"s3:{BUCKET}{folder}?endpoint={self.endpoint}"), layout)


class Machine(TierStoreMachine):
    endpoint = ""

    def make(self, folder, layout, limit_bytes):
        return S3Store.at(Location.parse(f"s3:{BUCKET}{folder}?endpoint={self.endpoint}"), layout)


class TestAgainstMemory(Machine.TestCase):
    settings = settings(max_examples=5, stateful_step_count=10, deadline=None)

    @pytest.fixture(autouse=True)
    def _server(self, endpoint):
        Machine.endpoint = endpoint
