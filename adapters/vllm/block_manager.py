"""vLLM's block manager for full attention, but for requests that OasisKV attends to: their blocks go back to the pool while
they run, and a fixed number of others is lent to OasisKV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

if TYPE_CHECKING:
    from .ledger import Ledger


class LendingBlockManager(FullAttentionManager):
    """The blocks of one KV cache group.

    Lent blocks are fresh ones, never blocks of the request: those may be shared with others by the prefix cache.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ledger: Ledger | None = None
        self._lent: dict[str, list[KVCacheBlock]] = {}

    # Requests that come back, or begin with a prefix that the host has

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
        fits, one that is handed over before it has been read needs no more than it ever holds at once."""
        needed = super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, total_computed_tokens, num_local_computed_tokens, *args, **kwargs
        )
        if self.ledger is None:
            return needed
        external = self._external_blocks(total_computed_tokens - num_local_computed_tokens)
        begins_lent = external > 0 and request_id not in self.num_cached_block
        if begins_lent:
            needed += self.ledger.lent_blocks - external
        if apply_admission_cap and (begins_lent or self.ledger.streams(request_id)):
            needed = min(needed, self.ledger.most_blocks)
        return needed

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
        """Hand a request over once its history is on the host, and free the blocks that it does not need any more."""
        blocks, ledger = self.req_to_blocks.get(request_id), self.ledger
        if ledger is None or not blocks:
            return
        if request_id not in self._lent:
            last = ledger.releasable(request_id, processed_computed_tokens)
            if last is None or not self._can_lend(blocks[ledger.kept_first : last]):
                return
            self._free_range(request_id, ledger.kept_first, last)
            self._lend(request_id, (ledger.kept_first, last))
        else:
            last = max(ledger.kept_first, processed_computed_tokens // self.block_size - ledger.kept_last)
            self._free_range(request_id, ledger.kept_first, last)
            ledger.free(request_id, last)

    def _can_lend(self, given: list[KVCacheBlock]) -> bool:
        """Whether the pool has enough blocks once those that are `given` back, and that nobody shares, are free."""
        assert self.ledger is not None
        freed = sum(block.ref_cnt == 1 and not block.is_null for block in given)
        return freed + self.block_pool.get_num_free_blocks() >= self.ledger.lent_blocks

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
