"""The attention backend of vLLM's CPU platform with OasisKV in it."""

from __future__ import annotations

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from .backend import backend_over

OasisCPUBackend = backend_over(CPUAttentionBackend)
