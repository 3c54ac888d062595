"""OasisKV: the KV cache in host memory, a bounded working set per kv head on the device."""

from .config import OasisConfig
from .errors import OasisError
from .manager import KVManager
from .metrics import Stats
from .sequence import Phase, Sequence
from .step import Step
from .trace import Trace
from .types import ModelShape, Rotary

__version__ = "0.1.0"

__all__ = ["KVManager", "ModelShape", "OasisConfig", "OasisError", "Phase", "Rotary", "Sequence", "Stats", "Step", "Trace"]
