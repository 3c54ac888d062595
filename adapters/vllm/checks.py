"""What must hold before OasisKV serves inside vLLM: a version with the hooks that the adapter uses, and settings that fit.

vLLM is imported inside functions, so that this module can be read and tested without it. Whatever cannot be served is refused
at start-up, and never silently served dense or wrong.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from oasiskv.errors import ConfigError, UnsupportedModel
from oasiskv.log import event

from .settings import CONNECTOR, RANK, AdapterConfig

SUPPORTED = "vllm>=0.30,<0.33"
"""Versions that the adapter is written for. A newer one is used, with a warning, while it has all hooks."""

_OLDEST = (0, 30)
_TOO_NEW = (0, 33)

_BACKEND_MODULE = "oasiskv."

_CPU_BLOCK = 32
"""What the block size of vLLM must be a multiple of on a CPU."""

_HEAD_MAJOR = ("LBHNC", "HND")
"""Names of the layout in which the tokens of one kv head lie together."""

_EXCLUSIVE = "file:"
"""Locations that one process has to itself."""

_FULL_ATTENTION = ("full_attention", "attention")


@dataclass(frozen=True)
class _Hook:
    """Something of vLLM that the adapter calls or overrides.

    Attributes:
        module: where it is.
        name: of a class, or of an attribute of one after a dot.
        parameters: that it must have.
        optional: that it may have besides; `None` if others do not matter, as of a method that is called and not overridden.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    optional: tuple[str, ...] | None = None

    def fault(self) -> str | None:
        """What is wrong with it here, or `None`."""
        where = f"{self.module}.{self.name}"
        try:
            owner: object = importlib.import_module(self.module)
        except ImportError as error:
            return f"{where} ({error})"
        *path, last = self.name.split(".")
        for part in path:
            owner = getattr(owner, part, None)
        found = getattr(owner, last, None)
        if found is None:
            return None if _is_field(owner, last) else where
        if not self.parameters and self.optional is None:
            return None
        if not callable(found):
            return f"{where} (not a function)"
        present = [name for name in inspect.signature(found).parameters if name not in ("self", "cls")]
        missing = [name for name in self.parameters if name not in present]
        unknown = [] if self.optional is None else [name for name in present if name not in (*self.parameters, *self.optional)]
        if not missing and not unknown:
            return None
        parts = [f"no parameter {name}" for name in missing] + [f"an unknown parameter {name}" for name in unknown]
        return f"{where} ({', '.join(parts)})"


def _is_field(owner: object, name: str) -> bool:
    return isinstance(owner, type) and dataclasses.is_dataclass(owner) and name in {f.name for f in dataclasses.fields(owner)}


_MANAGER = "vllm.v1.core.single_type_kv_cache_manager"
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_BACKENDS = "vllm.v1.attention.backends.registry"
_SPECS = "vllm.v1.kv_cache_spec_registry"

_HOOKS = (
    _Hook("vllm.v1.attention.backend", "AttentionBackend.customize_spec", ("spec",), ()),
    _Hook(_SPECS, "KVCacheSpecRegistry.register", ("kvcache_spec_cls", "manager_class", "uniform_type_base_spec")),
    _Hook(_SPECS, "KVCacheSpecRegistry._ensure_registered", ()),
    _Hook(
        _MANAGER,
        "SingleTypeKVCacheManager.get_num_blocks_to_allocate",
        (
            "request_id",
            "num_tokens",
            "new_computed_blocks",
            "total_computed_tokens",
            "num_local_computed_tokens",
            "num_tokens_main_model",
        ),
        ("apply_admission_cap", "prefill_end"),
    ),
    _Hook(
        _MANAGER,
        "SingleTypeKVCacheManager.add_local_computed_blocks",
        ("request_id", "new_computed_blocks", "num_local_computed_tokens", "num_external_computed_tokens"),
        (),
    ),
    _Hook(
        _MANAGER,
        "SingleTypeKVCacheManager.allocate_external_computed_blocks",
        ("request_id", "num_local_computed_tokens", "num_external_computed_tokens"),
        ("record_for_zeroing",),
    ),
    _Hook(
        _MANAGER,
        "SingleTypeKVCacheManager.remove_skipped_blocks",
        ("request_id", "processed_computed_tokens", "num_prompt_tokens"),
        (),
    ),
    _Hook(_MANAGER, "SingleTypeKVCacheManager.pop_blocks_for_free", ("request_id",), ()),
    _Hook(_MANAGER, "SingleTypeKVCacheManager._remove_blocks_in_range", ("request_id", "first_block", "last_block"), ()),
    _Hook(_MANAGER, "SingleTypeKVCacheManager.free", ("request_id",), ()),
    _Hook(_BASE, "KVConnectorBase_V1.bind_kv_cache_manager", ("kv_cache_manager",), ()),
    _Hook(_BASE, "KVConnectorBase_V1.get_handshake_metadata", (), ()),
    _Hook(_BASE, "KVConnectorBase_V1.set_xfer_handshake_metadata", ("metadata",), ()),
    _Hook(_BASE, "KVConnectorBase_V1.handle_preemptions", ("kv_connector_metadata",), ()),
    _Hook(_BASE, "KVConnectorBase_V1.build_connector_worker_meta", (), ()),
    _Hook(_BASE, "KVConnectorBase_V1.update_connector_output", ("connector_output",), ()),
    _Hook(_BASE, "SupportsHMA.request_finished_all_groups", ("request", "block_ids"), ()),
    _Hook(_BASE, "KVConnectorBase_V1.reset_cache", (), ()),
    _Hook(
        _BASE,
        "KVConnectorBase_V1.build_prom_metrics",
        ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
        (),
    ),
    _Hook(_BASE, "KVConnectorBase_V1.get_kv_connector_stats", (), ()),
    _Hook(_BACKENDS, "register_backend", ("backend", "class_path")),
    _Hook(_BACKENDS, "AttentionBackendEnum.CUSTOM"),
    _Hook(_BACKENDS, "AttentionBackendEnum.CPU_ATTN"),
    _Hook(
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory.register_connector",
        ("name", "module_path", "class_name"),
    ),
    _Hook("vllm.v1.core.sched.output", "SchedulerOutput.has_sync_kv_loads"),
)


