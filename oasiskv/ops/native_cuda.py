"""What a call on a GPU needs beyond one on the CPU: the right device, and host memory that the device can read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def device_of(tensors: Iterable[Tensor]) -> torch.device | None:
    """The one CUDA device of some tensors, if kernels there can read all of them: those on the host must be page-locked."""
    device: torch.device | None = None
    for tensor in tensors:
        if tensor.is_cuda:
            if device is not None and tensor.device != device:
                return None
            device = tensor.device
        elif tensor.numel() and not tensor.is_pinned():
            return None
    return device


def on_device(native: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """`native`, run on the device of its tensors; `reference` where no single device can read all of them.

    Kernels are launched on the current stream of the current device, which need not be that of the tensors.
    """

    @wraps(native)
    def call(*arguments: object) -> Any:  # noqa: ANN401 (what the op returns)
        device = device_of(argument for argument in arguments if isinstance(argument, Tensor))
        if device is None:
            return reference(*arguments)
        if device.index == torch.cuda.current_device():
            return native(*arguments)
        with torch.cuda.device(device):
            return native(*arguments)

    return call
