"""Tier stores: where segments of KV lie below the arena. One idea per file, registered under `oasiskv.tier_stores`."""

from .abc import Lease, MetadataStore, TierStore
from .location import Location
from .segments import Outcome, Read, SegmentKey, SegmentLayout, TierTraits

__all__ = ["Lease", "Location", "MetadataStore", "Outcome", "Read", "SegmentKey", "SegmentLayout", "TierStore", "TierTraits"]