def check_versions() -> None:
    """Raises unless the vLLM that is installed has every hook that the adapter uses.

    Raises:
        ConfigError: it is too old, or lacks hooks, or its hooks have other parameters. The message names all of them.
    """
    try:
        version = str(importlib.import_module("vllm").__version__)
    except ImportError as error:
        raise ConfigError(f"vllm cannot be imported ({error}); the adapter supports {SUPPORTED}") from error
    number = re.match(r"(\d+)\.(\d+)", version)
    release = (int(number.group(1)), int(number.group(2))) if number else None
    if release is not None and release < _OLDEST:
        raise ConfigError(f"vllm is {version}, which lacks hooks that OasisKV needs; install {SUPPORTED}")
    faults = [fault for fault in (hook.fault() for hook in _HOOKS) if fault is not None]
    if faults:
        raise ConfigError(f"vllm is {version}, which lacks what OasisKV needs: {'; '.join(faults)}; install {SUPPORTED}")
    if release is not None and release >= _TOO_NEW:
        event(logging.WARNING, "vllm-untested", version=version, supported=SUPPORTED)


def check_settings(vllm_config: Any, config: AdapterConfig | None) -> None:
    """Raises if the engine cannot be served with these settings.

    Args:
        vllm_config: of the engine. What other processes resolve later, such as the layout, is checked if it is there.
        config: of OasisKV; `None` if it is not the engine's connector. Then only what would run OasisKV by halves is refused.

    Raises:
        ConfigError: a setting of vLLM or of OasisKV that does not fit; the message names it, its value and the fix.
        UnsupportedModel: a model that cannot be served.
    """
    _check_connector(vllm_config, config)
    if config is None:
        return
    for complaint in _setting_faults(vllm_config, config):
        raise ConfigError(complaint)
    for complaint in _model_faults(vllm_config):
        raise UnsupportedModel(complaint)


def _check_connector(vllm_config: Any, config: AdapterConfig | None) -> None:
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector == "MultiConnector":
        children = (transfer.kv_connector_extra_config or {}).get("connectors", ())
        if any(child.get("kv_connector") == CONNECTOR for child in children):
            raise ConfigError(
                f"kv_connector is MultiConnector with {CONNECTOR} in it; {CONNECTOR} frees blocks that the other connectors "
                f"would copy, so make it the only one: kv_connector={CONNECTOR}"
            )
    backend = vllm_config.attention_config.backend
    if config is None:
        if _is_ours(backend):
            raise ConfigError(
                f"attention_config.backend is CUSTOM, which is OasisKV's, but kv_connector is "
                f"{transfer.kv_connector if transfer is not None else None}; set --kv-transfer-config "
                f'\'{{"kv_connector": "{CONNECTOR}", "kv_role": "kv_both"}}\', or leave --attention-backend out'
            )
        return
    if transfer.kv_role != "kv_both":
        raise ConfigError(f'kv_role is {transfer.kv_role!r}; OasisKV both stores and loads KV: "kv_both"')
    if on_cpu(vllm_config):
        return
    if getattr(backend, "name", None) != "CUSTOM":
        raise ConfigError(
            f"attention_config.backend is {getattr(backend, 'name', backend)}; kv_connector={CONNECTOR} needs CUSTOM: "
            "--attention-backend CUSTOM"
        )
    if not _is_ours(backend):
        raise ConfigError(
            "attention_config.backend is CUSTOM, but another plug-in has registered its backend under that name; "
            "let VLLM_PLUGINS name only oasiskv"
        )


