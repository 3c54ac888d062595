"""What is built is what users get: the adapters under `oasiskv`, the licence, no tests."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from oasiskv import ops

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
def test_the_wheel(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, timeout=800)
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-" in wheel.name  # no Python and no torch is named: any will do
    assert "none-any" not in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    if ops.backends.cpu is not None:  # what could be built here is in the wheel too
        assert "oasiskv/ops/liboasiskv_cpu.so" in names
    for wanted in ("oasiskv/__init__.py", "oasiskv/py.typed", "oasiskv/adapters/hf/cache.py", "oasiskv/ops/reference.py"):
        assert wanted in names
    assert not [name for name in names if name.startswith(("tests", "adapters", "benchmarks", "kernels"))]
    assert [name for name in names if name.endswith("LICENSE")]
