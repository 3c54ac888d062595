"""Every causal language model that transformers knows, tiny and random: the same as stock, or refused before anything runs.

Three lists say which. A family that moves from one to another, or is new, fails a test: look at what has changed, then move it.
Most of it is marked `sweep`; `make test-all` runs that.
"""

from __future__ import annotations

import re

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from oasiskv import OasisConfig
from oasiskv.adapters.hf import OasisCache
from oasiskv.errors import UnsupportedModel

from .all_families import NAMES, tiny_model

WIDE = OasisConfig(budget_tokens=256, window_tokens=32, arena_bytes=32 << 20, workers=0)
OFTEN = (
    "bart",
    "diffllama",
    "doge",
    "falcon",
    "gemma2",
    "glm",
    "gpt_bigcode",
    "gpt_oss",
    "jetmoe",
    "llama",
    "mllama",
    "roberta",
)
"""Families of the most different kinds, which every run of the tests looks at."""

EXCUSED = {
    "dbrx": "its code reads settings that its config does not have",
    "dots3_note": "its default config cannot be made smaller; its text model is dots3_note_text",
    "gemma3n": "its vision part needs timm; its text model is gemma3n_text",
    "gemma4_assistant": "takes the states of another model instead of tokens",
    "gemma4_unified_assistant": "takes the states of another model instead of tokens",
    "musicgen": "is made from a part of its config, and needs an audio codec",
    "musicgen_melody": "is made from a part of its config, and needs an audio codec",
    "zamba": "its weights are tied between layers that a small one does not have",
}
"""What cannot be built small or run on tokens, and why."""

_EQUAL = """
    afmoe apertus apertus1p5_text arcee aria_text bamba bart beam bert bert-generation biogpt bitnet blenderbot
    blenderbot-small camembert codegen cohere cohere2 cohere2_moe cohere_compass_text ctrl cwm data2vec-text dots1
    electra emu3 ernie ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe flex_olmo fuyu gemma gemma2 gemma3
    gemma3_text gemma4 gemma4_text gemma4_unified_text glm glm4 glm4_moe got_ocr2 gpt-sw3 gpt2 gpt_bigcode
    gpt_neox gptj granite granitemoe granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense
    hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jamba kolibri1 laguna lara_mini lfm2 lfm2_moe
    lfm3 llama llama4 llama4_text marian mbart mellum minimax_m2 minimax_m3_vl_text ministral3 mistral mixtral
    modernbert-decoder moss_transcribe_diarize nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt
    pegasus persimmon phi phi3 phi4_multimodal phimoe plbart qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe
    qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next roberta roberta-prelayernorm roc_bert sarvam_moe seed_oss
    smollm3 solar_open stablelm starcoder2 vaultgemma whisper xlm-roberta xlm-roberta-xl xmod
"""
EQUAL = frozenset(_EQUAL.split())
"""As stock, over two turns."""

_REASONS = {
    "all must have one head_dim": """
        mimo_v2_flash
    """,
    "attention mask of 4 dimensions": """
        gemma4_unified
    """,
    "cache layers are: DeepseekV4CSACache, DeepseekV4HCACache": """
        deepseek_v4
    """,
    "cache layers are: DynamicIndexedLayer, LinearAttentionLayer": """
        qwen4_exp qwen4_exp_text
    """,
    "cache layers are: DynamicSlidingWindowLayer": """
        ministral moshi
    """,
    "cache layers are: LinearAttentionAndFullAttentionLayer": """
        falcon_h1 zaya
    """,
    "cache layers are: LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer": """
        inkling_text
    """,
    "cache layers are: LinearAttentionAndFullAttentionLayer, LinearAttentionLayer": """
        zamba2
    """,
    "cache layers are: LinearAttentionLayer": """
        recurrent_gemma
    """,
    "caches a latent": """
        axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 dots3_note_text glm4_moe_lite
        glm_moe_dsa hy_v4 kimi_linear longcat_flash minicpm3 sarvam_mla youtu
    """,
    "changes the values": """
        diffllama
    """,
    "copies layers of its cache": """
        dory
    """,
    "does not call the attention through": """
        big_bird bigbird_pegasus bloom cpmant falcon falcon_mamba git gpt_neo gpt_neox_japanese
        inkling2_loop_text inkling2_text mamba mamba2 megatron-bert mpt mvp openai-gpt prophetnet reformer
        rembert roformer rwkv trocr xglm xlm xlnet xlstm
    """,
    "keeps keys and values elsewhere: IndexError": """
        doge
    """,
    "no DynamicCache from": """
        blt
    """,
    "s_aux (attention sinks)": """
        flint gpt_oss granite_swa granitemoe_swa
    """,
    "share keys and values": """
        gemma3n_text
    """,
    "takes no DynamicCache": """
        minimax
    """,
    "transformers' attention interface as they are": """
        jetmoe mllama
    """,
}
REFUSED = {family: words for words, names in _REASONS.items() for family in names.split()}
"""By words of the reason."""


def families(names: set[str] | dict[str, str]) -> list[object]:
    return [name if name in OFTEN else pytest.param(name, marks=pytest.mark.sweep) for name in sorted(names)]


def two_turns(model: PreTrainedModel, cache: object, keyword: str) -> list[torch.Tensor]:
    """Tokens and scores of two turns of a batch, one of whose texts is shorter."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 90, (2, 40), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :13], ids[1, :13] = 0, 0
    found = []
    for more in (5, 4):
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=more,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            **{keyword: cache},
        )
        found += [output.sequences, torch.stack(output.scores)]
        ids = torch.cat([output.sequences, torch.randint(3, 90, (2, 6), generator=generator)], dim=1)
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    return found


@pytest.mark.sweep
def test_every_family_is_in_one_list():
    lists = [*EQUAL, *REFUSED, *EXCUSED]
    assert sorted(lists) == sorted(NAMES)


@pytest.mark.parametrize("family", families(EQUAL))
def test_equal_to_stock(family):
    model = tiny_model(family)
    expected = two_turns(model, DynamicCache(config=model.config.get_text_config(decoder=True)), "past_key_values")
    with OasisCache.for_model(model, WIDE) as cache:
        found = two_turns(model, cache, "past_key_values")
        cache.manager.check_integrity()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("family", families(REFUSED))
def test_refused_before_anything_runs(family):
    model = tiny_model(family)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match=re.escape(REFUSED[family])) as caught:
        OasisCache.for_model(model, WIDE)
    assert "\n" not in str(caught.value)
    assert model.config._attn_implementation == before
    assert not model._forward_pre_hooks


@pytest.mark.sweep
@pytest.mark.parametrize("family", sorted(EXCUSED))
def test_an_excuse_holds(family):
    """What is excused can still not be built, or not be run on tokens by transformers itself."""
    with pytest.raises(Exception):  # noqa: B017, PT011 - each has its own
        tiny_model(family).generate(torch.ones(1, 4, dtype=torch.int64), max_new_tokens=1)
