"""What a location says: `s3:bucket/prefix?endpoint=...&region=...&connections=16&timeout=2`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from oasiskv.errors import ConfigError
from oasiskv.tiers import Location


@dataclass(frozen=True)
class Options:
    """Where the objects are, and how they are reached.

    Attributes:
        bucket: which must exist.
        prefix: of the objects' names, without a slash at its end; may be empty.
        endpoint: URL of the server; empty for AWS.
        region: of the bucket; empty for that of the environment.
        connections: most requests at the same time.
        timeout_s: how long the server may be silent. A request is tried twice.
    """

    bucket: str
    prefix: str = ""
    endpoint: str = ""
    region: str = ""
    connections: int = 16
    timeout_s: float = 2.0

    @classmethod
    def at(cls, location: Location) -> Self:
        """Raises `ConfigError`."""
        bucket, _, prefix = location.path.partition("/")
        if not bucket:
            raise ConfigError(f"tier {location.text!r} names no bucket; write s3:bucket/prefix")
        options = cls(
            bucket,
            prefix.strip("/"),
            endpoint=location.option("endpoint"),
            region=location.option("region"),
            connections=int(_number(location, "connections", 16, whole=True)),
            timeout_s=_number(location, "timeout", 2.0),
        )
        location.finish()
        return options

    def __str__(self) -> str:
        """The place, for messages."""
        return f"s3:{self.bucket}/{self.prefix} at {self.endpoint or 'AWS'}"

    def name(self, rest: str) -> str:
        """The full name of an object."""
        return f"{self.prefix}/{rest}" if self.prefix else rest


def _number(location: Location, name: str, default: float, whole: bool = False) -> float:
    text = location.option(name) or str(default)
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = 0
    if not 0 < value < 1e6:
        kind = "a whole number above 0" if whole else "a number of seconds above 0"
        raise ConfigError(f"option {name} of tier {location.text!r} is {text!r}; it must be {kind}")
    return value
