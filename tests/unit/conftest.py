"""The tests of the ops run twice: on native code, and on the reference."""

import pytest

from oasiskv import ops

from .native import library


def pytest_generate_tests(metafunc):
    module = metafunc.module.__name__.rpartition(".")[2]
    if module.startswith("test_ops_") and module != "test_ops_registration":
        metafunc.fixturenames.append("backend")
        metafunc.parametrize("backend", ["native", "reference"], indirect=True)


@pytest.fixture
def backend(request, monkeypatch):
    if request.param == "native":
        library()
    else:
        for name, function in ops.REFERENCE.items():
            monkeypatch.setattr(ops, name, function)
    return request.param


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param
