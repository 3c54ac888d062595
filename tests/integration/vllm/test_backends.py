"""The attention backends as vLLM sees them. That for CUDA goes no further than this without a device."""

import pytest
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheLayout

from oasiskv.adapters.vllm import register
from oasiskv.adapters.vllm.backend import builder_over
from oasiskv.adapters.vllm.cpu import OasisCPUBackend
from oasiskv.adapters.vllm.cuda import OasisCUDABackend


@pytest.mark.parametrize(
    ("backend", "member"), [(OasisCPUBackend, AttentionBackendEnum.CPU_ATTN), (OasisCUDABackend, AttentionBackendEnum.CUSTOM)]
)
def test_vllm_finds_them_by_name(backend, member):
    """vLLM's CUDA platform turns the class into a text, and imports that."""
    register()
    assert resolve_obj_by_qualname(".".join(backend.full_cls_name())) is backend
    assert member.get_class() is backend


def test_blocks_of_cuda_are_head_major():
    assert OasisCUDABackend.supported_kv_cache_layouts() == (KVCacheLayout.LBHNC,)
    assert OasisCUDABackend.get_name() == "CUSTOM"


def test_metadata_is_never_changed_in_place(monkeypatch):
    """What it was built from would not be told: another group's block table, or the next step of a draft model."""
    assert FlashAttentionMetadataBuilder.supports_update_block_table
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "__init__", set_both)
    builder = builder_over(FlashAttentionMetadataBuilder)()
    assert not builder.supports_update_block_table
    assert not builder.supports_draft_decode_metadata_update


def set_both(self):
    self.supports_draft_decode_metadata_update = True
