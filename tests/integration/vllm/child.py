"""An engine in a process of its own: once n-gram drafts have imported numba, vLLM's CPU build makes no other one in a process,
and several ranks want processes anyway.

Run as a program, it reads `{"settings": arguments of LLM, "prompts": token ids, "tokens": how many}` from standard input and
prints the token ids.
"""

import json
import os
import subprocess
import sys

SETTINGS = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "num_gpu_blocks_override": 200,
    "max_model_len": 2048,
    "max_num_batched_tokens": 256,
    "disable_log_stats": False,
}


def in_a_process(prompts, tokens, *, oasis, multiprocessing, **settings):
    """The token ids that follow each prompt, and vLLM's metrics, from an engine with these settings of OasisKV."""
    transfer = {"kv_connector": "OasisKV", "kv_role": "kv_both", "kv_connector_extra_config": oasis}
    job = {"settings": {**SETTINGS, "kv_transfer_config": transfer, **settings}, "prompts": prompts, "tokens": tokens}
    threads = int(os.environ["OMP_NUM_THREADS"]) // settings.get("tensor_parallel_size", 1)
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if multiprocessing else "0",
        "OMP_NUM_THREADS": str(max(1, threads)),  # of each rank
    }
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(job), capture_output=True, text=True, env=environment, timeout=400
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stderr[-4000:]
    return json.loads(results[0].removeprefix("RESULT "))


def main():
    from vllm import LLM, SamplingParams

    job = json.load(sys.stdin)
    engine = LLM(**job["settings"])
    wanted = SamplingParams(max_tokens=job["tokens"], temperature=0, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], wanted, use_tqdm=False)
    metrics = {metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")}
    engine.llm_engine.engine_core.shutdown()
    print("RESULT", json.dumps({"tokens": [list(output.outputs[0].token_ids) for output in outputs], "metrics": metrics}))


if __name__ == "__main__":
    main()
