"""Who gets the pool's strips: every sequence of a step what it needs, at the price of turning dense sequences sparse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import StateError
from .layout import trim
from .sequence import Phase, Sequence
from .settling import become_dense, has_candidates, settle

if TYPE_CHECKING:
    from .manager import KVManager

_STRIPS_AHEAD = 8
"""Strips that a growing dense sequence takes at a time, so that a pool without a set size is not copied for every block."""


@dataclass
class _Claim:
    """What a sequence wants in a step: a strip per block if it is to be dense, the budget if not."""

    sequence: Sequence
    blocks: int
    dense: bool
    decoding: bool

    def strips(self, budget: int) -> int:
        return self.blocks if self.dense else budget

    def settles(self, budget: int) -> bool:
        """Whether a working set is chosen now. A prompt does it later, unless its strips are wanted by others at once."""
        if self.dense or self.sequence.phase is Phase.SPARSE:
            return False
        return self.decoding or len(self.sequence.strips) > budget

    def missing(self, budget: int) -> int:
        """Strips to be taken; below 0 if it gives some back."""
        held = len(self.sequence.strips)
        return self.strips(budget) - held if self.dense or self.settles(budget) else max(0, budget - held)


def make_room(
    manager: KVManager, sequences: list[Sequence], num_tokens: list[int], num_drafts: list[int], decoding: list[bool]
) -> list[bool]:
    """Give every sequence of a step its strips; decoding ones are dense or settled afterwards.

    A dense sequence stays dense while its tokens, not counting drafts, fit `dense_threshold`. If the pool is short, the largest
    dense sequences turn sparse, in the step or out of it.

    Returns:
        Which of the sequences are dense in this step.

    A lent pool has no strips to give: its sequences hold theirs, and are never dense.

    Raises:
        StateError: a sequence of a lent pool has no strips.
        PoolExhausted: with all sequences sparse there would still be too few strips. Nothing has changed then.
        TierError: blocks that must be read are lost.
    """
    config = manager.config
    size, budget = config.block_size, config.budget_blocks
    if manager.rooms.pool.lent:
        _settle_lent(manager, sequences, decoding)
        return [False] * len(sequences)
    for sequence, tokens in zip(sequences, num_tokens, strict=True):
        # Rejected drafts, or a step that was aborted, made it sparse.
        if sequence.phase is not Phase.DENSE and sequence.length + tokens <= config.budget_tokens:
            become_dense(manager, sequence)
    claims = [
        _Claim(
            sequence,
            blocks=-(-(sequence.length + tokens) // size),
            dense=sequence.phase is Phase.DENSE and sequence.length + tokens - drafts <= config.dense_blocks * size,
            decoding=decodes,
        )
        for sequence, tokens, drafts, decodes in zip(sequences, num_tokens, num_drafts, decoding, strict=True)
    ]
    inside = {id(sequence) for sequence in sequences}
    victims = _victims(manager, claims, 0, inside)
    if victims:
        settle(manager, victims)
    giving = [claim.sequence for claim in claims if claim.settles(budget) and len(claim.sequence.strips) >= budget]
    if giving:
        settle(manager, giving)
    for claim in claims:
        wanted = claim.strips(budget)
        if claim.dense and claim.decoding:
            ahead = min(config.dense_blocks, -(-wanted // _STRIPS_AHEAD) * _STRIPS_AHEAD)
            held = len(claim.sequence.strips)
            if wanted > held and config.pool_bytes is None:
                wanted = max(wanted, ahead)
        give(manager, claim.sequence, wanted)
    settling = [claim.sequence for claim in claims if claim.settles(budget)]
    if settling:
        settle(manager, settling)
    return [claim.dense for claim in claims]


def _settle_lent(manager: KVManager, sequences: list[Sequence], decoding: list[bool]) -> None:
    """Settle the sequences of a lent pool that decode for the first time, or after more prompt; again those that were too short
    to choose anything for."""
    if not all(sequence.strips for sequence in sequences):
        raise StateError("a sequence has no strips in the lent pool; lend it some before the step (KVManager.lend)")
    fitted, config = manager.rooms.summary.fitted, manager.config
    waiting = [
        sequence
        for sequence, decodes in zip(sequences, decoding, strict=True)
        if decodes and (sequence.phase is Phase.UNSETTLED or (not fitted and has_candidates(config, sequence)))
    ]
    if waiting:
        settle(manager, waiting)


def _victims(manager: KVManager, claims: list[_Claim], more: int, inside: set[int]) -> list[Sequence]:
    """Turn claims sparse, and choose dense sequences that are not `inside`, until the pool has room for all claims and `more`
    strips. Besides the claims only idle strips change hands."""
    pool, budget = manager.rooms.pool, manager.config.budget_blocks
    others = [sequence for sequence in manager.sequences if id(sequence) not in inside and sequence.torn is None]
    if not pool.can_allocate(more + sum(claim.missing(budget) for claim in claims)):
        for sequence in others:
            trim(manager.rooms, sequence)
    outside = [sequence for sequence in others if sequence.phase is Phase.DENSE and len(sequence.strips) > budget]
    chosen: list[Sequence] = []
    while True:
        freed = sum(len(sequence.strips) - budget for sequence in chosen)
        count = more + sum(claim.missing(budget) for claim in claims) - freed
        if pool.can_allocate(count):
            return chosen
        dense = [claim for claim in claims if claim.dense and claim.blocks > budget]
        largest = max(dense, key=lambda claim: claim.blocks, default=None)
        other = max(outside, key=lambda sequence: len(sequence.strips), default=None)
        if other is not None and (largest is None or len(other.strips) >= largest.blocks):
            chosen.append(other)
            outside.remove(other)
        elif largest is not None:
            largest.dense = False
        else:
            pool.allocate(count)  # raises, and says how much is needed


def give(manager: KVManager, sequence: Sequence, count: int) -> None:
    """Give a sequence at least `count` strips. Raises `PoolExhausted`."""
    missing = count - len(sequence.strips)
    if missing > 0:
        sequence.strips.extend(_allocate(manager, missing))
        manager.rooms.sets.set_strips(sequence.row, sequence.strips)


def take(manager: KVManager, count: int, keep: Sequence) -> list[int]:
    """Take strips for a new sequence; dense ones other than `keep`, and than those of an open step, may turn sparse for it.
    Raises `PoolExhausted`."""
    step = manager.open_step
    busy = step.sequences if step is not None else []
    victims = _victims(manager, [], count, {id(sequence) for sequence in (keep, *busy)})
    if victims:
        settle(manager, victims)
    return _allocate(manager, count)


def _allocate(manager: KVManager, count: int) -> list[int]:
    if count > manager.rooms.pool.free_strips:
        manager.drain()  # growing replaces the tensors that background work writes to
    return manager.rooms.pool.allocate(count)
