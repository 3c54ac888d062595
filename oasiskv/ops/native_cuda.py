"""What a call on a GPU needs beyond one on the CPU: the right device, and host memory that the device can read.

Kernels read and write the arena in place. It is page-locked, and never freed while work may be under way. Other tensors on the
host, such as summaries that grow there, are left to the reference, which copies and waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

ON_THE_ARENA = frozenset({"copy_blocks", "paged_attention", "exact_logits"})


def device_of(tensors: Iterable[Tensor], host_memory: bool) -> torch.device | None:
    """The one CUDA device of some tensors, if kernels there can read all of them: those on the host, if there may be any, must
    be page-locked."""
    device: torch.device | None = None
    for tensor in tensors:
        if tensor.is_cuda:
            if device is not None and tensor.device != device:
                return None
            device = tensor.device
        elif tensor.numel() and not (host_memory and tensor.is_pinned()):
            return None
    return device


def on_device(name: str, native: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """`native`, run on the device of its tensors; `reference` where no single device can read all of them.

    Kernels are launched on the current stream of the current device, which need not be that of the tensors.
    """

    @wraps(native)
    def call(*arguments: object) -> Any:  # noqa: ANN401 (what the op returns)
        device = device_of((each for each in arguments if isinstance(each, Tensor)), name in ON_THE_ARENA)
        if device is None:
            torch.cuda.synchronize()  # the host will read what kernels may be writing
            return reference(*arguments)
        if device.index == torch.cuda.current_device():
            return native(*arguments)
        with torch.cuda.device(device):
            return native(*arguments)

    return call
