"""`AdapterConfig`: what vLLM's `--kv-transfer-config` says of OasisKV, validated before anything is allocated."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from oasiskv import OasisConfig
from oasiskv.errors import ConfigError

CONNECTOR = "OasisKV"
"""The name under which vLLM knows the connector."""

RANK = "{rank}"
"""In the location of a tier: the number of the worker, counted over all data-parallel engines."""

_WHERE = "kv_connector_extra_config"

_LARGEST_DEFAULT_BLOCK = 16

_CPU_PREDICTOR = "lookahead"
"""Without a `predictor`, on a CPU: hints cost a quarter of a step there, and there is no transfer to hide."""

_TIER_PATIENCE_S = 240.0
"""Without a `tier_patience_s`: an error would end the engine and all its requests. vLLM gives its workers up after 300 s."""

_HOSTS = {
    "pool_bytes": "vLLM's own KV blocks are the pool, and --gpu-memory-utilization sets their memory; leave it out",
    "dense_threshold": "vLLM serves short requests itself; set handover_tokens, from which on OasisKV serves them",
}
"""Settings of `OasisConfig` that are not the user's here, and what to do instead."""

_OWN = ("handover", "handover_tokens")

_HANDOVERS = ("pressure", "always")

_PARTS_HELD = 3
"""Parts of a prompt that are on the device: one that is computed, one that is copied, and one whose copy was not told yet."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Settings of OasisKV inside vLLM. Frozen.

    Attributes:
        core: settings of the manager.
        handover_tokens: tokens from which on a request may be handed to OasisKV; vLLM alone serves the shorter ones. At least
            sinks, window and one block; by default twice the budget.
        handover: when that is. With `"pressure"`, vLLM attends while it has blocks for all that runs and waits; with
            `"always"`, until the request decodes.
    """

    core: OasisConfig
    handover_tokens: int
    handover: Literal["pressure", "always"] = "pressure"

    def __post_init__(self) -> None:
        if self.handover not in _HANDOVERS:
            raise ConfigError(f"{_WHERE}: handover is {self.handover!r}; it must be {' or '.join(map(repr, _HANDOVERS))}")
        value, core = self.handover_tokens, self.core
        least = core.sink_tokens + core.window_tokens + core.block_size
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(
                f"{_WHERE}: handover_tokens is {value!r}; it must be an integer of at least {least}: sinks, window and a block"
            )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of all settings that `kv_connector_extra_config` may have."""
        return tuple(sorted({*OasisConfig.names(), *_OWN} - _HOSTS.keys()))

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any], host_block_size: int, device_type: str = "cuda") -> Self:
        """The settings in `kv_connector_extra_config`.

        Args:
            extra: as it came out of JSON.
            host_block_size: tokens in a block of vLLM. Without a `block_size`, OasisKV takes the largest part of it that is
                allowed and has at most 16 tokens.
            device_type: where the model runs; without a `predictor`, it is `layer-ahead`, and `lookahead` on a `"cpu"`.

        Raises:
            ConfigError: an unknown name, a setting that is not the user's here, or a value that cannot work.
        """
        for name, value in extra.items():
            if name in _HOSTS:
                raise ConfigError(f"{_WHERE}: {name} is {value!r}, but {_HOSTS[name]}")
            if name not in cls.names():
                raise ConfigError(f"{_WHERE}: there is no setting {name!r}; {_near(name, cls.names())}")
            if not _is_plain(value):
                raise ConfigError(
                    f"{_WHERE}: {name} is {value!r}; it must be a number, a text, true, false, null or a list of texts"
                )
        values = dict(extra)
        own = {name: values.pop(name) for name in _OWN if values.get(name) is not None}
        if values.get("block_size") is None:
            values["block_size"] = _default_block_size(host_block_size)
        if device_type == "cpu":
            values.setdefault("predictor", _CPU_PREDICTOR)
        values.setdefault("tier_patience_s", _TIER_PATIENCE_S)
        try:
            core = OasisConfig(**values)
        except ConfigError as error:
            raise ConfigError(f"{_WHERE}: {error}") from error
        return cls(core=core, **{"handover_tokens": 2 * core.budget_tokens, **own})

    @classmethod
    def from_vllm(cls, vllm_config: Any) -> Self | None:
        """The settings of the engine with this `VllmConfig`; `None` if OasisKV is not its connector.

        Raises:
            ConfigError: as `from_extra`.
        """
        transfer = vllm_config.kv_transfer_config
        if transfer is None or transfer.kv_connector != CONNECTOR:
            return None
        extra, size = transfer.kv_connector_extra_config or {}, vllm_config.cache_config.block_size
        return cls.from_extra(extra, size, vllm_config.device_config.device_type)

    @property
    def shares_tiers(self) -> bool:
        """Whether workers use one tier store together: the locations do not differ from worker to worker."""
        return any(RANK not in location for location in self.core.tiers)

    def of_rank(self, rank: int) -> OasisConfig:
        """The settings of one worker's manager: `{rank}` in the locations of tiers is its number."""
        tiers = [location.replace(RANK, str(rank)) for location in self.core.tiers]
        return replace(self.core, tier=tiers or None)

    def budget_host_blocks(self, host_block_size: int) -> int:
        """Blocks of vLLM that hold the working set of a request."""
        return -(-self.core.budget_blocks * self.core.block_size // host_block_size)

    def most_host_blocks(self, host_block_size: int, step_tokens: int) -> int:
        """Blocks of vLLM that a request holds at most if it is handed over while its prompt is read, at most `step_tokens` in a
        step: those that are lent, and parts of the prompt until their copies are known to be on the host."""
        return self.budget_host_blocks(host_block_size) + _PARTS_HELD * (-(-step_tokens // host_block_size) + 1)


def _default_block_size(host_block_size: int) -> int:
    fitting = [size for size in range(4, _LARGEST_DEFAULT_BLOCK + 1, 2) if host_block_size % size == 0]
    if not fitting:
        raise ConfigError(
            f"block_size of vLLM is {host_block_size}, which no block of OasisKV divides: they are even, with 4 to 64 tokens; "
            "use --block-size 32"
        )
    return fitting[-1]


def _near(name: object, names: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names)}"


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, str) for item in value)
    return value is None or isinstance(value, str | int | float)
