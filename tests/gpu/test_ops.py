"""Every op on the GPU against the reference, and inside a CUDA graph."""

import pytest
import torch

from oasiskv.ops import reference

from ..emu.calls import Calls
from .cases import attention, cases, check

OPS = sorted({case.op for case in cases(large=False)})


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("op", OPS)
def test_an_op_is_as_the_reference(device, op, large):
    for case in cases(large):
        if case.op == op:
            check(case, Calls(device), "cuda")


def test_attention_in_a_graph(device):
    """Captured once, replayed on other queries: nothing waits, nothing is allocated but by torch."""
    arguments = attention(torch.bfloat16, 128, 16, 4, 1, 1024).placed("cuda")
    calls, stream = Calls(device), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls.paged_attention(*arguments)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output, _ = calls.paged_attention(*arguments)
    arguments[0].copy_(torch.randn_like(arguments[0]))
    graph.replay()
    torch.cuda.synchronize()
    expected, _ = reference.paged_attention(*[value.cpu() if isinstance(value, torch.Tensor) else value for value in arguments])
    torch.testing.assert_close(output.cpu().float(), expected.float(), rtol=2e-2, atol=2e-2)
