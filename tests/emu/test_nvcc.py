"""Where there is nvcc: every architecture compiles, without spilling more registers than is stated here."""

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from .building import KERNELS, kernel_sources

NVCC = shutil.which("nvcc")
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
MOST_SPILLED_BYTES = 64

# To save minutes: what has instructions of its own is compiled for all, with its two largest head dims; the rest for one.
FOR_ALL, WITHOUT_KERNELS = "attention_half.cu", "api.cu"
LARGEST = "-DOASIS_HEAD_DIMS(X)=X(128) X(256)"

pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc")


def compile_for(source, architectures, folder):
    includes = [f"-I{KERNELS / part}" for part in ("cuda/native", "cuda", "include")]
    codes = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in architectures]
    codes.append(f"-gencode=arch=compute_{architectures[-1]},code=compute_{architectures[-1]}")
    options = ["-std=c++17", "-Xptxas=-v", "-Xcompiler=-fPIC,-Wall", "-Werror=all-warnings"]
    command = [NVCC, LARGEST, *options, *includes, *codes, "-c", str(source), "-o", str(folder / f"{source.stem}.o")]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.timeout(600)
def test_everything_compiles_and_hardly_spills(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        jobs = {
            source.name: pool.submit(compile_for, source, ARCHITECTURES if source.name == FOR_ALL else (86,), tmp_path)
            for source in kernel_sources()
        }
    for name, job in jobs.items():
        result = job.result()
        assert result.returncode == 0, f"{name}: {result.stderr[-3000:]}"
        spilled = [int(number) for number in re.findall(r"(\d+) bytes spill stores", result.stderr + result.stdout)]
        assert spilled or name == WITHOUT_KERNELS, f"{name}: no report of registers"
        assert max(spilled, default=0) <= MOST_SPILLED_BYTES, f"{name} spills {max(spilled)} bytes"
