"""OasisKV in vLLM: a plug-in that is inert until `--kv-transfer-config '{"kv_connector": "OasisKV", "kv_role": "kv_both"}'`."""

from __future__ import annotations


def register() -> None:
    """The entry point in `vllm.general_plugins`, called in every process of an engine; more than once is fine."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from .settings import CONNECTOR
    from .spec import register_spec

    if CONNECTOR in KVConnectorFactory._registry:
        return
    KVConnectorFactory.register_connector(CONNECTOR, f"{__name__}.connector", "OasisConnector")
    # vLLM's CPU platform takes no other backend than CPU_ATTN, but honours where that name leads.
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.cpu.OasisCPUBackend")
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.cuda.OasisCUDABackend")
    register_spec()
