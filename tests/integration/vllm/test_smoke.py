"""vLLM works here at all, with the model that the other tests use, and an engine leaves room for the next one."""

import pytest
from vllm import SamplingParams

from oasiskv.adapters.vllm import checks

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def ids(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_this_version_has_the_hooks():
    checks.check_versions()


@pytest.mark.model
@pytest.mark.timeout(240)
def test_stock_engines_generate_one_after_another(engine, long_text):
    prompts = [long_text[:400], "The capital of France is"]
    first = engine()
    config = first.llm_engine.vllm_config
    checks.check_settings(config, None)  # nothing of OasisKV, and nothing to refuse
    texts = first.generate(prompts, GREEDY, use_tqdm=False)
    assert "Paris" in texts[1].outputs[0].text
    second = engine(num_gpu_blocks_override=64)
    assert second.llm_engine.vllm_config.cache_config.num_gpu_blocks == 64
    assert ids(second.generate(prompts, GREEDY, use_tqdm=False)) == ids(texts)
