"""Writes oasiskv/ops/_abi.py from include/oasiskv.h, so that the two cannot disagree.

python kernels/generate_bindings.py
"""

from __future__ import annotations

import re
from pathlib import Path

HEADER = Path(__file__).parent / "include" / "oasiskv.h"
BINDINGS = Path(__file__).parents[1] / "oasiskv" / "ops" / "_abi.py"

# What the caller may leave out: filled in per device, not per op.
DEFAULTS = {"num_threads": "1", "stream": "0", "scratch": "0", "scratch_bytes": "0"}

_STRUCT = re.compile(r"typedef struct \{\n(.*?)\n\} oasis_(\w+)_args;", re.DOTALL)
_FIELD = re.compile(r"(?:const )?(?:(?:void|float|int64_t|uint8_t) (\*)|(int64_t|float) )(\w+);(?: +/\*.*\*/)?")
_ENUM = re.compile(r"enum oasis_(\w+) \{\n(.*?)\n\};", re.DOTALL)


def fields_of(body: str) -> list[tuple[str, str]]:
    """Name and `struct` format of each field. Raises `ValueError` on a line that is no field of a known type."""
    fields = []
    for line in body.splitlines():
        found = _FIELD.fullmatch(line.strip())
        if found is None:
            raise ValueError(f"{HEADER.name}: not a field that the bindings know: {line.strip()}")
        pointer, number, name = found.groups()
        fields.append((name, "P" if pointer else {"int64_t": "q", "float": "f"}[number]))
    return fields


def generate(header: str) -> str:
    """The text of `_abi.py`."""
    version = re.search(r"#define OASIS_ABI_VERSION (\d+)", header)
    if version is None:
        raise ValueError(f"{HEADER.name} defines no OASIS_ABI_VERSION")
    lines = [
        '"""Generated from kernels/include/oasiskv.h by kernels/generate_bindings.py. Do not edit.',
        "",
        "Each op has a function that packs its arguments as the C struct has them. Pointers are integers.",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        "from collections.abc import Callable",
        "from struct import Struct",
        "",
        f"VERSION = {version[1]}",
    ]
    numbers: dict[str, int] = {}
    for name, body in _ENUM.findall(header):
        members = {member.lower(): int(value) for member, value in re.findall(r"OASIS_(\w+) = (\d+)", body)}
        if name == "op":
            numbers = members
        else:
            lines += ["", *(f"{member.upper()} = {value}" for member, value in members.items())]
    structs = {name: fields_of(body) for body, name in _STRUCT.findall(header)}
    if list(structs) != list(numbers):
        raise ValueError(f"{HEADER.name}: enum oasis_op and the structs differ: {set(structs) ^ set(numbers) or 'in order'}")
    for name, fields in structs.items():
        # "@": native alignment; the empty item at the end pads as the compiler does.
        lines += ["", f'_{name} = Struct("@{"".join(kind for _, kind in fields)}0q")']
    for name, fields in structs.items():
        lines += ["", "", f"def {name}(", "    *,"]
        lines += [
            f"    {field}: {'float' if kind == 'f' else 'int'}{f' = {DEFAULTS[field]}' if field in DEFAULTS else ''},"
            for field, kind in fields
        ]
        lines += [") -> bytes:", f'    """Arguments of `oasis_{name}`."""', f"    return _{name}.pack("]
        lines += [*(f"        {field}," for field, _ in fields), "    )"]
    lines += ["", "", "PACK: dict[str, Callable[..., bytes]] = {", *(f'    "{name}": {name},' for name in structs), "}"]
    lines += ["", "NUMBERS = {", *(f'    "{name}": {number},' for name, number in numbers.items()), "}"]
    lines += ["", "SIZES = {", *(f'    "{name}": _{name}.size,' for name in structs), "}"]
    scratch = [name for name, fields in structs.items() if ("scratch", "P") in fields]
    lines += ["", "WITH_SCRATCH = {", *(f'    "{name}",' for name in scratch), "}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    BINDINGS.write_text(generate(HEADER.read_text()))
