import logging
import subprocess
import sys

import pytest

from oasiskv import KVManager
from oasiskv.errors import IntegrityError
from oasiskv.log import event

from .driver import SHAPE, Driver, tiny


@pytest.fixture(autouse=True)
def _everything(caplog):
    caplog.set_level(logging.DEBUG, "oasiskv")


def test_a_record_is_text_for_people_and_values_for_machines(caplog):
    event(logging.WARNING, "tier-down", tier="disk", error="no such file", retries=3, empty="")
    assert caplog.messages == ["tier-down tier=disk error='no such file' retries=3 empty=''"]
    assert caplog.records[0].event == "tier-down"
    assert caplog.records[0].values == {"tier": "disk", "error": "no such file", "retries": 3, "empty": ""}
    assert caplog.records[0].name == "oasiskv"
    assert caplog.records[0].funcName == "test_a_record_is_text_for_people_and_values_for_machines"


def test_settling_and_fitting_are_told_once_and_steps_are_not(caplog):
    with KVManager(SHAPE, tiny(summary="transform")) as manager:
        driver = Driver(manager)
        sequence = driver.create(80)
        for _ in range(5):
            driver.decode(sequence)
        assert [record.event for record in caplog.records] == ["fit", "settle"]
        for _ in range(45):
            driver.decode(sequence)
    assert [record.event for record in caplog.records] == ["fit", "settle", "refit"]
    assert caplog.records[1].values == {"tokens": 80, "blocks": 20, "step": 2}
    assert caplog.records[2].values["tokens_before"] == 80


def test_what_may_happen_in_every_step_is_for_debugging_only(caplog):
    with KVManager(SHAPE, tiny(on_late="skip", workers=1)) as manager:
        driver = Driver(manager)
        sequence = driver.create(80)
        for _ in range(30):
            driver.decode(sequence)
        late = [record for record in caplog.records if record.event == "late"]
        assert len(late) == manager.stats().late_layers
        assert {record.levelno for record in late} <= {logging.DEBUG}


def test_a_broken_invariant_is_an_error_and_raised(caplog):
    with KVManager(SHAPE, tiny()) as manager:
        sequence = Driver(manager).create(80)
        sequence.pages.append(7)
        with pytest.raises(IntegrityError):
            manager.check_integrity()
        sequence.pages.pop()
    assert [(record.event, record.levelname) for record in caplog.records if record.levelno > logging.INFO] == [
        ("integrity", "ERROR")
    ]


def test_the_library_prints_nothing_by_itself():
    program = "import logging, oasiskv.log; oasiskv.log.event(logging.ERROR, 'integrity', step=1)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout + result.stderr == ""
