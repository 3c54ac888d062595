"""What caches of transformers and their layers can do, and an `OasisCache` cannot. The names are those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Never

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from oasiskv.errors import UnsupportedModel

_OFFLOAD = "an OasisCache is not offloaded by layers, since the full KV is in host memory already; lower budget_tokens instead"


class NoLayerAlone(CacheLayerMixin):
    """A cache layer that changes together with all others. What changes it alone is refused."""

    def reset(self) -> Never:
        """Refused: see `OasisCache.reset`."""
        raise _of_the_cache("reset")

    def crop(self, tokens_to_remove: int) -> Never:
        """Refused: see `OasisCache.crop`."""
        raise _of_the_cache("crop")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> Never:
        """Refused: see `OasisCache.reorder_cache`."""
        raise _of_the_cache("reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> Never:
        """Refused: see `OasisCache.batch_repeat_interleave`."""
        raise _of_the_cache("batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> Never:
        """Refused: see `OasisCache.batch_select_indices`."""
        raise _of_the_cache("batch_select_indices")

    def offload(self) -> Never:
        """Refused: the full KV is in host memory."""
        raise UnsupportedModel(_OFFLOAD)

    def prefetch(self) -> Never:
        """Refused: see `offload`."""
        raise UnsupportedModel(_OFFLOAD)

    def __reduce_ex__(self, protocol: object) -> Never:
        raise UnsupportedModel("a layer of an OasisCache has no tensors of its own; copy the whole cache with copy.deepcopy")


class NoStaticTensors(Cache):
    """A cache that holds no tensor per layer."""

    def early_initialization(self, *args: Any, **kwargs: Any) -> Never:  # noqa: ANN401 - the signature of transformers
        """Static caches and exported graphs fix their shapes in advance; a working set does not."""
        raise UnsupportedModel("an OasisCache cannot be compiled or exported with static shapes; generate without compiling")

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> Never:
        """Refused: the full KV is in host memory."""
        raise UnsupportedModel(_OFFLOAD)

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> Never:
        """Refused: see `offload`."""
        raise UnsupportedModel(_OFFLOAD)

    def __iter__(self) -> Iterator[Never]:
        raise UnsupportedModel("an OasisCache has no tensors per layer to iterate over; KVManager.full_kv reads what it holds")

    def __copy__(self) -> Never:
        raise UnsupportedModel(
            "copy.copy of an OasisCache would be a second name for the same sequences; copy.deepcopy forks them, and is cheap"
        )

    def __reduce_ex__(self, protocol: object) -> Never:
        raise UnsupportedModel(
            "an OasisCache cannot be pickled or saved: it is bound to its model and to memory of this process; copy.deepcopy "
            "forks it, and KVManager.full_kv reads what it holds"
        )


def _of_the_cache(method: str) -> UnsupportedModel:
    return UnsupportedModel(f"the layers of an OasisCache change together, not one alone; call {method} of the cache")
