"""One vLLM engine in a process of its own, for `benchmarks.vllm`: does one job and prints the result as JSON."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

Result = dict[str, Any]


def engine(oasis: dict[str, Any] | None, model: str, **settings: Any) -> Any:  # noqa: ANN401 - a vllm.LLM
    """A `vllm.LLM`, stock or with these settings of OasisKV."""
    from vllm import LLM

    if oasis is not None:
        settings["kv_transfer_config"] = {
            "kv_connector": "OasisKV",
            "kv_role": "kv_both",
            "kv_connector_extra_config": oasis,
        }
    return LLM(model, dtype="float32", enforce_eager=True, block_size=32, seed=0, **settings)


def load(llm: Any, prompts: list[list[int]], tokens: int) -> Result:  # noqa: ANN401
    """All prompts at once: how long they take, how many run together, and how fast steps are that only decode."""
    from vllm import SamplingParams

    running = llm.llm_engine.engine_core.engine_core.scheduler.running
    wanted = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, wanted)
    most, decoding = 0, []
    begin = time.perf_counter()
    while llm.llm_engine.has_unfinished_requests():
        start = time.perf_counter()
        outputs = llm.llm_engine.step()
        most = max(most, len(running))
        if outputs and len(outputs) == len(running):  # no prompt was read
            decoding.append((time.perf_counter() - start, len(running)))
    seconds = time.perf_counter() - begin
    full = [duration for duration, count in decoding if count == most]
    return {
        "seconds": seconds,
        "tokens_per_second": len(prompts) * tokens / seconds,
        "most_running": most,
        "decode_tokens_per_second": most / statistics.median(full) if full else 0.0,
    }


def answer(llm: Any, prompts: list[list[int]], tokens: int) -> Result:  # noqa: ANN401
    """One prompt after another: how long the first token of each takes, and every other one, in seconds."""
    from vllm import SamplingParams

    wanted = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    firsts, others = [], []
    for number, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, wanted)
        start, times = time.perf_counter(), []
        while llm.llm_engine.has_unfinished_requests():
            if any(output.outputs[0].token_ids for output in llm.llm_engine.step()):
                times.append(time.perf_counter())
        firsts.append(times[0] - start)
        others.append((times[-1] - times[0]) / (len(times) - 1))
    return {"first": firsts, "other": others}


def generate(llm: Any, prompts: list[list[int]], tokens: int, logprobs: int | None = None) -> Result:  # noqa: ANN401
    """What follows each prompt, one after another, and the log probabilities of the likeliest tokens at each place."""
    from vllm import SamplingParams

    wanted = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=logprobs)
    found, seconds = [], []
    for prompt in prompts:
        start = time.perf_counter()
        output = llm.generate([{"prompt_token_ids": prompt}], wanted, use_tqdm=False)[0].outputs[0]
        seconds.append(time.perf_counter() - start)
        places = [{token: entry.logprob for token, entry in place.items()} for place in output.logprobs or []]
        found.append({"tokens": list(output.token_ids), "text": output.text, "logprobs": places})
    return {"outputs": found, "seconds": seconds}


def score(llm: Any, prompts: list[list[int]], lengths: list[int], logprobs: int) -> Result:  # noqa: ANN401
    """The log probabilities of the likeliest tokens at the places from `lengths` on of texts that are given."""
    from vllm import SamplingParams

    wanted = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=logprobs)
    found = []
    for prompt, length in zip(prompts, lengths, strict=True):
        places = llm.generate([{"prompt_token_ids": prompt}], wanted, use_tqdm=False)[0].prompt_logprobs[length:]
        found.append([{token: entry.logprob for token, entry in place.items()} for place in places])
    return {"logprobs": found}


def main() -> None:
    """Read a job from standard input: `oasis`, `settings`, `task` and its arguments."""
    job = json.load(sys.stdin)
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(name, value)
    llm = engine(job["oasis"], **job["settings"])
    tasks: dict[str, Callable[..., Result]] = {"load": load, "answer": answer, "generate": generate, "score": score}
    result = tasks[job["task"]](llm, **job["arguments"])
    llm.llm_engine.engine_core.shutdown()
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
