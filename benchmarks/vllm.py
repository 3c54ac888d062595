"""The vLLM adapter against stock vLLM: requests at once, throughput, latency, quality, needles, and what short requests pay.

Every engine runs in a process of its own. What is compared by time runs in turns; a row is the median of the turns' ratios.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from oasiskv.testing import models, retrieval, texts

from . import report
from .report import Row, at_least, at_most

_LIKELIEST = 20
"""Tokens whose log probabilities are compared at each place; the rest is one more outcome."""

_SAFE = 1e-9


def engine(task: str, oasis: dict[str, Any] | None, settings: dict[str, Any], **arguments: Any) -> dict[str, Any]:  # noqa: ANN401
    """Do a task in an engine, and return what it gave."""
    job = {
        "task": task,
        "oasis": oasis,
        "settings": {"model": str(models.smollm2_directory()), **settings},
        "arguments": arguments,
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.vllm_engine"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))},
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return result
    raise SystemExit(f"the engine failed at {task}:\n{done.stderr[-3000:]}")


def divergence(ours: dict[str, float], stock: dict[str, float]) -> float:
    """KL of the stock engine's distribution at a place from ours, in nats, over its likeliest tokens and all others together. A
    token that ours does not list has at most the least that it lists."""
    least = min(ours.values())
    total, rest_stock, rest_ours = 0.0, 1.0, 1.0
    for token, value in stock.items():
        there = ours.get(token, least)
        total += math.exp(value) * (value - there)
        rest_stock -= math.exp(value)
        rest_ours -= math.exp(there)
    rest_stock, rest_ours = max(rest_stock, _SAFE), max(rest_ours, _SAFE)
    return total + rest_stock * math.log(rest_stock / rest_ours)


def at_once(tokens: list[int], options: argparse.Namespace) -> Iterator[Row]:
    """Prompts of 3,000 to 6,000 tokens in a KV space of 12,800."""
    count, follow, turns = (6, 64, 1) if options.quick else (12, options.follow, options.turns)
    space = {"num_gpu_blocks_override": 400, "max_model_len": 6000 + follow, "max_num_batched_tokens": 1024, "max_num_seqs": 16}
    lengths = [3000 + 3000 * (number * 7 % count) // count for number in range(count)]
    prompts = [tokens[1500 * number : 1500 * number + length] for number, length in enumerate(lengths)]
    ratios, decoding, most = [], [], []
    for _ in range(turns):
        results = [
            engine("load", oasis, space, prompts=prompts, tokens=follow) for oasis in (None, {"budget_tokens": options.budget})
        ]
        for name, result in zip(("stock", "OasisKV"), results, strict=True):
            print(f"  {name}: {result}", file=sys.stderr)
        stock, ours = results
        most.append(ours["most_running"] / stock["most_running"])
        ratios.append(ours["tokens_per_second"] / stock["tokens_per_second"])
        decoding.append(ours["decode_tokens_per_second"] / stock["decode_tokens_per_second"])
    what = f"{count} prompts of 3-6K tokens, {follow} more each, KV space of 12,800 tokens, budget {options.budget}"
    yield at_least("at_once", f"requests at once: {what}", statistics.median(most), "x stock", 4)
    yield at_least("throughput", "throughput, reading the prompts included", statistics.median(ratios), "x stock", 2)
    yield at_least("decoding", "throughput of steps that only decode", statistics.median(decoding), "x stock", 2)


def latency(tokens: list[int], options: argparse.Namespace) -> Iterator[Row]:
    """One request at a time, with room to spare: as users get it, and with every long request handed over."""
    follow, lengths = (32, (4000,)) if options.quick else (128, (4000, 8000))
    settings = {"num_gpu_blocks_override": 640, "max_model_len": 8192, "max_num_batched_tokens": 2048}
    prompts = [tokens[at : at + length] for length in lengths for at in (0, 8000)]
    kinds: dict[str, dict[str, Any] | None] = {
        "stock": None,
        "default": {"budget_tokens": options.budget},
        "always": {"budget_tokens": options.budget, "handover": "always"},
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
    for _ in range(1 if options.quick else options.turns):
        for name, oasis in kinds.items():
            found[name].append(engine("answer", oasis, settings, prompts=[tokens[16000:17000], *prompts], tokens=follow))
            print(f"  {name}: {found[name][-1]}", file=sys.stderr)
    for name, bar in (("default", 1.0), ("always", 0.8)):
        for number, length in enumerate(lengths):
            own = slice(1 + 2 * number, 3 + 2 * number)  # the first one warms up
            for what, text in (("other", "tokens per second"), ("first", "speed of the first token")):
                pairs = zip(found["stock"], found[name], strict=True)
                ratio = statistics.median(min(stock[what][own]) / min(ours[what][own]) for stock, ours in pairs)
                title = f"{text}, one request of {length:,} tokens, {follow} more, handover {name}"
                yield at_least(f"{what}_{length}_{name}", title, ratio, "x stock", bar)


def eight(tokens: list[int], options: argparse.Namespace) -> Iterator[Row]:
    """Eight prompts of 4,000 tokens with short answers: most of the time goes to reading."""
    follow = 16 if options.quick else 128
    space = {"num_gpu_blocks_override": 400, "max_model_len": 4200, "max_num_batched_tokens": 1024, "max_num_seqs": 16}
    prompts = [tokens[1500 * number : 1500 * number + 4000] for number in range(8)]
    what = f"8 prompts of 4K tokens at once, {follow} more each, KV space of 12,800 tokens, budget {options.budget}"
    yield at_least("eight", f"throughput: {what}", load_ratio(prompts, follow, space, options), "x stock", 1.3)


def many_short(tokens: list[int], options: argparse.Namespace) -> Iterator[Row]:
    """Requests that OasisKV leaves to vLLM, many at once."""
    space = {"num_gpu_blocks_override": 640, "max_model_len": 4096, "max_num_batched_tokens": 2048, "max_num_seqs": 64}
    count = 16 if options.quick else 64
    prompts = [tokens[200 * number : 200 * number + 200] for number in range(count)]
    ratio = load_ratio(prompts, 64, space, options)
    yield at_least("many_short", f"throughput of {count} short requests at once", ratio, "x stock", 0.98)


def load_ratio(prompts: list[list[int]], tokens: int, space: dict[str, Any], options: argparse.Namespace) -> float:
    """Our tokens per second over those of stock, reading included: the median of the turns."""
    ratios: list[float] = []
    for _ in range(1 if options.quick else options.turns):
        stock, ours = (
            engine("load", oasis, space, prompts=prompts, tokens=tokens) for oasis in (None, {"budget_tokens": options.budget})
        )
        print(f"  stock: {stock}\n  OasisKV: {ours}", file=sys.stderr)
        ratios.append(ours["tokens_per_second"] / stock["tokens_per_second"])
    return statistics.median(ratios)


def quality(tokens: list[int], options: argparse.Namespace) -> Iterator[Row]:
    """Our continuations of prompts of 4,000 tokens, scored by the stock engine."""
    count, follow = (1, 64) if options.quick else (4, 256)
    settings = {"num_gpu_blocks_override": 240, "max_model_len": 6000, "max_logprobs": _LIKELIEST}
    prompts = [tokens[6000 * number : 6000 * number + 4000] for number in range(count)]
    oasis = {"budget_tokens": 1024, "handover": "always"}
    ours = engine("generate", oasis, settings, prompts=prompts, tokens=follow, logprobs=_LIKELIEST)["outputs"]
    whole = [prompt + output["tokens"] for prompt, output in zip(prompts, ours, strict=True)]
    stock = engine("score", None, settings, prompts=whole, lengths=[4000] * count, logprobs=_LIKELIEST)["logprobs"]
    places = [
        divergence(mine, its)
        for output, scored in zip(ours, stock, strict=True)
        for mine, its in zip(output["logprobs"], scored, strict=True)
    ]
    yield at_most("quality", f"mean KL, 4K prompts, budget 1,024, {len(places)} tokens", statistics.mean(places), "nats", 0.02)


def needles(tokenizer: Any, options: argparse.Namespace) -> Iterator[Row]:  # noqa: ANN401 - a transformers tokenizer
    """Facts that the stock engine finds in documents of 4,000 tokens; the document is read once, its questions share it."""
    documents = retrieval.documents(texts.read("manual"), 4000, lambda text: len(tokenizer.encode(text)), seed=1)
    items = [(document, item) for document in documents[: 1 if options.quick else None] for item in document.items]
    prompts = [tokenizer.encode(document.text + item.question) for document, item in items]
    settings: dict[str, Any] = {"num_gpu_blocks_override": 320, "max_model_len": 6000}
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    found = {}
    for name, oasis, more in (
        ("stock", None, {}),
        ("ours", {"budget_tokens": 1024, "handover": "always"}, {}),
        ("drafts", {"budget_tokens": 1024, "handover": "always"}, {"speculative_config": drafts, "async_scheduling": False}),
    ):
        outputs = engine("generate", oasis, settings | more, prompts=prompts, tokens=12)["outputs"]
        found[name] = {n for n, output in enumerate(outputs) if output["text"].strip().startswith(items[n][1].answer.strip())}
    stock = found["stock"]
    for name, what in (("ours", "without drafts"), ("drafts", "with n-gram drafts")):
        share = len(found[name] & stock) / max(1, len(stock))
        yield at_least(f"needle_{name}", f"of {len(stock)} facts that stock finds, budget 1,024, {what}", share, "found", 1)


def short(tokens: list[int], options: argparse.Namespace) -> Iterator[Row]:
    """A request that OasisKV leaves to vLLM."""
    settings = {"num_gpu_blocks_override": 240, "max_model_len": 4096}
    prompts, ratios = [tokens[:200]] * (4 if options.quick else 10), []
    for _ in range(1 if options.quick else options.turns):
        stock, ours = (
            engine("generate", oasis, settings, prompts=prompts, tokens=64)["seconds"]
            for oasis in (None, {"budget_tokens": 2048})
        )
        ratios.append(statistics.median(stock[1:]) / statistics.median(ours[1:]))
    yield at_least("short", "speed of one short request, no pressure", statistics.median(ratios), "x stock", 0.95)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """All rows, or those that were asked for."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models.smollm2_directory())
    tokens = tokenizer.encode(texts.read("manual"))
    wanted = options.only
    if "at-once" in wanted:
        yield from at_once(tokens, options)
    if "latency" in wanted:
        yield from latency(tokens, options)
    if "eight" in wanted:
        yield from eight(tokens, options)
    if "many-short" in wanted:
        yield from many_short(tokens, options)
    if "quality" in wanted:
        yield from quality(tokens, options)
    if "needles" in wanted:
        yield from needles(tokenizer, options)
    if "short" in wanted:
        yield from short(tokens, options)


def more_options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    rows = ["at-once", "latency", "eight", "many-short", "quality", "needles", "short"]
    parser.add_argument("--only", nargs="+", choices=rows, default=rows, help="rows to measure")
    parser.add_argument("--budget", type=int, default=512, help="budget_tokens where requests compete for space")
    parser.add_argument("--follow", type=int, default=1536, help="tokens after each prompt where requests compete for space")
    parser.add_argument("--turns", type=int, default=3, help="turns of what is timed")


if __name__ == "__main__":
    raise SystemExit(report.run("vllm", __doc__ or "", measure, more_options))
