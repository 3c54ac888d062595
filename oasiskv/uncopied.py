"""Things that the copy and pickle modules must leave alone."""

from __future__ import annotations

from typing import Never

from .errors import UnsupportedModel


class Uncopied:
    """Base of what stands for memory of this process, places in it, or threads. A copy would be all of the memory again, or
    would free what the first one uses. So copying and pickling raise `UnsupportedModel`, which is a `TypeError`."""

    def __reduce_ex__(self, protocol: object) -> Never:
        raise UnsupportedModel(
            f"a {type(self).__name__} cannot be copied or pickled: it stands for memory of this process; KVManager.fork makes "
            "a second sequence with the same tokens, and KVManager.full_kv reads what one holds"
        )
