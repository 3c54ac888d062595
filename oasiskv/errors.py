"""Every error that OasisKV raises on purpose. Each message names the field, the value and the fix."""

from typing import Self


class OasisError(Exception):
    """Base of all errors of this library."""

    @classmethod
    def of(cls, what: str, error: BaseException) -> Self:
        """The error that tells of `error`; `what` has failed."""
        told = cls(f"{what} failed: {type(error).__name__}: {error}")
        told.__cause__ = error
        return told


class ConfigError(OasisError, ValueError):
    """A setting that cannot work, alone or together with another one."""


class InputError(OasisError, ValueError):
    """An argument of a call that does not fit the object it is passed to."""


class BatchIndexError(InputError, IndexError):
    """Indices or a count of repeats that do not fit the sequences of a cache."""


class StateError(OasisError, RuntimeError):
    """A call in the wrong order: a layer twice, a step on a freed sequence, a closed manager."""


class CapacityError(OasisError, MemoryError):
    """A memory limit that the request would exceed. The message says how many bytes it needs."""


class PoolExhausted(CapacityError):
    """The device pool has no free slots (`pool_bytes`)."""


class ArenaExhausted(CapacityError):
    """The host arena has no free slots (`arena_bytes`)."""


class TierError(OasisError):
    """Base of what goes wrong with a tier store."""


class TierUnavailable(TierError, ConnectionError):
    """A tier store cannot work now: its medium fails, or its peer does not answer. Trying again later may help."""


class TierFull(TierError, CapacityError):
    """A tier store has no room (`limit`, or its medium) and cannot make any."""


class LayoutMismatch(TierError, ValueError):
    """What a tier store holds was written for another segment layout, or by another version."""


class SegmentLost(TierError, LookupError):
    """KV that a sequence needs whole is missing or damaged in the tier store, and nowhere else."""


class WorkerError(OasisError, RuntimeError):
    """A background lane failed. `__cause__` holds the exception of the lane."""


class PluginError(OasisError, ImportError):
    """A plug-in that was asked for by name is unknown or broken."""


class UnsupportedModel(OasisError, TypeError):
    """A model, cache or generation mode that the library cannot serve."""


class IntegrityError(OasisError, AssertionError):
    """Something that must always hold does not: a fault of this library, or memory written from outside."""


class ReferenceOpsWarning(UserWarning):
    """There are no native kernels for the CPU, so the pure-torch reference runs in their place. Given once, at first use."""
