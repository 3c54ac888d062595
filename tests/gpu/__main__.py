"""python -m tests.gpu LIBRARY: every case on the GPU, without pytest."""

import sys
from pathlib import Path

from ..emu.calls import Calls
from .cases import cases, check
from .device import Device

if __name__ == "__main__":
    calls = Calls(Device(Path(sys.argv[1])))
    failed = passed = 0
    for case in cases(large=True):
        try:
            check(case, calls, "cuda")
            passed += 1
        except (AssertionError, RuntimeError) as error:
            failed += 1
            print(f"FAILED {case.op}, {case.label}: {str(error)[:400]}")
    print(f"{passed} cases as the reference, {failed} not")
    raise SystemExit(bool(failed))
