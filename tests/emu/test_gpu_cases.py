"""The cases that a GPU will run, emulated: when they fail there, it is not the cases."""

from ..gpu.cases import cases, check
from .calls import Calls


def test_the_cases_of_the_gpu_tests(emulator):
    for case in cases(large=False):
        check(case, Calls(emulator), "cpu")


def test_they_cover_every_op():
    ops = {case.op for case in cases(large=False)}
    assert {name for name in vars(Calls) if not name.startswith("_")} <= ops
