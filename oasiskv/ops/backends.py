"""Which implementation serves each op: native code where its library is there, else the pure-torch reference.

`OASISKV_OPS=reference` leaves native code out; `OASISKV_OPS=native` makes it an error not to have it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from ..errors import ConfigError, ReferenceOpsWarning
from ._library import Library, LibraryUnavailable, load
from .native import Attention, Moves
from .native_cuda import on_device
from .native_selection import Selection
from .native_step import Steps
from .native_summaries import Bit2, MinMax
from .native_tables import Guesses, Transfers
from .native_transform import Transform

VARIABLE = "OASISKV_OPS"
_GROUPS: tuple[type, ...] = (Moves, Attention, Selection, Steps, Transfers, Guesses, MinMax, Bit2, Transform)
"""Each is made with a library and has ops as methods."""

CPU_ONLY: tuple[type, ...] = (Steps, Transfers, Guesses)
"""What the CUDA library has no code for: on a GPU these are made of other ops, its own and torch's."""

COMPOSED = ("corrected_attention", "load_blocks")
"""Those whose references take ops of ours that they are made of, as `pieces`."""


class Backends:
    """The implementations beside the reference, registered with `library` for the life of the process."""

    def __init__(self, registry: torch.library.Library, references: dict[str, Callable[..., Any]]) -> None:
        self._wanted = os.environ.get(VARIABLE, "")
        if self._wanted not in ("", "native", "reference"):
            raise ConfigError(f"{VARIABLE} is {self._wanted!r}; it must be native, reference or unset")
        self._names = tuple(references)
        self._warned = False
        self.cpu: Library | None = None
        self.cuda: Library | None = None
        if self._wanted == "reference":
            return
        try:
            self.cpu = load("cpu")
        except LibraryUnavailable as reason:
            if self._wanted == "native":
                raise ConfigError(
                    f"{VARIABLE} is native, but {reason}; install a C++ compiler and build OasisKV again, or unset {VARIABLE}"
                ) from reason
            self._warn_at_first_use(registry, references, str(reason))
        else:
            self._register(registry, self.cpu, "CPU")
        if torch.version.cuda is not None:
            try:
                self.cuda = load("cuda")
            except LibraryUnavailable:
                return  # said by available(); a machine without CUDA kernels is not a mistake
            self._register(registry, self.cuda, "CUDA", lambda name, native: on_device(name, native, references[name]))
            for name in set(COMPOSED) - self.cuda.ops:
                registry.impl(name, partial(references[name], pieces=torch.ops.oasiskv), "CUDA")

    def available(self) -> dict[str, dict[str, str]]:
        """For each op, "native" or "reference" for "cpu" and for "cuda"."""
        libraries = {"cpu": self.cpu, "cuda": self.cuda}
        return {
            name: {
                device: "native" if library and name in library.ops else "reference" for device, library in libraries.items()
            }
            for name in self._names
        }

    def _register(
        self,
        registry: torch.library.Library,
        library: Library,
        key: str,
        wrapped: Callable[[str, Callable[..., Any]], Callable[..., Any]] = lambda _, native: native,
    ) -> None:
        for group in _GROUPS:
            implementation = group(library)
            for name in library.ops.intersection(vars(group)):
                registry.impl(name, wrapped(name, getattr(implementation, name)), key)

    def _warn_at_first_use(
        self, registry: torch.library.Library, references: dict[str, Callable[..., Any]], reason: str
    ) -> None:
        """Importing is silent: who only reads a configuration needs no kernels."""

        def warning(function: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(function)
            def call(*arguments: object) -> Any:  # noqa: ANN401 (what the op returns)
                if not self._warned:
                    self._warned = True
                    warnings.warn(
                        f"OasisKV runs its pure-torch reference on the CPU, many times slower than its kernels: {reason}. "
                        f"Set {VARIABLE}=reference if that is meant",
                        ReferenceOpsWarning,
                        stacklevel=2,
                    )
                return function(*arguments)

            return call

        for name, function in references.items():
            registry.impl(name, warning(function), "CPU")
