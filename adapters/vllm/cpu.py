"""The attention backend of vLLM's CPU platform with OasisKV in it."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from .backend import backend_over

_Backend: Any = backend_over(CPUAttentionBackend)


class OasisCPUBackend(_Backend):
    """Found by its qualified name, as that of CUDA."""
