"""The vLLM adapter's settings and its checks at start-up, with plain objects in place of vLLM's: it need not be installed."""

import dataclasses
import enum
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from oasiskv import OasisConfig
from oasiskv.adapters.vllm import checks
from oasiskv.adapters.vllm.checks import check_layers, check_settings, check_versions
from oasiskv.adapters.vllm.settings import AdapterConfig
from oasiskv.errors import ConfigError, UnsupportedModel


class Backend(enum.Enum):
    """Like vLLM's AttentionBackendEnum."""

    CPU_ATTN = "vllm.cpu"
    FLASH_ATTN = "vllm.flash"
    CUSTOM = "oasiskv.adapters.vllm.backend.Backend"

    def get_path(self):
        return self.value


class Foreign(enum.Enum):
    """Another plug-in's, and nobody's."""

    CUSTOM = "elsewhere.Backend"

    def get_path(self):
        return self.value


class Unregistered(enum.Enum):
    CUSTOM = None

    def get_path(self):
        raise ValueError("must be registered before use")


FULL = SimpleNamespace(name="FULL", has_full_cudagraphs=lambda: True)


def transfer(extra=None, connector="OasisKV", role="kv_both"):
    return SimpleNamespace(kv_connector=connector, kv_role=role, kv_connector_extra_config=extra or {})


def engine(device="cpu", **changes):
    """A VllmConfig of a plain decoder model; `changes` are named section__attribute, or after a section."""
    text = SimpleNamespace(model_type="llama")
    model = SimpleNamespace(
        model="org/model",
        dtype=torch.float32,
        hf_text_config=text,
        use_mla=False,
        is_encoder_decoder=False,
        is_attention_free=False,
        is_hybrid=False,
        uses_alibi=False,
        get_num_layers_by_block_type=lambda parallel, kind: 0,
    )
    sections = {
        "model": model,
        "text": text,
        "cache": SimpleNamespace(block_size=32, cache_dtype="auto", kv_cache_layout=None),
        "parallel": SimpleNamespace(
            pipeline_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1, tensor_parallel_size=4
        ),
        "scheduler": SimpleNamespace(async_scheduling=False),
        "attention": SimpleNamespace(backend=None if device == "cpu" else Backend.CUSTOM),
    }
    config = SimpleNamespace(
        model_config=model,
        cache_config=sections["cache"],
        parallel_config=sections["parallel"],
        scheduler_config=sections["scheduler"],
        attention_config=sections["attention"],
        device_config=SimpleNamespace(device_type=device),
        speculative_config=None,
        kv_transfer_config=transfer(),
    )
    for name, value in changes.items():
        section, _, attribute = name.partition("__")
        setattr(sections[section] if attribute else config, attribute or section, value)
    return config


def check(config):
    check_settings(config, AdapterConfig.from_vllm(config))


# --- settings


def test_every_setting_of_the_core_passes_through():
    given = {
        "budget_tokens": 512,
        "budget_per": "sequence",
        "block_size": 8,
        "sink_tokens": 8,
        "window_tokens": 64,
        "max_new_blocks": 2,
        "correction_blocks": 1,
        "correction_margin": 0,
        "swap_margin": 0.5,
        "summary": "minmax",
        "calibration": "/tmp/x",
        "predictor": "ema",
        "on_late": "skip",
        "workers": 0,
        "arena_bytes": 1 << 30,
        "tier": ["memory:", "file:/tmp/y"],
        "tier_patience_s": 3,
        "segment_blocks": 4,
        "poison_freed": True,
        "handover_tokens": 999,
        "handover": "always",
    }
    assert set(given) == set(AdapterConfig.names())
    config = AdapterConfig.from_extra(json.loads(json.dumps(given)), 32)
    assert config.handover_tokens == given.pop("handover_tokens")
    assert config.handover == given.pop("handover")
    assert config.core == OasisConfig(**given)


def test_a_streamed_prompt_holds_lent_blocks_and_three_parts():
    config = AdapterConfig.from_extra({"budget_tokens": 640, "block_size": 16}, 32)
    assert config.most_host_blocks(32, 256) == 640 // 32 + 3 * (256 // 32 + 1)


