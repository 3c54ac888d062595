"""vLLM's block manager for full attention, but for requests that OasisKV attends to: their blocks go back to the pool while
they run, and a fixed number of others is lent to OasisKV."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from .pressure import Candidate, choose

if TYPE_CHECKING:
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    from .ledger import Ledger


class LendingBlockManager(FullAttentionManager):
    """The blocks of one KV cache group.

    Lent blocks are fresh ones, never blocks of the request: those may be shared with others by the prefix cache.

    Attributes:
        ledger: the scheduler's books, once they are open.
        beside: the managers of the other groups, which take blocks from the same pool.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ledger: Ledger | None = None
        self.beside: list[SingleTypeKVCacheManager] = []
        self._lent: dict[str, list[KVCacheBlock]] = {}

    # What a request needs

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        *args: Any,
        apply_admission_cap: bool = False,
        **kwargs: Any,
    ) -> int:
        """As the base; tokens that come from the host need no blocks but the lent ones. Where vLLM asks whether all of a prompt
        fits, one that is handed over before it has been read needs no more than it ever holds at once.

        vLLM asks this when it is about to take blocks. If they are not there, other requests are handed over now.
        """
        counted = super().get_num_blocks_to_allocate  # again after each handover: found blocks may be nobody's then
        asked = (request_id, num_tokens, new_computed_blocks, total_computed_tokens, num_local_computed_tokens, *args)
        ledger = self.ledger
        if ledger is None:
            return counted(*asked, **kwargs)
        external = self._external_blocks(total_computed_tokens - num_local_computed_tokens)
        begins = request_id not in self.num_cached_block
        begins_lent = external > 0 and begins
        more = ledger.lent_blocks - external if begins_lent else 0
        most = ledger.most_blocks if apply_admission_cap and (begins_lent or ledger.streams(request_id)) else None
        needed = counted(*asked, **kwargs) + more
        if not ledger.always:
            spare = self._needed_beside(request_id, num_tokens) + (ledger.watermark_blocks if begins else 0)
            wanted = [needed] if most is None else [most] if begins_lent else [needed, most]
            if any(self._make_room(min(one, needed) + spare, new_computed_blocks) for one in wanted):
                needed = counted(*asked, **kwargs) + more
                if needed + spare <= self.block_pool.get_num_free_blocks():
                    return needed
        return needed if most is None else min(needed, most)

    def _needed_beside(self, request_id: str, num_tokens: int) -> int:
        """At most so many blocks the other groups need for a request: layers with a window need less."""
        held = [(manager.block_size, len(manager.req_to_blocks.get(request_id, ()))) for manager in self.beside]
        return sum(max(0, -(-num_tokens // size) - blocks) for size, blocks in held)

    # Room

    def _make_room(self, needed: int, found: Sequence[KVCacheBlock]) -> bool:
        """Hand requests over until `needed` blocks are free; whether that can be done. `found` are blocks in the prefix cache
        that vLLM is about to use."""
        assert self.ledger is not None
        missing = needed - self.block_pool.get_num_free_blocks()
        if missing <= 0:
            return True
        ledger = self.ledger
        lasts = {request_id: ledger.releasable(request_id) for request_id in ledger.candidates()}
        most = sum(max(0, last - ledger.kept_first - ledger.lent_blocks) for last in lasts.values() if last is not None)
        if most < missing:  # told without a look at every block
            return False
        found_ids = {block.block_id for block in found}
        chosen = choose([self._candidate(name, last, found_ids) for name, last in lasts.items() if last is not None], missing)
        if chosen:
            self._hand_over(chosen, found)
        return bool(chosen)

    def _candidate(self, request_id: str, last: int, found: AbstractSet[int] = frozenset()) -> Candidate:
        """What a handover of a request gives up: its own blocks before `last`. Blocks that are `found` do not come free."""
        ledger = self.ledger
        assert ledger is not None
        own = [block for block in self.req_to_blocks[request_id][ledger.kept_first : last] if not block.is_null]
        holders = {block.block_id: block.ref_cnt + (block.block_id in found) for block in own}
        return Candidate(request_id, last, holders, ledger.lent_blocks)

    def _hand_over(self, chosen: Sequence[Candidate], found: Sequence[KVCacheBlock] = ()) -> None:
        """Free blocks of requests that the host has, then lend others. `found` blocks, which perhaps no request holds yet, are
        not lent."""
        ledger = self.ledger
        assert ledger is not None
        self.block_pool.touch(found)
        for candidate in chosen:
            self._free_range(candidate.request_id, ledger.kept_first, candidate.last)
        for candidate in chosen:
            self._lend(candidate.request_id, (ledger.kept_first, candidate.last))
        self.block_pool.free_blocks(reversed(found))

    # Requests that come back, or begin with a prefix that the host has

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Lend blocks to a request whose history is on the host."""
        external = self._external_blocks(num_external_computed_tokens)
        if self.ledger is None or not external:
            return
        blocks = self.req_to_blocks[request_id]
        blocks.extend([self._null_block] * external)
        self.num_cached_block[request_id] = len(blocks)
        self._lend(request_id, (0, len(blocks)))

    def _external_blocks(self, tokens: int) -> int:
        """Blocks of tokens on the host; there are whole blocks only."""
        return max(0, tokens) // self.block_size

    # Requests that run

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the blocks that a handed-over request does not need any more. If requests are always handed over, this is where,
        once their history is on the host."""
        blocks, ledger = self.req_to_blocks.get(request_id), self.ledger
        if ledger is None or not blocks:
            return
        ledger.advance(request_id, processed_computed_tokens)
        if request_id in self._lent:
            if ledger.is_attended(request_id):  # else the workers have yet to take some of them over
                last = max(ledger.kept_first, processed_computed_tokens // self.block_size - ledger.kept_last)
                self._free_range(request_id, ledger.kept_first, last)
                ledger.free(request_id, last)
        elif ledger.always and ledger.is_stored(request_id):
            last = ledger.releasable(request_id)
            if last is not None:
                candidate = self._candidate(request_id, last)
                if candidate.gain + self.block_pool.get_num_free_blocks() >= 0:
                    self._hand_over([candidate])

    def _free_range(self, request_id: str, first: int, last: int) -> None:
        assert self.ledger is not None
        before = self.block_pool.get_num_free_blocks()
        self._remove_blocks_in_range(request_id, first, last)
        self.ledger.counts["freed_device_blocks"] += self.block_pool.get_num_free_blocks() - before

    def _lend(self, request_id: str, freed: tuple[int, int]) -> None:
        assert self.ledger is not None
        lent = self.block_pool.get_new_blocks(self.ledger.lent_blocks)
        self._lent[request_id] = lent
        self.ledger.lend(request_id, [block.block_id for block in lent], freed)

    # Requests that end

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """As the base, and the lent blocks."""
        if self.ledger is not None:
            self.ledger.take_back(request_id)
        return super().pop_blocks_for_free(request_id) + self._lent.pop(request_id, [])