def _is_ours(backend: Any) -> bool:
    """Whether this is the name `CUSTOM`, with a backend of OasisKV registered under it."""
    if getattr(backend, "name", None) != "CUSTOM":
        return False
    try:
        return str(backend.get_path()).startswith(_BACKEND_MODULE)
    except ValueError:  # nobody has registered a backend
        return False


def on_cpu(vllm_config: Any) -> bool:
    """Whether the engine's model runs on a CPU."""
    return str(vllm_config.device_config.device_type) == "cpu"


def _setting_faults(vllm_config: Any, config: AdapterConfig) -> Iterator[str]:
    parallel, cache, scheduler = vllm_config.parallel_config, vllm_config.cache_config, vllm_config.scheduler_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        value = getattr(parallel, name, 1)
        if value > 1:
            yield f"{name} is {value}; a request's KV must be on one rank, so use 1, or --tensor-parallel-size"
    if getattr(parallel, "enable_dbo", False):
        yield "enable_dbo is True; OasisKV attends over a whole step at once, so leave --enable-dbo out"
    # Of a dense model's engines none is told how many there are, only which one it is.
    engines = max(getattr(parallel, "data_parallel_size", 1), getattr(parallel, "data_parallel_index", 0) + 1)
    workers = parallel.tensor_parallel_size * engines
    for location in config.core.tiers:
        if workers > 1 and location.startswith(_EXCLUSIVE) and RANK not in location:
            path, question, options = location.partition("?")
            yield (
                f"tier is {location!r}, and there are {workers} workers or more; a folder of the file tier serves one of them: "
                f"{path.rstrip('/')}/{RANK}{question}{options}"
            )
    drafts = vllm_config.speculative_config
    if drafts is not None and scheduler.async_scheduling:
        yield (
            f"async_scheduling is True together with speculative_config (method {drafts.method}); the next step would be "
            "scheduled before it is known which drafts were kept: --no-async-scheduling"
        )
    if cache.block_size % config.core.block_size:
        yield (
            f"block_size of vLLM is {cache.block_size}, not a multiple of OasisKV's block_size {config.core.block_size}; "
            f"change --block-size, or block_size in kv_connector_extra_config"
        )
    if on_cpu(vllm_config) and cache.block_size % _CPU_BLOCK:
        yield f"block_size of vLLM is {cache.block_size}; on a CPU it must be a multiple of {_CPU_BLOCK}: --block-size 32"
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    if cache.cache_dtype not in ("auto", dtype):
        yield f"cache_dtype is {cache.cache_dtype}; OasisKV keeps KV as the model computes it: --kv-cache-dtype auto"
    if getattr(cache, "kv_sharing_fast_prefill", False):
        yield "kv_sharing_fast_prefill is True; OasisKV needs every layer's own KV: --no-kv-sharing-fast-prefill"
    if not on_cpu(vllm_config):
        mode = getattr(getattr(vllm_config, "compilation_config", None), "cudagraph_mode", None)
        if mode is not None and mode.has_full_cudagraphs():
            yield (
                f"cudagraph_mode is {mode.name}; a full graph would skip OasisKV's attention: "
                '--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\', and no fuse_attn_quant in its pass_config'
            )
        asked = os.environ.get("VLLM_KV_CACHE_LAYOUT")
        for name, layout in (("VLLM_KV_CACHE_LAYOUT", asked), ("kv_cache_layout", getattr(cache, "kv_cache_layout", None))):
            if layout is not None and layout not in _HEAD_MAJOR:
                yield f"{name} is {layout}; a kv head's tokens must lie together in a block: VLLM_KV_CACHE_LAYOUT=LBHNC"


