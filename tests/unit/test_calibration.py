import numpy as np
import pytest
import torch

from oasiskv import KVManager, ModelShape, OasisConfig, Rotary
from oasiskv.abc import KeySample
from oasiskv.errors import ConfigError
from oasiskv.summaries.calibration import Calibration
from oasiskv.summaries.transform import HORIZON, Transform

from .driver import SHAPE as DRIVER_SHAPE
from .driver import Driver, tiny

SHAPE = ModelShape(num_layers=2, query_heads=4, kv_heads=2, head_dim=8, rotary=Rotary((1.0, 0.1, 0.001, 0.0001)))
CONFIG = OasisConfig(budget_tokens=64, block_size=4, sink_tokens=4, window_tokens=4)


def samples(seed, tokens=200):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(0, -1, 8)
    keys = [torch.randn(2, tokens, 8, generator=generator) * spread + 1 for _ in range(2)]
    queries = [torch.randn(tokens, 4, 8, generator=generator) * spread.flip(0) for _ in range(2)]
    return keys, queries


def observed(seed, config=CONFIG, tokens=200):
    summary = Transform(SHAPE, config)
    keys, queries = samples(seed, tokens)
    for layer in range(2):
        summary.observe(layer, queries[layer], torch.arange(tokens))
    return summary, [KeySample(layer, keys[layer], torch.arange(tokens)) for layer in range(2)]


def calibration(*seeds, max_tokens=300):
    parts = []
    for seed in seeds:
        summary, known = observed(seed)
        parts.append([summary.moments(sample) for sample in known])
    return Calibration.merged(parts, max_tokens)


def scores(summary):
    keys = torch.randn(9, 2, 4, 8, generator=torch.Generator().manual_seed(5))
    queries = torch.randn(1, 3, 4, 8, generator=torch.Generator().manual_seed(6))
    summary.reserve(9)
    summary.write(1, torch.arange(9), keys)
    return summary.score(1, queries, torch.arange(9)[None], 0.3)


def test_a_calibration_of_one_text_gives_the_code_that_a_fit_gives(tmp_path, monkeypatch):
    monkeypatch.setattr("oasiskv.summaries.transform.QUERY_START", 0.0)
    calibration(1, max_tokens=int(HORIZON * 200)).save(tmp_path / "c.npz")
    summary, known = observed(1)
    summary.fit(known)
    ready = Transform(SHAPE, OasisConfig(budget_tokens=64, block_size=4, sink_tokens=4, window_tokens=4,
                                         calibration=str(tmp_path / "c.npz")))  # fmt: skip
    assert ready.fitted
    torch.testing.assert_close(scores(ready), scores(summary), rtol=1e-3, atol=1e-3)


def test_texts_weigh_alike(tmp_path):
    one, two, both = calibration(1), calibration(2), calibration(1, 2)
    for layer in range(2):
        expected = (one.layers[layer].key_second + two.layers[layer].key_second) / 2
        torch.testing.assert_close(both.layers[layer].key_second, expected)
        size = one.layers[layer].query_second + two.layers[layer].query_second
        torch.testing.assert_close(both.layers[layer].query_second, size / 2)
    both.save(tmp_path / "c.npz")
    again = Calibration.load(tmp_path / "c.npz", SHAPE)
    assert again.max_tokens == 300
    torch.testing.assert_close(again.layers[1].key_mean, both.layers[1].key_mean.float())


@pytest.mark.parametrize("case", ["missing", "text", "arrays", "model", "format"])
def test_a_file_that_does_not_fit_is_refused(tmp_path, case):
    path, expected = tmp_path / "c.npz", "cannot be read.*oasiskv calibrate"
    if case == "text":
        path.write_text("no archive")
    elif case == "arrays":
        np.savez(path, format=1, other=np.zeros(3))
    elif case == "format":
        np.savez(path, format=9)
        expected = "format 9"
    elif case == "model":
        calibration(1).save(path)
        expected = r"\(2, 2, 8\).*\(2, 2, 4\)"
    shape = ModelShape(num_layers=2, query_heads=2, kv_heads=2, head_dim=4) if case == "model" else SHAPE
    with pytest.raises(ConfigError, match=expected):
        Transform(shape, OasisConfig(calibration=str(path)))


def test_a_calibrated_manager_never_fits(tmp_path, monkeypatch):
    torch.manual_seed(0)
    tokens, shape = 100, DRIVER_SHAPE
    summary = Transform(shape, tiny())
    for layer in range(shape.num_layers):
        summary.observe(layer, torch.randn(tokens, shape.query_heads, shape.head_dim), torch.arange(tokens))
    known = [
        KeySample(layer, torch.randn(shape.kv_heads, tokens, shape.head_dim), torch.arange(tokens))
        for layer in range(shape.num_layers)
    ]
    Calibration.merged([[summary.moments(sample) for sample in known]], 400).save(tmp_path / "c.npz")
    monkeypatch.setattr(Transform, "fit", lambda *_: pytest.fail("fitted"))
    with KVManager(shape, tiny(summary="transform", calibration=str(tmp_path / "c.npz"))) as manager:
        driver = Driver(manager)
        sequence = driver.create(60)
        for _ in range(60):
            driver.decode(sequence)
        driver.check()
