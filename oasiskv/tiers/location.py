"""Where a tier store is: `name:path?option=value&...`, as users write it in a configuration."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl

from ..errors import ConfigError

_PATTERN = re.compile(r"(?P<name>[a-z][a-z0-9_-]*):(?P<path>[^?]*)(?:\?(?P<options>.*))?", re.DOTALL)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB|kB|MB|GB|TB)?")
_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def parse_bytes(text: str) -> int | None:
    """Bytes of `4096`, `512MiB` or `1.5 GB`; `None` for what is no size, or none of at least a byte."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2] or "B"]) if match else 0
    return size or None


def local_path(path: str | os.PathLike[str]) -> Path:
    """A path of this machine, with the home directory for `~` and `~user`. Raises `ConfigError` for an unknown user."""
    text = os.fspath(path)
    expanded = os.path.expanduser(text)  # a Path would take ./~ for ~
    if expanded.startswith("~"):
        raise ConfigError(
            f"path {text!r} begins with the home directory of a user that this machine does not have; write the whole path, or "
            "./ before a name that begins with ~"
        )
    return Path(expanded)


@dataclass
class Location:
    """A parsed location. A store takes the options that it knows and then calls `finish`, which refuses the others.

    Attributes:
        name: of the plug-in.
        path: whatever the plug-in makes of it: a folder, a host and port, a bucket; may be empty.
    """

    name: str
    path: str
    text: str
    _options: dict[str, str] = field(default_factory=dict)
    _known: list[str] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str) -> Location:
        """Raises `ConfigError` when `text` is no location."""
        match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ConfigError(
                f"tier {text!r} is no location; write name:path?option=value, such as file:/var/cache/kv?limit=20GiB"
            )
        try:
            pairs = parse_qsl(match["options"] or "", keep_blank_values=True, strict_parsing=bool(match["options"]))
        except ValueError as error:
            raise ConfigError(
                f"tier {text!r} has options that cannot be read ({error}); write ?option=value&option=value"
            ) from error
        options = dict(pairs)
        if len(options) != len(pairs):
            raise ConfigError(f"tier {text!r} gives an option twice")
        return cls(match["name"], match["path"], text, options)

    def option(self, name: str, default: str = "") -> str:
        """Take an option as text."""
        self._known.append(name)
        return self._options.get(name, default)

    def size(self, name: str, default: int | None = None) -> int | None:
        """Take an option as a number of bytes: `4096`, `1.5GiB`, `20 GB`. Raises `ConfigError`."""
        text = self.option(name)
        if not text:
            return default
        size = parse_bytes(text)
        if size is None:
            raise ConfigError(
                f"option {name} of tier {self.text!r} is {text!r}; it must be a size such as 4096, 512MiB or 1.5GiB"
            )
        return size

    def limit(self, segment_bytes: int) -> int | None:
        """Take the option `limit`, a number of bytes that has room for a segment. Raises `ConfigError`."""
        limit = self.size("limit")
        if limit is not None and limit < segment_bytes:
            raise ConfigError(
                f"option limit of tier {self.text!r} is {limit} bytes, and one segment takes {segment_bytes}; it must be at "
                f"least limit={segment_bytes}"
            )
        return limit

    def flag(self, name: str, default: bool) -> bool:
        """Take an option as yes or no. Raises `ConfigError`."""
        text = self.option(name)
        if text not in ("", "yes", "no"):
            raise ConfigError(f"option {name} of tier {self.text!r} is {text!r}; it must be yes or no")
        return default if not text else text == "yes"

    def finish(self) -> None:
        """Raises `ConfigError` for an option that nobody has taken."""
        for name in self._options:
            if name not in self._known:
                known = ", ".join(sorted(self._known)) or "none"
                raise ConfigError(f"tier {self.text!r} has no option {name!r}; its options are: {known}")
