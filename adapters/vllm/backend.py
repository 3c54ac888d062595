"""The attention backend: vLLM's own, but for the rows of requests that were handed over."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

from .batch_rows import Rows, rows_of
from .checks import check_settings
from .decoder_layers import watch_modules
from .settings import AdapterConfig
from .worker import Plan, Worker


class Batch:
    """What one attention metadata object is about. Attached to it by the builder; plans are made at the first layer that asks,
    when the scheduler's message is there.

    Attributes:
        idle: whether a layer has found that there is nothing to do in this batch, for any layer.
    """

    def __init__(self, build: Any, common: CommonAttentionMetadata) -> None:
        self.idle = False
        self._build = build
        self._common = common
        self._plan: Plan | None = None
        self._rest: tuple[Any, Rows] | None = None
        self._beside: Any = None

    def plan(self, worker: Worker) -> Plan:
        """Whose the rows are, for our layers."""
        if self._plan is None:
            common = self._common
            starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
            self._plan = worker.plan(starts, _lengths(common), common.block_table_tensor)
        return self._plan

    def rest(self, dense: list[int]) -> tuple[Any, Rows]:
        """Metadata of the requests that vLLM attends to, and their tokens."""
        if self._rest is None:
            common, tokens = select_requests(self._common, dense)
            self._rest = self._build(0, common), tokens
        return self._rest

    def beside(self, worker: Worker, own: Any) -> Any:
        """Metadata for layers that are not ours, such as a draft model's: they see of handed-over requests what is left of
        them."""
        if self._beside is None:
            common = without_freed(self._common, worker)
            self._beside = own if common is None else self._build(0, common)
        return self._beside


def select_requests(common: CommonAttentionMetadata, numbers: list[int]) -> tuple[CommonAttentionMetadata, Rows]:
    """The metadata of some requests of a batch, and which tokens are theirs."""
    index = torch.tensor(numbers, device=common.seq_lens.device)
    host = torch.tensor(numbers)
    starts = common.query_start_loc_cpu
    counts = (starts[1:] - starts[:-1])[host]
    tokens = rows_of([(int(starts[number]), int(starts[number + 1] - starts[number])) for number in numbers], index.device)
    ends = torch.zeros(len(numbers) + 1, dtype=starts.dtype)
    ends[1:] = counts.cumsum(0)
    per_request = {
        entry.name: value[index if value.device == index.device else host]
        for entry in dataclasses.fields(common)
        if isinstance(value := getattr(common, entry.name), torch.Tensor)
        and entry.name
        in (
            "seq_lens",
            "block_table_tensor",
            "is_prefilling",
            "seq_lens_cpu_upper_bound",
            "_seq_lens_cpu",
            "_num_computed_tokens_cpu",
        )
    }
    return (
        dataclasses.replace(
            common,
            **per_request,
            query_start_loc=ends.to(common.query_start_loc.device),
            query_start_loc_cpu=ends,
            num_reqs=len(numbers),
            num_actual_tokens=int(counts.sum()),
            max_query_len=int(counts.max()),
            slot_mapping=common.slot_mapping[tokens],
            positions=common.positions[tokens] if common.positions is not None else None,
        ),
        tokens,
    )


def without_freed(common: CommonAttentionMetadata, worker: Worker) -> CommonAttentionMetadata | None:
    """The metadata of a batch in which handed-over requests have only the blocks that they still hold: keys carry their
    positions, so leaving blocks out is leaving tokens out. `None` if there are none."""
    tables, lengths = common.block_table_tensor, common.seq_lens
    changed = False
    own = _lengths(common)
    for number, row in enumerate(worker.rows_at(tables, [length - 1 for length in own])):
        if row is None or not row.lent:
            continue
        if not changed:
            tables, lengths, changed = tables.clone(), lengths.clone(), True
        first, last = row.freed
        kept = torch.cat([tables[number, :first], tables[number, last:]])
        tables[number, : len(kept)] = kept
        lengths[number] -= (last - first) * worker.block_size
    return dataclasses.replace(common, block_table_tensor=tables, seq_lens=lengths) if changed else None


def _lengths(common: CommonAttentionMetadata) -> list[int]:
    """Tokens of each request after this step. What the host knows is exact, since drafts are never scheduled ahead of time."""
    known = common.seq_lens_cpu_upper_bound
    lengths: list[int] = (known if known is not None else common.seq_lens)[: common.num_reqs].tolist()
    return lengths


def current_worker() -> Worker | None:
    """The worker's side of our connector, if it is in use. Asked by each layer of each forward."""
    connector = get_kv_transfer_group() if has_kv_transfer_group() else None
    worker = getattr(connector, "worker", None)
    return worker if isinstance(worker, Worker) else None


