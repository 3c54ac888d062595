"""Finding the library, agreeing with it on the ABI, and what happens where there is none."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oasiskv import ops
from oasiskv.ops import _abi
from oasiskv.ops._library import Library, LibraryUnavailable

from .native import PATHS, library, runs_here

ROOT = Path(__file__).parents[2]


def generator():
    spec = importlib.util.spec_from_file_location("generate_bindings", ROOT / "kernels" / "generate_bindings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def python(program, **environment):
    """Run a program in a fresh interpreter in which every warning is an error."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OASISKV_")}
    command = [sys.executable, "-W", "error::UserWarning", "-c", program]
    return subprocess.run(
        command, cwd=ROOT, env={**kept, **environment}, capture_output=True, text=True, timeout=120, check=False
    )


NO_LIBRARY = (
    "import pathlib\n"
    "there = pathlib.Path.is_file\n"
    "pathlib.Path.is_file = lambda path: not path.name.startswith('liboasiskv_') and there(path)\n"
)


def test_the_bindings_are_those_of_the_header():
    module = generator()
    assert module.BINDINGS.read_text() == module.generate(module.HEADER.read_text()), "python kernels/generate_bindings.py"


def test_a_field_of_an_unknown_type_is_refused():
    module = generator()
    header = module.HEADER.read_text().replace("int64_t num_pairs;", "short num_pairs;")
    with pytest.raises(ValueError, match="not a field that the bindings know: short num_pairs;"):
        module.generate(header)


def test_the_structs_are_as_large_as_the_compiler_makes_them():
    loaded = library()
    assert {"append_rows", "copy_blocks", "paged_attention", "exact_logits", "block_mass"} <= loaded.ops
    assert {"top_missing", "select", "exchange_slots"} <= loaded.ops


def test_every_op_of_the_abi_is_an_op():
    assert set(_abi.NUMBERS) - {"read_slots"} == set(ops.NAMES)


@pytest.mark.parametrize("field", ["VERSION", "SIZES"])
def test_a_library_of_another_abi_is_refused(monkeypatch, field):
    loaded = library()
    monkeypatch.setattr(_abi, field, 99 if field == "VERSION" else {**_abi.SIZES, "copy_blocks": 3})
    with pytest.raises(LibraryUnavailable, match=r"ABI version \d+, but this is version 99|copy_blocks take \d+ bytes"):
        Library("cpu", loaded.path)


def test_a_file_that_is_no_library_is_refused(tmp_path):
    (tmp_path / "liboasiskv_cpu.so").write_text("no library")
    with pytest.raises(LibraryUnavailable, match=r"liboasiskv_cpu.so does not load"):
        Library("cpu", tmp_path / "liboasiskv_cpu.so")


def test_what_is_built_in_says_so():
    loaded = library()
    assert re.match(r"cpu, compiler .*, paths .*portable.*, runs \w+, threads (OpenMP|none)$", loaded.build_info)
    assert not loaded.set_isa("abacus")
    assert loaded.set_isa("portable")
    assert "runs portable" in loaded.build_info
    assert loaded.set_isa("auto")


@pytest.mark.parametrize("path", PATHS)
def test_every_code_path_is_tested_here(path):
    library()
    if not runs_here(path):
        pytest.skip(f"the code path {path} was not built or does not run on this processor")


def test_threads_are_those_of_torch():
    if "OpenMP" in torch.__config__.parallel_info():
        assert library().build_info.endswith("threads OpenMP")


def test_available_names_every_op():
    found = ops.available()
    assert sorted(found) == sorted(ops.NAMES)
    assert {kind for backends in found.values() for kind in backends.values()} <= {"native", "reference"}
    assert all(set(backends) == {"cpu", "cuda"} for backends in found.values())


def test_without_a_library_the_reference_serves_and_says_so_once_at_first_use():
    program = NO_LIBRARY + (
        "import warnings, torch, oasiskv\n"  # silent
        "from oasiskv import ops, errors\n"
        "assert all(found['cpu'] == 'reference' for found in ops.available().values())\n"
        "arguments = torch.zeros(1, 1, 1, 3), torch.tensor([3]), 1\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(3): mass = ops.block_mass(*arguments)\n"
        "    ops.top_missing(mass[0], torch.tensor([[[0]]]), torch.tensor([0]), torch.tensor([3]), 1)\n"
        "assert [w.category for w in caught] == [errors.ReferenceOpsWarning], caught\n"
        "assert 'this installation has no liboasiskv_cpu.so' in str(caught[0].message)\n"
    )
    result = python(program)
    assert result.returncode == 0, result.stderr


def test_the_reference_can_be_asked_for():
    program = (
        "import torch; from oasiskv import ops\n"
        "assert all(found['cpu'] == 'reference' for found in ops.available().values())\n"
        "ops.block_mass(torch.zeros(1, 1, 1, 3), torch.tensor([3]), 1)\n"
    )
    result = python(program, OASISKV_OPS="reference")
    assert result.returncode == 0, result.stderr


def test_native_code_can_be_insisted_on():
    result = python(NO_LIBRARY + "import oasiskv.ops", OASISKV_OPS="native")
    assert (
        "ConfigError: OASISKV_OPS is native, but this installation has no liboasiskv_cpu.so; install a C++ compiler"
        in result.stderr
    )
    library()
    assert python("import oasiskv.ops", OASISKV_OPS="native").returncode == 0


def test_another_value_is_refused():
    result = python("import oasiskv.ops", OASISKV_OPS="fast")
    assert "ConfigError: OASISKV_OPS is 'fast'; it must be native, reference or unset" in result.stderr
