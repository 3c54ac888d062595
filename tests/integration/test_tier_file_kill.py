"""SIGKILL at any moment: the next process finds what had been stored, and nothing wrong."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_writer_killed_a_hundred_times_loses_nothing_that_it_had_stored(tmp_path):
    command = [sys.executable, "-m", "tests.integration.tier_file_killer", str(tmp_path), "100", "1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    kills, segments = map(int, re.findall(r"\d+", result.stdout))
    assert kills == 100
    assert segments > 300  # or the kills came too early to show anything