@pytest.mark.parametrize(
    ("device", "given", "predictor"),
    [
        ("cuda", {}, "layer-ahead"),
        ("cpu", {}, "lookahead"),
        ("cpu", {"predictor": "layer-ahead"}, "layer-ahead"),
        ("cuda", {"predictor": "quest"}, "quest"),
    ],
)
def test_the_default_predictor_is_that_of_the_device(device, given, predictor):
    assert AdapterConfig.from_vllm(engine(device, kv_transfer_config=transfer(given))).core.predictor == predictor


def test_the_defaults():
    config = AdapterConfig.from_extra({}, 32)
    assert config.core == OasisConfig(tier_patience_s=240)  # vLLM waits 300 seconds for a worker
    assert config.handover_tokens == 2 * config.core.budget_tokens
    assert config.handover == "pressure"


@pytest.mark.parametrize(("host", "ours"), [(16, 16), (32, 16), (128, 16), (24, 12), (40, 10), (12, 12), (4, 4), (48, 16)])
def test_the_block_size_follows_that_of_vllm(host, ours):
    assert AdapterConfig.from_extra({"budget_tokens": 960}, host).core.block_size == ours


@pytest.mark.parametrize("host", [1, 2, 7, 34])
def test_a_block_size_of_vllm_that_nothing_divides(host):
    with pytest.raises(ConfigError, match=f"block_size of vLLM is {host}.*--block-size 32"):
        AdapterConfig.from_extra({}, host)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"pool_bytes": 1}, "pool_bytes is 1, but .*--gpu-memory-utilization"),
        ({"dense_threshold": None}, "dense_threshold is None, but .*handover_tokens"),
        ({"budget_token": 1}, "no setting 'budget_token'; did you mean budget_tokens"),
        ({"handover": 1}, "handover is 1; it must be 'pressure' or 'always'"),
        ({"hand_over": "always"}, "did you mean handover"),
        ({"zzz": 1}, "no setting 'zzz'; there are .*arena_bytes.*workers"),
        ({1: 1}, "no setting 1"),
        ({"tier": {"url": "memory:"}}, "tier is {'url': 'memory:'}; it must be"),
        ({"tier": [1]}, r"tier is \[1\]; it must be"),
        ({"budget_tokens": 100}, "kv_connector_extra_config: budget_tokens is 100, not a multiple"),
        ({"budget_tokens": "2048"}, "budget_tokens is '2048'; it must be an integer"),
        ({"block_size": 5}, "block_size is 5"),
        ({"handover_tokens": 159}, "handover_tokens is 159; it must be an integer of at least 160"),
        ({"handover_tokens": True}, "handover_tokens is True"),
        ({"handover_tokens": 100.0}, "handover_tokens is 100.0"),
    ],
)
def test_settings_that_cannot_work(extra, message):
    with pytest.raises(ConfigError, match=message):
        AdapterConfig.from_extra(extra, 32)


def test_no_setting_is_both_taken_and_refused():
    for name in ("pool_bytes", "dense_threshold"):
        assert name not in AdapterConfig.names()
        assert name in OasisConfig.names()


def test_only_our_connector_has_settings():
    assert AdapterConfig.from_vllm(engine(kv_transfer_config=None)) is None
    assert AdapterConfig.from_vllm(engine(kv_transfer_config=transfer(connector=None))) is None
    assert AdapterConfig.from_vllm(engine(kv_transfer_config=transfer({"block_size": "x"}, "NixlConnector"))) is None
    config = AdapterConfig.from_vllm(engine(kv_transfer_config=transfer({"budget_tokens": 512})))
    assert config is not None
    assert (config.core.budget_tokens, config.handover_tokens) == (512, 1024)


@pytest.mark.parametrize(
    ("budget", "host", "blocks"), [(512, 32, 16), (528, 32, 17), (512, 16, 32), (512, 128, 4), (528, 128, 5)]
)
def test_blocks_of_vllm_that_hold_the_budget(budget, host, blocks):
    assert AdapterConfig.from_extra({"budget_tokens": budget, "block_size": 16}, host).budget_host_blocks(host) == blocks


