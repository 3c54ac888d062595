"""What options of several commands name: texts, devices and models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError

if TYPE_CHECKING:
    from ..adapters.hf.run import Session


def read_file(path: Path, option: str) -> str:
    """A UTF-8 file, or standard input for '-'.

    Raises `InputError` if it cannot be read, is empty or not UTF-8.
    """
    if str(path) == "-":
        text = sys.stdin.read()
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{option} {path} is not UTF-8: {error}") from error
        except OSError as error:
            raise InputError(f"{option} {path} cannot be read: {error.strerror}") from error
    if not text.strip():
        raise InputError(f"{option} {path} is empty; a prompt needs at least one token")
    return text


def read_sample(name: str) -> str:
    """One of `oasiskv.testing.texts`. Raises `InputError` if there is none of this name."""
    from ..testing import texts

    if name not in texts.names():
        raise InputError(f"--sample-text is {name!r}; there are {', '.join(texts.names())}")
    return texts.read(name)


def check_device(text: str) -> None:
    """Raises `InputError` unless `text` names a device that this machine has: cpu, cuda, or cuda:N."""
    import torch

    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise InputError(f"--device is {text!r}; it must be cpu, cuda, or cuda:N for the N-th GPU")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        there = f"torch finds {count} of them, counted from 0" if count else "torch finds none on this machine"
        raise InputError(
            f"--device is {text!r}, a GPU, and {there}; use --device cpu" + (" or a lower number" if count else "")
        )


def load_session(model: str, dtype: str, device: str, draft: str | None = None, draft_tokens: int = 0) -> Session:
    """`Session.load`. Raises `InputError` for a model that cannot be loaded."""
    from ..adapters.hf.run import Session

    try:
        return Session.load(model, dtype, device, draft, draft_tokens)
    except InputError:
        raise
    except (OSError, ValueError) as error:  # what transformers raises for names, folders and files that it cannot use
        named = f"--model is {model!r}" + (f" and --draft {draft!r}" if draft else "")
        raise InputError(f"{named}, and loading failed: {' '.join(str(error).split())}") from error