def current_plan(worker: Worker, layer_name: str) -> Plan | None:
    """Whose the rows of the forward are that runs now, before the layer attends; `None` if nobody's."""
    metadata = get_forward_context().attn_metadata
    batch = getattr(metadata.get(layer_name), "oasis", None) if isinstance(metadata, dict) else None
    return batch.plan(worker) if batch is not None else None


def builder_over(base: type[AttentionMetadataBuilder]) -> type[AttentionMetadataBuilder]:
    """A metadata builder that remembers what its metadata was built from. So metadata is built anew for every KV cache group
    and for every step of a draft model, where `base` might change the tables of what is there."""

    class OasisBuilder(base):
        supports_update_block_table = False

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.supports_draft_decode_metadata_update = False

        def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> Any:
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            metadata.oasis = Batch(super().build, common_attn_metadata)
            return metadata

    return OasisBuilder


def impl_over(base: type[AttentionImpl]) -> type[AttentionImpl]:
    """An attention layer that leaves the rows of handed-over requests to OasisKV."""

    class OasisImpl(base):
        def forward(
            self,
            layer: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            kv_cache: torch.Tensor,
            attn_metadata: Any,
            output: torch.Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> torch.Tensor:
            stock = super().forward
            batch = getattr(attn_metadata, "oasis", None)
            if batch is None or batch.idle or (worker := current_worker()) is None:
                return stock(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
            number = worker.layer_number(layer.layer_name)
            if number is None:
                beside = batch.beside(worker, attn_metadata)
                return stock(layer, query, key, value, kv_cache, beside, output, *args, **kwargs)
            plan = batch.plan(worker)
            worker.check_stream(number, plan, query)
            if plan.watched:
                worker.watch(number, plan, query, self.scale)
            if plan.step is None:
                batch.idle = not plan.watched and not worker.checks_stream
                return stock(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
            if plan.dense:
                metadata, tokens = batch.rest(plan.dense)
                part = output[tokens]
                stock(layer, query[tokens], key[tokens], value[tokens], kv_cache, metadata, part, *args, **kwargs)
                output[tokens] = part
            ours = plan.ours
            own = query[ours]
            if own.is_cuda and isinstance(ours, slice):
                own = own.clone()  # background work may read it after the graph that owns this memory has used it again
            output[ours] = worker.attend(number, own, key[ours], value[ours], self.scale)
            return output

    return OasisImpl


def backend_over(base: type[AttentionBackend]) -> type[AttentionBackend]:
    """An attention backend that is `base` in all but this."""
    impl, builder = impl_over(base.get_impl_cls()), builder_over(base.get_builder_cls())

    class OasisBackend(base):
        in_use = False

        @classmethod
        def get_impl_cls(cls) -> type[AttentionImpl]:
            # Layers are made, and come here, while the configuration of their engine is the current one; specs are made later.
            config = get_current_vllm_config_or_none()
            settings = AdapterConfig.from_vllm(config) if config is not None else None
            if config is not None:
                check_settings(config, settings)
            cls.in_use = settings is not None
            if cls.in_use:
                watch_modules()
            return impl if cls.in_use else base.get_impl_cls()

        @classmethod
        def get_builder_cls(cls) -> type[AttentionMetadataBuilder]:
            return builder if cls.in_use else base.get_builder_cls()

        @classmethod
        def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
            from .spec import lendable

            spec = super().customize_spec(spec)
            return lendable(spec) if cls.in_use else spec

    return OasisBackend
