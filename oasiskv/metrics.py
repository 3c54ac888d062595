"""What happened: counters that every room adds to, and the report that users read."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, replace

import torch

_KEPT = 256
"""Tensors of counts that wait for being added up."""


@dataclass
class Totals:
    """What was counted so far."""

    steps: int = 0
    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    wanted_blocks: int = 0
    resident_blocks: int = 0
    loaded_blocks: int = 0
    corrected_blocks: int = 0
    stored_blocks: int = 0
    late_layers: int = 0
    late_blocks: int = 0
    most_new_blocks: int = 0
    most_corrected_blocks: int = 0
    coverage_sum: float = 0.0
    coverage_count: int = 0


class Counters:
    """Running totals. Background lanes and the foreground both count, so changes go under a lock.

    What an operation counts comes as a tensor, a row for each thing that is counted. Rows are only kept, and added up many at a
    time: counting costs a step next to nothing, and nothing waits for the device until a report asks.
    """

    def __init__(self) -> None:
        self._totals = Totals()
        self._rows: dict[str, list[torch.Tensor]] = {"selection": [], "loads": [], "corrections": []}
        self._sums: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()

    def add(self, **amounts: int) -> None:
        """Add to totals by name."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._totals, name, getattr(self._totals, name) + amount)

    def record(self, kind: str, rows: torch.Tensor) -> None:
        """Count what an operation reports, `(n, columns)`: of a "selection" how many wanted blocks were resident and how many
        were wanted; of "loads" and "corrections" how many blocks, and the most of any head; of the latter also the coverage."""
        with self._lock:
            kept = self._rows[kind]
            kept.append(rows)
            if len(kept) == _KEPT:
                self._add_up(kind)

    def _add_up(self, kind: str) -> None:
        """Sums, maxima and number of rows of a kind, `(3, columns)`. The coverage of a text that is not finite is left out."""
        kept = self._rows[kind]
        if not kept:
            return
        rows = torch.cat(kept).double()
        finite = rows.isfinite()
        rows = rows.where(finite, 0.0)
        found = torch.stack([rows.sum(0), rows.amax(0), finite.sum(0).double()])
        if (before := self._sums.get(kind)) is not None:
            found = torch.stack([before[0] + found[0], torch.maximum(before[1], found[1]), before[2] + found[2]])
        self._sums[kind] = found
        kept.clear()

    def totals(self) -> Totals:
        """What was counted until now. Waits for the device."""
        with self._lock:
            for kind, kept in self._rows.items():
                if kept and kept[0].is_cuda:  # rows come from several streams
                    torch.cuda.synchronize(kept[0].device)
                self._add_up(kind)
            found = {kind: table.tolist() for kind, table in self._sums.items()}
            totals = replace(self._totals)
        if "selection" in found:
            totals.resident_blocks, totals.wanted_blocks = map(int, found["selection"][0])
        if "loads" in found:
            sums, most, _ = found["loads"]
            totals.loaded_blocks, totals.most_new_blocks = int(sums[0]), int(most[1])
        if "corrections" in found:
            sums, most, number = found["corrections"]
            totals.corrected_blocks, totals.most_corrected_blocks = int(sums[0]), int(most[1])
            totals.coverage_sum, totals.coverage_count = sums[2], int(number[2])
        return totals


@dataclass(frozen=True)
class Stats:
    """A report of one manager. Bytes are counted from allocated tensors.

    Attributes:
        sequences: live sequences; `sparse_sequences` of them keep a bounded working set.
        tokens: tokens that the live sequences hold.
        pool_bytes: device memory of the pool.
        summary_bytes: device memory of the key summaries.
        table_bytes: device memory of block tables and recent queries.
        arena_bytes: host memory of sealed blocks; `arena_peak_bytes` is the most there was.
        full_kv_bytes: what full attention would keep on the device for the same tokens.
        hit_rate: share of the wanted blocks that were resident when they were wanted.
        coverage: mean share of attention that fell on what the rows saw; the unseen rest is as the summary estimates it. 1 if
            nothing was estimated: it needs `correction_blocks`.
        tier_bytes: what the tier store below the arena holds of it.
        fetched_blocks: blocks that came back from there; `lost_blocks` did not, since they were missing or the store failed;
            `corrupt_blocks` were damaged, and `quarantined_blocks` waited for a transfer that was given up.
        tier_retries, tier_timeouts: calls of the store that were made again, and that did not end in time.
        late_blocks: blocks left out because their move was not done; `late_layers` counts the layers that did not wait.
        loaded_blocks, corrected_blocks, stored_blocks: blocks moved to the pool, read in place, and written to the arena.
        moved_bytes_per_token: host-to-device bytes per decoded token: loads and in-place reads.
        most_new_blocks, most_corrected_blocks: the largest number of blocks that any head loaded, and read in place, in one
            step.
    """

    sequences: int
    sparse_sequences: int
    tokens: int
    steps: int
    decoded_tokens: int
    prefilled_tokens: int
    pool_bytes: int
    summary_bytes: int
    table_bytes: int
    arena_bytes: int
    arena_peak_bytes: int
    full_kv_bytes: int
    hit_rate: float
    coverage: float
    late_blocks: int
    late_layers: int
    loaded_blocks: int
    corrected_blocks: int
    stored_blocks: int
    moved_bytes_per_token: float
    most_new_blocks: int
    most_corrected_blocks: int
    tier_bytes: int = 0
    fetched_blocks: int = 0
    lost_blocks: int = 0
    corrupt_blocks: int = 0
    quarantined_blocks: int = 0
    tier_retries: int = 0
    tier_timeouts: int = 0

    @property
    def device_bytes(self) -> int:
        """Everything on the device: pool, summaries and tables."""
        return self.pool_bytes + self.summary_bytes + self.table_bytes

    def as_dict(self) -> dict[str, float]:
        """Plain numbers, for JSON."""
        return {**asdict(self), "device_bytes": self.device_bytes}

    def __str__(self) -> str:
        share = self.device_bytes / self.full_kv_bytes if self.full_kv_bytes else 0.0
        mib = 1 / (1 << 20)
        tier = (
            f"tier store         {self.tier_bytes * mib:.1f} MiB; {self.fetched_blocks} blocks fetched, "
            f"{self.lost_blocks} not to be had, {self.corrupt_blocks} damaged, {self.quarantined_blocks} quarantined",
        )
        return "\n".join(
            (
                f"sequences          {self.sequences} ({self.sparse_sequences} sparse), {self.tokens} tokens",
                f"device             {self.device_bytes * mib:.1f} MiB: pool {self.pool_bytes * mib:.1f}, "
                f"summaries {self.summary_bytes * mib:.1f}, tables {self.table_bytes * mib:.1f}",
                f"full KV            {self.full_kv_bytes * mib:.1f} MiB (device holds {share:.1%})",
                f"arena              {self.arena_bytes * mib:.1f} MiB on the host",
                f"hit rate           {self.hit_rate:.1%} of wanted blocks",
                f"coverage           {self.coverage:.1%} of attention, estimated",
                f"moved              {self.moved_bytes_per_token / 1024:.1f} KiB per decoded token "
                f"({self.loaded_blocks} blocks loaded, {self.corrected_blocks} read in place)",
                f"late               {self.late_blocks} blocks, {self.late_layers} layers",
                *(tier if self.tier_bytes or self.fetched_blocks else ()),
            )
        )
