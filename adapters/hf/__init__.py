"""HuggingFace transformers: `generate` with a bounded KV working set."""

from .cache import OasisCache

__all__ = ["OasisCache"]
