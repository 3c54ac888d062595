"""The KV connector: vLLM's hooks on both sides, each handed to who knows what to do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from oasiskv.errors import ConfigError, UnsupportedModel
from oasiskv.host_memory import physical_bytes
from oasiskv.log import event
from oasiskv.types import Rotary

from .backend import current_plan
from .batch_rows import Rows
from .block_manager import LendingBlockManager
from .checks import check_layers, check_settings, check_versions, on_cpu
from .decoder_layers import forget_modules
from .device_blocks import BlockReader, check_layout
from .ledger import Ledger
from .messages import Acknowledgement, Capacity, StepMessage
from .metrics import OasisKVPromMetrics, OasisKVStats
from .notices import COST, show_warnings, uses_hints, warn_of_lost_hints, why_no_hints
from .residual_stream import ResidualStream
from .rotary import rotary_of_model
from .settings import AdapterConfig
from .spec import OasisSpec
from .worker import Worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_HOST_SHARE = 2
"""Without arena_bytes, the arenas of an engine's workers may take one part in so many of the machine's memory."""

_REPORT_S = 1.0
"""Between reports of a worker whose counters are on a GPU."""

_DRAFT_FIRST, _DRAFT_LAST = 1, 256
"""What a draft model's layers keep of a request that was handed over: first device blocks, and last tokens."""


