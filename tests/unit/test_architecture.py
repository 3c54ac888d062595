import inspect
import subprocess
import sys
from abc import ABC
from pathlib import Path
from typing import Protocol

import pytest

from oasiskv import abc as contracts

ROOT = Path(__file__).parents[2]
OUTSIDE = (
    "transformers",
    "anyio",
    "redis",
    "mooncake",
    "vllm",
    "pytest",
    "hypothesis",
    "rich",
    "numba",
    "triton",
    "prometheus_client",
)


def run(*command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def contract_classes():
    classes = [thing for _, thing in inspect.getmembers(contracts, inspect.isclass) if thing.__module__ == contracts.__name__]
    return [thing for thing in classes if issubclass(thing, ABC) or Protocol in thing.__bases__]


def test_rooms_import_each_other_from_above_only():
    result = run(str(Path(sys.executable).with_name("lint-imports")), "--config", "pyproject.toml")
    assert result.returncode == 0, result.stdout + result.stderr


def test_importing_the_core_imports_no_host_library_and_no_test_tool_and_starts_no_thread():
    program = (
        "import sys, threading, torch; before = set(sys.modules)\n"  # torch may bring some of them along
        "import oasiskv, oasiskv.summaries.transform, oasiskv.summaries.minmax\n"
        "import oasiskv.predictors.lookahead, oasiskv.predictors.oracle, oasiskv.predictors.previous\n"
        "assert all(hasattr(oasiskv, name) for name in oasiskv.__all__)\n"
        f"assert not set({OUTSIDE!r}) & (set(sys.modules) - before), set(sys.modules) - before\n"
        "assert threading.active_count() == 1\n"
    )
    result = run(sys.executable, "-c", program)
    assert result.returncode == 0, result.stderr


def test_kernels_are_no_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_the_contracts_are_found():
    assert {"KeySummary", "Predictor", "TransferScheduler", "Ticket", "LayerWork"} <= {c.__name__ for c in contract_classes()}


@pytest.mark.parametrize("contract", contract_classes(), ids=lambda contract: contract.__name__)
def test_every_method_of_a_contract_is_documented(contract):
    assert contract.__doc__
    for name, member in vars(contract).items():
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function) and not name.startswith("_"):
            assert function.__doc__, f"{contract.__name__}.{name} has no docstring"


@pytest.mark.parametrize("path", sorted((ROOT / "oasiskv").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is(path):
    assert path.read_text().lstrip().startswith('"""')