# --- check_settings


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_plain_engine_passes(device):
    check(engine(device))
    check(engine(device, cache__kv_cache_layout="LBHNC", cache__cache_dtype="float32", scheduler__async_scheduling=True))
    check(engine(device, speculative_config=SimpleNamespace(method="ngram")))
    check(engine(device, text__layer_types=["sliding_attention", "full_attention"]))
    check(engine(device, text__attn_logit_softcapping=None, text__num_kv_shared_layers=0))
    check(engine(device, model__is_hybrid=True, model__get_num_layers_by_block_type=lambda parallel, kind: 2))


def test_an_engine_without_oasiskv_is_let_alone():
    check_settings(engine(kv_transfer_config=None), None)
    check_settings(engine("cuda", kv_transfer_config=None, attention__backend=Backend.FLASH_ATTN, model__use_mla=True), None)
    for backend in (Foreign.CUSTOM, Unregistered.CUSTOM, None):
        check_settings(engine("cuda", kv_transfer_config=None, attention__backend=backend), None)


@pytest.mark.parametrize(
    ("device", "changes", "message"),
    [
        ("cpu", {"kv_transfer_config": transfer(role="kv_producer")}, 'kv_role is .kv_producer.*"kv_both"'),
        ("cpu", {"parallel__pipeline_parallel_size": 2}, "pipeline_parallel_size is 2.*use 1"),
        ("cpu", {"parallel__decode_context_parallel_size": 2}, "decode_context_parallel_size is 2"),
        ("cpu", {"parallel__prefill_context_parallel_size": 4}, "prefill_context_parallel_size is 4"),
        ("cuda", {"parallel__enable_dbo": True}, "enable_dbo is True"),
        (
            "cpu",
            {"speculative_config": SimpleNamespace(method="eagle"), "scheduler__async_scheduling": True},
            "async_scheduling is True together with speculative_config .method eagle.*--no-async-scheduling",
        ),
        (
            "cpu",
            {"kv_transfer_config": transfer({"tier": ["memory:", "file:/var/kv/?limit=1GiB"]})},
            r"'file:/var/kv/\?limit=1GiB', and there are 4 workers or more.*: file:/var/kv/\{rank\}\?limit=1GiB",
        ),
        ("cpu", {"cache__block_size": 16}, "block_size of vLLM is 16; on a CPU.*--block-size 32"),
        ("cpu", {"kv_transfer_config": transfer({"block_size": 12, "budget_tokens": 960})}, "is 32, not a multiple of.* 12"),
        ("cpu", {"cache__cache_dtype": "fp8_e4m3"}, "cache_dtype is fp8_e4m3.*--kv-cache-dtype auto"),
        ("cuda", {"cache__cache_dtype": "bfloat16"}, "cache_dtype is bfloat16"),
        ("cpu", {"cache__kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill is True"),
        ("cuda", {"cache__kv_cache_layout": "LBNHC"}, "kv_cache_layout is LBNHC.*VLLM_KV_CACHE_LAYOUT=LBHNC"),
        (
            "cuda",
            {"compilation_config": SimpleNamespace(cudagraph_mode=FULL)},
            "cudagraph_mode is FULL.*PIECEWISE",
        ),
        ("cuda", {"attention__backend": None}, "backend is None.*--attention-backend CUSTOM"),
        ("cuda", {"attention__backend": Backend.FLASH_ATTN}, "backend is FLASH_ATTN.*--attention-backend CUSTOM"),
        ("cuda", {"attention__backend": Foreign.CUSTOM}, "another plug-in.*VLLM_PLUGINS"),
        ("cuda", {"attention__backend": Unregistered.CUSTOM}, "VLLM_PLUGINS"),
    ],
)
def test_settings_that_do_not_fit(device, changes, message):
    with pytest.raises(ConfigError, match=message):
        check(engine(device, **changes))


def test_every_worker_has_a_tier_of_its_own():
    tiers = ["memory:", "file:/var/kv/{rank}?limit=1GiB"]
    check(engine(kv_transfer_config=transfer({"tier": tiers})))
    alone = {"kv_transfer_config": transfer({"tier": "file:/var/kv"}), "parallel__tensor_parallel_size": 1}
    check(engine(**alone))
    with pytest.raises(ConfigError, match="there are 2 workers or more"):
        check(engine(**alone, parallel__data_parallel_index=1))
    settings = AdapterConfig.from_extra({"tier": tiers}, 32)
    assert settings.of_rank(3).tiers == ("memory:", "file:/var/kv/3?limit=1GiB")
    assert settings.shares_tiers  # as far as it knows
    assert not AdapterConfig.from_extra({"tier": tiers[1]}, 32).shares_tiers
    alone = AdapterConfig.from_extra({}, 32)
    assert not alone.shares_tiers
    assert alone.of_rank(1) == alone.core


@pytest.mark.parametrize(("layout", "fits"), [("NHD", False), ("HND", True), ("LBHNC", True), ("BLHNC", False)])
def test_the_layout_that_the_environment_asks_for(monkeypatch, layout, fits):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    check(engine())  # the CPU has one layout only, and vLLM refuses others itself
    if fits:
        check(engine("cuda"))
    else:
        with pytest.raises(ConfigError, match=f"VLLM_KV_CACHE_LAYOUT is {layout}"):
            check(engine("cuda"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_backend_without_the_connector(device):
    for other in (None, transfer(connector="NixlConnector")):
        config = engine(device, kv_transfer_config=other, attention__backend=Backend.CUSTOM)
        with pytest.raises(ConfigError, match=r"CUSTOM, which is OasisKV's, but kv_connector is (None|NixlConnector)"):
            check_settings(config, None)


def test_inside_a_multi_connector():
    def multi(*names):
        return transfer({"connectors": [{"kv_connector": name} for name in names]}, "MultiConnector")

    check(engine(kv_transfer_config=multi("NixlConnector", "OffloadingConnector")))
    with pytest.raises(ConfigError, match=r"MultiConnector with OasisKV in it.*kv_connector=OasisKV"):
        check(engine(kv_transfer_config=multi("NixlConnector", "OasisKV")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__use_mla": True}, "MLA"),
        ({"model__is_encoder_decoder": True}, "encoder-decoder"),
        ({"model__is_attention_free": True}, "no attention at all"),
        ({"model__is_diffusion": True}, "diffusion"),
        ({"model__is_hybrid": True}, "no full-attention layer"),
        ({"text__layer_types": ["sliding_attention"] * 2}, "layer_types are sliding_attention"),
        ({"model__rswa_window": 128}, "window 128"),
        ({"model__uses_alibi": True}, "ALiBi"),
        ({"model__is_mm_prefix_lm": True}, "image see each other both ways"),
        ({"text__attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ({"text__model_type": "gpt_oss"}, "sinks"),
        ({"text__add_full_attention_sink_bias": True}, "sinks"),
        ({"text__num_kv_shared_layers": 10}, "num_kv_shared_layers 10"),
    ],
)
def test_models_that_cannot_be_served(changes, message):
    with pytest.raises(UnsupportedModel, match=f"model is org/model, .*{message}"):
        check(engine(**changes))


# --- check_layers


def layer(impl=None, **changes):
    parts = SimpleNamespace(**{"alibi_slopes": None, "sinks": None, "logits_soft_cap": 0, **(impl or {})})
    plain = {
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_size": 64,
        "head_size_v": 64,
        "sliding_window": None,
        "has_sink": False,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "kv_cache_dtype": "auto",
    }
    return SimpleNamespace(impl=parts, **{**plain, **changes})


def test_plain_layers_pass():
    check_layers({"a": layer(), "b": layer(), "c": layer(impl={"logits_soft_cap": None})})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_type": "encoder_only"}, "attention of type encoder_only"),
        ({"sliding_window": 512}, "a sliding window of 512 tokens"),
        ({"impl": {"alibi_slopes": torch.ones(8)}}, "ALiBi"),
        ({"impl": {"sinks": torch.ones(8)}}, "sinks"),
        ({"has_sink": True}, "sinks"),
        ({"impl": {"logits_soft_cap": 30.0}}, "a soft cap of 30.0"),
        ({"kv_sharing_target_layer_name": "a"}, "reads that of a"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "type int8_per_token_head"),
        ({"head_size_v": 32}, r"another size than its keys \(32\)"),
        ({"head_size": 32, "head_size_v": 32}, r"head_size differs between layers \(64 in a, 32 in b\)"),
        ({"num_kv_heads": 4}, r"num_kv_heads differs between layers \(2 in a, 4 in b\)"),
    ],
)
def test_layers_that_cannot_be_served(changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        check_layers({"a": layer(), "b": layer(**changes)})


def test_no_layer_at_all():
    with pytest.raises(UnsupportedModel, match="no full-attention layer"):
        check_layers({})


# --- check_versions


def stand_in(hook):
    """A function, or a value, with what a hook needs."""
    if not hook.parameters and hook.optional is None:
        return "there"
    names = ["self", *hook.parameters]
    scope = {}
    exec(f"def function({', '.join(names)}): pass", scope)
    return scope["function"]


@pytest.fixture
def installed(monkeypatch):
    """A vLLM that has all hooks: its modules by name. `vllm` is the first."""
    modules = {"vllm": ModuleType("vllm")}
    modules["vllm"].__version__ = "0.32.0"
    for hook in checks._HOOKS:
        module = modules.setdefault(hook.module, ModuleType(hook.module))
        owner, _, name = hook.name.rpartition(".")
        if owner and not hasattr(module, owner):
            setattr(module, owner, type(owner, (), {}))
        setattr(getattr(module, owner) if owner else module, name, stand_in(hook))
    for name in list(sys.modules):
        if name == "vllm" or name.startswith("vllm."):
            monkeypatch.delitem(sys.modules, name)
    for name, module in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts)):  # packages on the way
            package = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, package, modules.get(package) or sys.modules.get(package) or ModuleType(package))
        monkeypatch.setitem(sys.modules, name, module)
    return modules


@pytest.mark.parametrize("version", ["0.30.0", "0.31.2", "0.32.0", "0.32.1.dev3+gabc", "dev"])
def test_versions_that_have_all_hooks(installed, version):
    installed["vllm"].__version__ = version
    check_versions()


def test_a_newer_version_is_used_with_a_warning(installed, caplog):
    installed["vllm"].__version__ = "0.40.0"
    check_versions()
    assert "vllm-untested version=0.40.0" in caplog.text


def test_versions_that_are_too_old(installed):
    installed["vllm"].__version__ = "0.29.1"
    with pytest.raises(ConfigError, match=r"vllm is 0.29.1, .*install vllm>=0.30,<0.33"):
        check_versions()


def test_no_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match="vllm cannot be imported"):
        check_versions()