class OasisConnector(KVConnectorBase_V1, SupportsHMA):
    """Made by vLLM once in the scheduler and once in each worker."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = AdapterConfig.from_vllm(vllm_config)
        assert settings is not None
        check_versions()
        check_settings(vllm_config, settings)
        show_warnings()
        if role is KVConnectorRole.SCHEDULER:  # of which an engine has one, and workers many
            warn_of_lost_hints(vllm_config, settings.core.predictor)
        self._settings = settings
        self._group = _our_group(kv_cache_config)
        self._block_size: int = kv_cache_config.kv_cache_groups[self._group].kv_cache_spec.block_size
        self._ledger: Ledger | None = None
        self.worker: Worker | None = None
        self._next_report = 0.0

    def _layer_names(self) -> list[str]:
        """The layers of our group, in the order in which they run, without those of a draft model: these come after the model's
        own in number, or under a name of their own."""
        count = self._vllm_config.model_config.get_total_num_hidden_layers()
        names = self._kv_cache_config.kv_cache_groups[self._group].layer_names
        own = [name for name in names if not name.startswith("draft_model.") and extract_layer_index(name) < count]
        return sorted(own, key=extract_layer_index)

    # The scheduler's side

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Open the books, and give them to the block manager."""
        super().bind_kv_cache_manager(kv_cache_manager)
        manager = kv_cache_manager.coordinator.single_type_managers[self._group]
        assert isinstance(manager, LendingBlockManager)
        manager.beside = [one for one in kv_cache_manager.coordinator.single_type_managers if one is not manager]
        config, size = self._vllm_config, self._block_size
        drafts = len(self._layer_names()) < len(self._kv_cache_config.kv_cache_groups[self._group].layer_names)
        kept_first, kept_last = (_DRAFT_FIRST, -(-_DRAFT_LAST // size)) if drafts else (0, 0)
        most = self._settings.most_host_blocks(size, config.scheduler_config.max_num_batched_tokens)
        manager.ledger = self._ledger = Ledger(
            handover_tokens=self._settings.handover_tokens,
            block_size=size,
            lent_blocks=self._settings.budget_host_blocks(size),
            most_blocks=most + kept_first + kept_last,
            device_blocks=self._device_blocks,
            max_model_len=config.model_config.max_model_len,
            kept_first=kept_first,
            kept_last=kept_last,
            restores=len(self._kv_cache_config.kv_cache_groups) == 1,
            shares=bool(config.cache_config.enable_prefix_caching),
            always=self._settings.handover == "always",
            watermark_blocks=getattr(kv_cache_manager, "watermark_blocks", 0),  # which old versions do not have
        )

    @property
    def _device_blocks(self) -> int:
        """Blocks of vLLM for requests; one is never used."""
        assert self._kv_cache_manager is not None
        return self._kv_cache_manager.block_pool.num_gpu_blocks - 1

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """The workers say how much their hosts hold: what counts is the least."""
        said = [one.host_blocks for one in metadata.values() if isinstance(one, Capacity)]
        limits = [blocks for blocks in said if blocks is not None]
        self._books.host_blocks = min(limits) if limits else None
        longest, size = self._vllm_config.model_config.max_model_len, self._block_size
        on_device = self._device_blocks
        if limits and max(on_device, min(limits) - 1) * size < longest:
            ensure_kv_transfer_shutdown()  # a worker in this process would outlive the engine, and be found by the next one
            raise ConfigError(
                f"max_model_len is {longest}, but the KV space holds {on_device * size} tokens and the host "
                f"{(min(limits) - 1) * size}: raise arena_bytes or add a tier, or lower --max-model-len"
            )

    @property
    def _books(self) -> Ledger:
        assert self._ledger is not None
        return self._ledger

    def on_new_request(self, request: Request) -> None:
        """A request has arrived."""
        self._books.add(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """What the host has of a request; it is there at once."""
        return self._books.external_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """A request begins, or resumes."""
        self._books.admit(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMessage:
        """The message of this step."""
        assert self._kv_cache_manager is not None
        manager = self._kv_cache_manager
        return self._books.message(scheduler_output, lambda request_id: manager.get_block_ids(request_id)[self._group])

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """The workers' answer."""
        answer = connector_output.kv_connector_worker_meta
        if isinstance(answer, Acknowledgement):
            self._books.acknowledge(answer.stored)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request is over; its device blocks are free at once, since what the host keeps is there already."""
        self._books.finish(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`."""
        return self.request_finished(request, block_ids[self._group])

    def reset_cache(self) -> bool:
        """Forget what is on the host."""
        self._books.forget()
        return True

    # The worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The device memory is there: make the manager over it."""
        names = self._layer_names()
        layers = get_layers_from_vllm_config(self._vllm_config, Attention, names)
        caches = {name: kv_caches[name] for name in names}
        for name, cache in caches.items():
            check_layout(name, cache, self._block_size)
        check_layers({name: layers[name] for name in names})
        first = layers[names[0]]

        def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, mapping: torch.Tensor) -> None:
            first.impl.do_kv_cache_update(first, keys, values, cache, mapping)

        reader = BlockReader(caches[names[0]], write, self._settings.core.block_size)
        parallel = self._vllm_config.parallel_config
        workers = parallel.tensor_parallel_size
        core = self._settings.of_rank(parallel.data_parallel_index * workers + get_tensor_model_parallel_rank())
        if core.arena_bytes is None:
            core = replace(core, arena_bytes=physical_bytes() // _HOST_SHARE // workers)
        rotary = rotary_of_model(first.head_size)
        stream = self._residual_stream([layers[name] for name in names], rotary)
        self.worker = worker = Worker(core, caches, first.num_heads, reader, rotary, stream)
        if worker.stream is not None:
            worker.stream.show(partial(_hint, worker, names))

    def _residual_stream(self, attentions: list[Attention], rotary: Rotary | None) -> ResidualStream | None:
        """Where hints come from, if they can be had."""
        heads, head_dim = attentions[0].num_heads, attentions[0].head_size
        usable = why_no_hints(self._vllm_config) is None
        stream = ResidualStream.around(list(attentions), heads, head_dim, rotary) if usable else None
        forget_modules()
        if usable and stream is None and uses_hints(self._settings.core.predictor) and not get_tensor_model_parallel_rank():
            event(logging.WARNING, "hints-off", reason="the model is not built as Llama is", cost=COST)
        return stream

    def get_handshake_metadata(self) -> Capacity | None:
        """How much the host holds, of a store that the workers share their part."""
        if self.worker is None:
            return None
        blocks = self.worker.host_blocks
        users = self._vllm_config.parallel_config.tensor_parallel_size if self._settings.shares_tiers else 1
        return Capacity(None if blocks is None else blocks // users)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """The first hook of a step: obey its message before anything is overwritten."""
        assert isinstance(kv_connector_metadata, StepMessage)
        if self.worker is not None:
            self.worker.obey(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing to start: loads of a layer begin with the attention of the step before."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for here: the attention of a layer waits for the layer's own ticket."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Start to copy the blocks of a layer that are full now."""
        if self.worker is not None:
            self.worker.copy_layer(layer_name)

    def wait_for_save(self) -> None:
        """Copies need no waiting: blocks are freed only after they were acknowledged. But with several KV cache groups vLLM may
        write into blocks of a GPU before it tells of the next step: by then nothing must be on its way into lent ones."""
        if self.worker is not None and not on_cpu(self._vllm_config) and len(self._kv_cache_config.kv_cache_groups) > 1:
            self.worker.manager.scheduler.drain()

    def build_connector_worker_meta(self) -> Acknowledgement | None:
        """What has arrived on the host since the last step."""
        stored = self.worker.take_stored() if self.worker is not None else {}
        return Acknowledgement(stored) if stored else None

    # Metrics

    def get_kv_connector_stats(self) -> OasisKVStats | None:
        """What has happened since the last call, on this side; of a GPU, which must be waited for, once a second."""
        if self.worker is not None:
            now = monotonic()
            if now < self._next_report:
                return None
            if not on_cpu(self._vllm_config):
                self._next_report = now + _REPORT_S
            return OasisKVStats.of(self.worker.report(), get_tensor_model_parallel_rank())
        return OasisKVStats.of(self._ledger.report() if self._ledger is not None else {})

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> OasisKVStats:
        """A report that has come from another process."""
        return OasisKVStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> OasisKVPromMetrics:
        """What `/metrics` shows."""
        return OasisKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # The end

    def shutdown(self) -> None:
        """Stop the background work and give the host memory back."""
        if self.worker is not None:
            self.worker.close()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Attention of handed-over requests is Python: graphs may cover what lies between."""
        return True


def _hint(worker: Worker, names: list[str], number: int, project: Callable[[Rows], torch.Tensor]) -> None:
    """Something is known of a layer to come."""
    plan = current_plan(worker, names[number])
    if plan is not None:
        worker.hint(number, plan, project)


def _our_group(kv_cache_config: KVCacheConfig) -> int:
    """The KV cache group whose layers OasisKV can attend for."""
    ours = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        specs: Iterable[object] = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
        if any(isinstance(one, OasisSpec) for one in specs):
            ours.append(number)
    if len(ours) != 1:
        raise UnsupportedModel(
            f"vLLM made {len(ours)} KV cache groups of layers with full attention that OasisKV can serve; it needs one. "
            "On CUDA, also pass --attention-backend CUSTOM"
        )
    return ours[0]
