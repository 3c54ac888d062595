"""The KV cache spec by which vLLM's layers ask for blocks that may be lent and freed while their request runs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from vllm.v1.core.block_pool import BlockPool  # noqa: F401  (before the spec registry, which imports the managers lazily)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from .settings import AdapterConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, kw_only=True)
class OasisSpec(FullAttentionSpec):
    """As `FullAttentionSpec`; that it is another type gives its group a block manager of ours."""

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """As the base, but for what goes to the host while a long prompt is read."""
        whole: int = super().max_memory_usage_bytes(vllm_config)
        settings = AdapterConfig.from_vllm(vllm_config)
        if settings is None:
            return whole
        most = settings.most_host_blocks(self.block_size, vllm_config.scheduler_config.max_num_batched_tokens)
        return min(whole, most * self.page_size_bytes)


def lendable(spec: AttentionSpec) -> AttentionSpec:
    """The spec of a layer with plain full attention as an `OasisSpec`; any other as it is."""
    if type(spec) is not FullAttentionSpec or spec.sliding_window is not None or spec.attention_chunk_size is not None:
        return spec
    return OasisSpec(**{entry.name: getattr(spec, entry.name) for entry in fields(spec)})


def register_spec() -> None:
    """Make the spec and its manager known to this process. Idempotent."""
    from .block_manager import LendingBlockManager

    # vLLM registers its own specs only while the registry is empty.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(OasisSpec, LendingBlockManager, uniform_type_base_spec=FullAttentionSpec)
