"""Compiles the CUDA kernels with g++ against the emulator, into libraries with the C ABI and the functions `emu_*`."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels"
COMPILER = shutil.which("g++")

_COMMON = [
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
]
# Contraction is off so that __fmul_rn and __fadd_rn are what they say.
_KERNEL = [*_COMMON, "-O1", "-ffp-contract=off"]
_RUNTIME = [*_COMMON, "-O2"]

# What the kernels are compiled with, the emulator, and what the library is linked with. "checked" has the compiler announce
# every access, as for ThreadSanitizer; the emulator's own hooks take the announcements.
_FLAGS = {
    "plain": ([], [], []),
    "checked": (["-fsanitize=thread"], ["-DOASIS_EMU_CHECKED"], []),
    "sanitized": (
        ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
        ["-fsanitize=address"],
        ["-fsanitize=address,undefined"],
    ),
}


_ONE_HEAD_DIM = "-DOASIS_HEAD_DIMS(X)=X(64)"  # compiles five times as fast


def kernel_sources() -> list[Path]:
    return sorted((KERNELS / "cuda").glob("*.cu"))


def _compile(source: Path, flags: list[str], folder: Path, roots: list[Path], language: str) -> Path:
    target = folder / f"{source.stem}-{language.replace('+', 'x')}.o"
    includes = [
        f"-I{root}" for root in (*roots, KERNELS / "cuda", KERNELS / "emu/include", KERNELS / "emu", KERNELS / "include")
    ]
    command = [str(COMPILER), *flags, *includes, "-c", "-x", "c++", str(source), "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    return target


class Build:
    """The objects of one variant, and libraries linked from them."""

    def __init__(self, variant: str, folder: Path) -> None:
        self.folder = folder
        self._kernel_flags, runtime_flags, self._link_flags = _FLAGS[variant]
        self._kernel_flags = [*_KERNEL, *self._kernel_flags]
        folder.mkdir(parents=True, exist_ok=True)
        runtime = sorted((KERNELS / "emu").glob("*.cpp"))
        with ThreadPoolExecutor(2) as pool:
            objects = [pool.submit(_compile, source, self._kernel_flags, folder, [], "cuda") for source in kernel_sources()]
            others = [pool.submit(_compile, source, [*_RUNTIME, *runtime_flags], folder, [], "c++") for source in runtime]
            self.kernels = {source.name: job.result() for source, job in zip(kernel_sources(), objects, strict=True)}
            self.runtime = [job.result() for job in others]

    def link(self, name: str, replaced: dict[str, Path] | None = None) -> Path:
        """A library of all objects, some of them replaced."""
        target = self.folder / f"{name}.so"
        objects = [*({**self.kernels, **(replaced or {})}.values()), *self.runtime]
        command = [str(COMPILER), "-shared", *self._link_flags, *map(str, objects), "-o", str(target)]
        subprocess.run(command, check=True, timeout=120)
        return target

    def with_change(self, name: str, file: str, before: str, after: str) -> Path:
        """A library in which one place of one source file reads otherwise. The place must be the only one of its kind."""
        folder = self.folder / name
        folder.mkdir()
        text = (KERNELS / "cuda" / file).read_text()
        assert text.count(before) == 1, f"{file} has {text.count(before)} times {before!r}"
        (folder / file).write_text(text.replace(before, after))
        # A header shadows the real one for all files that include it; a source is compiled in place of its original.
        sources = (
            [folder / file]
            if file.endswith(".cu")
            else [source for source in kernel_sources() if f'"{file}"' in source.read_text()]
        )
        replaced = {}
        for source in sources:
            copy = folder / source.name
            if copy != source:
                copy.write_text(source.read_text())  # beside the changed header, which is found first
            replaced[source.name] = _compile(copy, [*self._kernel_flags, _ONE_HEAD_DIM], folder, [folder], "cuda")
        return self.link(name, replaced)
