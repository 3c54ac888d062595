"""Decoding the real SmolLM2 with its full KV in the file tier, beside an arena that holds it: a part of `benchmarks.tiers`.

Each runs in a process of its own, so that the memory it takes can be told; they decode in turns.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from statistics import median

import torch

from oasiskv import OasisConfig

from .report import Row, at_least

BUDGET = 1024
PIECE = 256
"""Prompt tokens per forward: what the arena must hold at once."""

ARENA_SHARE = 0.25
"""Of the full KV, that the arena above the file tier may hold."""

WARM_UP = 2


def decode_rows(options: argparse.Namespace) -> Iterator[Row]:
    """All of them."""
    context, turns = (3072, 4) if options.quick else (8192, 10)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        sides = {"arena": _Side(context, None), "file": _Side(context, folder)}
        times: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(turns + WARM_UP):
            for name, side in sides.items():
                taken = side.ask("decode 4")["seconds"]
                if turn >= WARM_UP:
                    times[name] += taken
        ends = {name: side.ask("end") for name, side in sides.items()}
    per_s = {name: 1 / median(taken) for name, taken in times.items()}
    full = ends["file"]["full_kv_bytes"]
    saved = (ends["arena"]["peak_bytes"] - ends["file"]["peak_bytes"]) / full
    what = f"{context} tokens, budget {BUDGET}: {per_s['arena']:.2f} tokens/s with the arena, {per_s['file']:.2f} from a file"
    yield at_least("decode-speed", what, 100 * per_s["file"] / per_s["arena"], "%", 70)
    yield at_least("decode-memory", f"peak memory saved, of {full / 1e6:.0f} MB of KV", 100 * saved, "%", 60)
    fetched = ends["file"]["fetched_blocks"] / ends["file"]["tokens"]
    yield Row("decode-fetched", "blocks fetched from the file per token, prompt included", fetched, "blocks", "", True)


class _Side:
    """A process that has read the prompt and decodes when it is asked to."""

    def __init__(self, context: int, folder: str | None) -> None:
        command = [sys.executable, "-m", "benchmarks.tier_decode", str(context), *([folder] if folder else [])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ask("start")

    def ask(self, what: str) -> dict:  # type: ignore[type-arg] # plain JSON
        """Send a line, and wait for the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that decodes ended with exit code {self._process.wait()}")
        if what == "end":
            self._process.wait()
        return dict(json.loads(answer))


@torch.no_grad()
def _serve(context: int, folder: str | None) -> None:
    from oasiskv.adapters.hf import OasisCache
    from oasiskv.testing import texts
    from oasiskv.testing.models import load_smollm2

    model, tokenizer = load_smollm2()
    ids = tokenizer(texts.read("argparse"), return_tensors="pt", verbose=False).input_ids[:, :context]
    text = model.config
    full = context * text.num_hidden_layers * text.num_key_value_heads * 2 * text.head_dim * model.dtype.itemsize
    config = OasisConfig(budget_tokens=BUDGET)
    if folder is not None:
        config = OasisConfig(budget_tokens=BUDGET, tier=f"file:{folder}", arena_bytes=int(full * ARENA_SHARE))
    with OasisCache.for_model(model, config) as cache:
        arguments = {cache.keyword: cache}
        for request in sys.stdin:
            word, *rest = request.split()
            answer: dict[str, object] = {}
            if word == "start":
                for piece in ids.split(PIECE, dim=1):
                    logits = model(piece, **arguments, logits_to_keep=1).logits
            elif word == "decode":
                seconds = []
                for _ in range(int(rest[0])):
                    start = time.perf_counter()
                    logits = model(logits[:, -1].argmax(1, keepdim=True), **arguments).logits
                    seconds.append(time.perf_counter() - start)
                answer["seconds"] = seconds
            else:
                stats = cache.manager.stats()
                answer = {
                    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                    "full_kv_bytes": full,
                    "fetched_blocks": stats.fetched_blocks,
                    "tokens": stats.tokens,
                }
            print(json.dumps(answer), flush=True)
            if word == "end":
                return


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
