"""The attention backend of vLLM's CUDA platform with OasisKV in it, for `--attention-backend CUSTOM`. Not yet run on a GPU."""

from __future__ import annotations

from typing import Any

import vllm.model_executor.layers.attention  # noqa: F401 - before the backends, which import it while it imports them
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.kv_cache_interface import KVCacheLayout

from .backend import backend_over


class _HeadMajorFlashAttention(FlashAttentionBackend):
    """FlashAttention over blocks in which the tokens of a kv head lie together, so that a block is slots of ours."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"


_Backend: Any = backend_over(_HeadMajorFlashAttention)


class OasisCUDABackend(_Backend):
    """vLLM's CUDA platform imports it by its qualified name."""
