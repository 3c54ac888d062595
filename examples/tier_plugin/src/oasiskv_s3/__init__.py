"""A tier of OasisKV in an object store: `s3:bucket/prefix?endpoint=http://127.0.0.1:9000`."""

from .store import S3Store

__all__ = ["S3Store"]
