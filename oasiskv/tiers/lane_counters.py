"""What a tier lane has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LaneCounters:
    """Sums since the lane was made.

    Attributes:
        reads: ranges that were asked for; each ended as one of the next three, or its call failed.
        hits: reads that were filled.
        misses: reads of what the store does not have.
        corrupt: reads of what the store found damaged.
        loaded_bytes: of hits.
        stored_segments: segments that the store took.
        stored_bytes: of those.
        deleted: keys that the store forgot, or never had.
        failed_loads: loads and look-ups that raised, refused and late ones included.
        failed_stores: submitted stores that ended in an error.
        failed_deletes: submitted deletes that ended in an error.
        refused: calls that were not made, because the breaker was open.
        retries: calls of submitted work that were made again.
        timeouts: calls that did not end in time.
        breaker_openings: how often the store was taken for dead.
        load_s: seconds that loads took, those that failed included, as their callers saw them.
        store_s: seconds in which submitted stores were under way, waiting between retries included.
    """

    reads: int = 0
    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    loaded_bytes: int = 0
    stored_segments: int = 0
    stored_bytes: int = 0
    deleted: int = 0
    failed_loads: int = 0
    failed_stores: int = 0
    failed_deletes: int = 0
    refused: int = 0
    retries: int = 0
    timeouts: int = 0
    breaker_openings: int = 0
    load_s: float = 0.0
    store_s: float = 0.0