@pytest.mark.parametrize("hook", checks._HOOKS, ids=lambda hook: hook.name)
def test_every_hook_is_looked_for(installed, hook):
    owner, _, name = hook.name.rpartition(".")
    module = installed[hook.module]
    delattr(getattr(module, owner) if owner else module, name)
    with pytest.raises(ConfigError, match=rf"vllm is 0.32.0, .*{hook.name}; install vllm>=0.30,<0.33"):
        check_versions()


def test_all_faults_are_named_at_once(installed):
    manager = installed[checks._MANAGER].SingleTypeKVCacheManager
    manager.free = lambda self, request_id, urgent: None
    manager.pop_blocks_for_free = lambda self, request: None
    del sys.modules[checks._BACKENDS]
    sys.modules[checks._BACKENDS] = None
    with pytest.raises(ConfigError) as caught:
        check_versions()
    for part in (
        "SingleTypeKVCacheManager.free (an unknown parameter urgent)",
        "pop_blocks_for_free (no parameter request_id, an unknown parameter request)",
        "register_backend (",
    ):
        assert part in str(caught.value)


def test_a_parameter_may_be_one_of_newer_versions(installed):
    manager = installed[checks._MANAGER].SingleTypeKVCacheManager
    old = manager.get_num_blocks_to_allocate
    scope = {}
    names = ", ".join(old.__code__.co_varnames)
    exec(f"def function({names}, apply_admission_cap=False, prefill_end=0): pass", scope)
    manager.get_num_blocks_to_allocate = scope["function"]
    check_versions()


def test_a_field_of_a_dataclass_without_a_default_is_a_field(installed):
    output = installed["vllm.v1.core.sched.output"]
    output.SchedulerOutput = dataclasses.make_dataclass("SchedulerOutput", [("has_sync_kv_loads", bool)])
    check_versions()
