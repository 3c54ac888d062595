"""The adapter's settings: those of `OasisConfig` and a few of its own, from `kv_connector_extra_config`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oasiskv import OasisConfig
from oasiskv.errors import ConfigError

CONNECTOR = "OasisKV"
"""The name by which `--kv-transfer-config` switches the adapter on."""

_HOSTS = {
    "pool_bytes": "vLLM owns the device memory: use --gpu-memory-utilization, --kv-cache-memory or VLLM_CPU_KVCACHE_SPACE",
    "dense_threshold": "use handover_tokens",
    "poison_freed": "freed device blocks belong to vLLM",
}
"""Settings of the core that the serving engine decides, and what to use instead."""

_LARGEST_BLOCK = 16
"""Default of block_size, if the device block is a multiple of it: finer blocks rank better, coarser ones move faster."""


@dataclass(frozen=True)
class Settings:
    """Everything that `kv_connector_extra_config` says.

    Attributes:
        core: of the `KVManager` in each worker.
        handover_tokens: requests with at least this many tokens are copied to the host, and handed over to OasisKV once they decode.
        device_block: tokens in a block of vLLM.
    """

    core: OasisConfig
    handover_tokens: int
    device_block: int

    @classmethod
    def of(cls, extra: Mapping[str, Any], device_block: int) -> Settings:
        """Read `kv_connector_extra_config`. Raises `ConfigError` for names that do not exist and values that cannot work."""
        own = {"handover_tokens"}
        known = own | set(OasisConfig.names()) - _HOSTS.keys()
        for name in extra:
            if name in _HOSTS:
                raise ConfigError(f"kv_connector_extra_config has {name}, which the vLLM adapter does not take: {_HOSTS[name]}")
            if name not in known:
                near = difflib.get_close_matches(name, known, 3) or sorted(known)
                raise ConfigError(f"kv_connector_extra_config has {name!r}, which is no setting; there is {', '.join(near)}")
        chosen = {name: value for name, value in extra.items() if name not in own}
        chosen.setdefault("block_size", _block_size(device_block))
        core = OasisConfig(**chosen)
        if device_block % core.block_size:
            raise ConfigError(
                f"block_size is {core.block_size}, which does not divide vLLM's block of {device_block} tokens; "
                f"use {_block_size(device_block)}, or another --block-size"
            )
        least = core.sink_tokens + core.window_tokens + device_block
        handover = extra.get("handover_tokens", max(2 * core.budget_tokens, least))
        if not isinstance(handover, int) or isinstance(handover, bool) or handover < least:
            raise ConfigError(
                f"handover_tokens is {handover!r}; it must be an integer of at least {least}: sink_tokens, window_tokens and a device block"
            )
        return cls(core, handover, device_block)

    @property
    def lent_blocks(self) -> int:
        """Device blocks that OasisKV borrows for a request."""
        return -(-self.core.budget_tokens // self.device_block)


def extra_config(vllm_config: Any) -> Mapping[str, Any] | None:  # noqa: ANN401 - vLLM's class, which need not be there
    """The settings that a vLLM configuration has for us, or `None` if it does not use OasisKV."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    if transfer is None or transfer.kv_connector != CONNECTOR:
        return None
    extra: Mapping[str, Any] = transfer.kv_connector_extra_config or {}
    return extra


def _block_size(device_block: int) -> int:
    """The largest size of our blocks that divides vLLM's."""
    sizes = [size for size in range(4, _LARGEST_BLOCK + 1, 2) if device_block % size == 0]
    if not sizes:
        raise ConfigError(
            f"vLLM's block has {device_block} tokens, which no block_size from 4 to 64 divides; use --block-size 32"
        )
    return sizes[-1]
