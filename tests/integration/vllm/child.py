"""An engine in a process of its own: once n-gram drafts have imported numba, vLLM's CPU build makes no other one in a process.

Reads `{"settings": arguments of LLM, "prompts": token ids, "tokens": how many}` from standard input and prints the token ids.
"""

import json
import sys

from vllm import LLM, SamplingParams


def main():
    job = json.load(sys.stdin)
    engine = LLM(**job["settings"])
    wanted = SamplingParams(max_tokens=job["tokens"], temperature=0, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], wanted, use_tqdm=False)
    metrics = {metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")}
    engine.llm_engine.engine_core.shutdown()
    print("RESULT", json.dumps({"tokens": [list(output.outputs[0].token_ids) for output in outputs], "metrics": metrics}))


if __name__ == "__main__":
    main()