def _model_faults(vllm_config: Any) -> Iterator[str]:
    model = vllm_config.model_config
    text = model.hf_text_config
    name = f"model is {model.model}, "
    if model.use_mla:
        yield f"{name}which caches a latent instead of keys and values (MLA): there are no kv heads to keep apart"
    if model.is_encoder_decoder:
        yield f"{name}an encoder-decoder model; only decoder-only models can be served"
    if model.is_attention_free:
        yield f"{name}which has no attention at all, and so no KV that grows"
    if getattr(model, "is_diffusion", False):
        yield f"{name}a diffusion model, which rewrites tokens that it has read"
    kinds = getattr(text, "layer_types", None)
    if model.is_hybrid:
        if model.get_num_layers_by_block_type(vllm_config.parallel_config, "attention") == 0:
            yield f"{name}which has no full-attention layer"
    elif kinds and not any(kind in _FULL_ATTENTION for kind in kinds):
        yield f"{name}which has no full-attention layer; its layer_types are {', '.join(sorted(set(kinds)))}"
    if getattr(model, "rswa_window", None) is not None:
        yield f"{name}whose layers forget the middle of a text (R-SWA, window {model.rswa_window})"
    if getattr(model, "is_mm_prefix_lm", False):
        yield f"{name}in which the tokens of an image see each other both ways; OasisKV's attention is causal"
    if model.uses_alibi:
        yield f"{name}which has ALiBi: its attention needs the places of tokens, which lent blocks do not keep"
    cap = getattr(text, "attn_logit_softcapping", None)
    if cap:
        yield f"{name}with attn_logit_softcapping {cap}; the adapter does not hand a soft cap of the logits on"
    if getattr(text, "model_type", None) == "gpt_oss" or getattr(text, "add_full_attention_sink_bias", False):
        yield f"{name}which has learnt attention sinks; OasisKV's attention has no place for them"
    shared = getattr(text, "num_kv_shared_layers", 0)
    if shared:
        yield f"{name}with num_kv_shared_layers {shared}; layers that read other layers' KV cannot be served"


_LAYER_FAULTS: tuple[tuple[str, Callable[[Any], object]], ...] = (
    ("attention of type {}; only decoder attention can be served", lambda layer: _unless(layer.attn_type, "decoder")),
    ("a sliding window of {} tokens; its KV is bounded already", lambda layer: layer.sliding_window),
    ("ALiBi, which needs the places of tokens", lambda layer: getattr(layer.impl, "alibi_slopes", None) is not None),
    (
        "learnt attention sinks, which OasisKV's attention has no place for",
        lambda layer: getattr(layer, "has_sink", False) or getattr(layer.impl, "sinks", None) is not None,
    ),
    ("a soft cap of {} of its logits", lambda layer: getattr(layer.impl, "logits_soft_cap", None)),
    ("no KV of its own: it reads that of {}", lambda layer: layer.kv_sharing_target_layer_name),
    ("a KV cache of type {}; use --kv-cache-dtype auto", lambda layer: _quantised(layer.kv_cache_dtype)),
    (
        "values of another size than its keys ({})",
        lambda layer: getattr(layer, "head_size_v", layer.head_size) != layer.head_size and layer.head_size_v,
    ),
)
"""What a layer may not have: a text with a place for the value, and the value, false if all is well."""

_LAYER_SHAPE = ("num_heads", "num_kv_heads", "head_size")


def check_layers(layers: Mapping[str, Any]) -> None:
    """Raises if one of these layers cannot be served.

    Args:
        layers: vLLM's `Attention` modules that OasisKV is to serve, by their names: without those of a draft model, and without
            those with a bounded window, which vLLM goes on serving.

    Raises:
        UnsupportedModel: there is no layer, or one has what only its module tells, or they are not all of one shape. The
            message names the layer.
    """
    if not layers:
        raise UnsupportedModel("the model has no full-attention layer to serve")
    for name, layer in layers.items():
        for text, get in _LAYER_FAULTS:
            value = get(layer)
            if value:
                raise UnsupportedModel(f"layer {name} has {text.format(value)}")
    for attribute in _LAYER_SHAPE:
        if len(set(_values(layers.values(), attribute))) > 1:
            told = ", ".join(f"{getattr(layer, attribute)} in {name}" for name, layer in _firsts(layers, attribute))
            raise UnsupportedModel(f"{attribute} differs between layers ({told}); all that are served must have one shape")


def _unless(value: Any, allowed: str) -> object:
    return False if value == allowed else getattr(value, "value", value)


def _quantised(dtype: str) -> object:
    return dtype if dtype not in ("auto", "float16", "bfloat16", "float32") else False


def _values(layers: Iterable[Any], attribute: str) -> list[Any]:
    return [getattr(layer, attribute) for layer in layers]


def _firsts(layers: Mapping[str, Any], attribute: str) -> list[tuple[str, Any]]:
    """The first layer with each value."""
    first: dict[Any, tuple[str, Any]] = {}
    for name, layer in layers.items():
        first.setdefault(getattr(layer, attribute), (name, layer))
    return list(first.values())
