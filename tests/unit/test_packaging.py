"""What is built is what users get: the adapters under `oasiskv`, the licence, no tests."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_wheel(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, timeout=200)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in ("oasiskv/__init__.py", "oasiskv/py.typed", "oasiskv/adapters/hf/cache.py", "oasiskv/ops/reference.py"):
        assert wanted in names
    assert not [name for name in names if name.startswith(("tests", "adapters", "benchmarks"))]
    assert [name for name in names if name.endswith("LICENSE")]
