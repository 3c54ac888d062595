"""Fixtures for tests that need vLLM: without it, they are skipped. `make test-vllm` runs them in an environment of its own.

vLLM and what it imports give warnings that are not ours: here they are no errors, nor are they while modules are imported.
"""

import gc
import importlib.util
import os
import warnings
from pathlib import Path

import pytest
import torch

from oasiskv.testing import models, texts

INSTALLED = importlib.util.find_spec("vllm") is not None
LONGEST = 8192
"""Tokens that the model was trained for."""

THREADS = min(4, os.cpu_count() or 1)

if INSTALLED:  # before anything imports vLLM
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))


class VllmModule(pytest.Module):
    """A module of tests that may import vLLM."""

    def collect(self):
        if not INSTALLED:
            pytest.skip("vllm is not installed here; make test-vllm installs it and runs these tests", allow_module_level=True)
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            return list(super().collect())


def pytest_pycollect_makemodule(module_path, parent):
    return VllmModule.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def smollm2():
    """The directory of the model; converted into the user's cache, if it is not there yet."""
    return models.smollm2_directory()


@pytest.fixture(scope="session")
def long_text():
    """Real English prose, longer than any test needs."""
    return texts.read("manual")


class Engines:
    """Builds engines in this process. One lives at a time: the next call shuts it down, and so does the end of the session."""

    def __init__(self, model):
        self._model = str(model)
        self._living = None

    def __call__(self, oasis=None, **overrides):
        """A `vllm.LLM`, with stock settings or with OasisKV.

        Args:
            oasis: `kv_connector_extra_config` of OasisKV; `None` for an engine without it.
            overrides: arguments of `vllm.LLM`.
        """
        from vllm import LLM

        self.close()
        if oasis is not None:
            transfer = {"kv_connector": "OasisKV", "kv_role": "kv_both", "kv_connector_extra_config": oasis}
            overrides.setdefault("kv_transfer_config", transfer)
        settings = {
            "model": self._model,
            "dtype": "float32",  # a CPU without AVX512 emulates bfloat16, at half the speed
            "enforce_eager": True,
            "block_size": 32,
            "num_gpu_blocks_override": 256,
            "max_num_seqs": 8,
            "seed": 0,
            **overrides,
        }
        room = settings["block_size"] * (settings["num_gpu_blocks_override"] - 1)  # a block is never used
        settings.setdefault("max_model_len", min(LONGEST, room))
        self._living = LLM(**settings)
        return self._living

    def close(self):
        """Shut the engine down, if there is one, and give its memory back."""
        if self._living is None:
            return
        living, self._living = self._living, None
        living.llm_engine.engine_core.shutdown()
        del living
        gc.collect()


@pytest.fixture(scope="session")
def engine(smollm2):
    """Builds engines: see `Engines`. A fixture of a module may keep one for its tests."""
    torch.set_num_threads(THREADS)  # OMP_NUM_THREADS comes too late for a torch that is loaded
    engines = Engines(smollm2)
    yield engines
    engines.close()
