"""The store that the documentation shows is whole: it passes the kit, and the state machine."""

import re
from pathlib import Path

from hypothesis import settings

PAGE = Path(__file__).parents[2] / "docs" / "write-a-tier.md"
NAMES = ("class Zipped(", "class TestZipped(", "class ZippedMachine(")

namespace = {"__name__": __name__}
for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
    if any(name in block for name in NAMES):
        exec(compile(block, str(PAGE), "exec"), namespace)

TestZipped = namespace["TestZipped"]
TestZippedMachine = namespace["TestZippedMachine"]
TestZippedMachine.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
