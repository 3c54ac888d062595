"""`oasiskv calibrate`, and what its file is good for."""

import pytest

from oasiskv import OasisConfig
from oasiskv.adapters.hf import OasisCache
from oasiskv.cli import main

from .hf.families import prompt, tiny
from .test_cli_eval import save, write


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"), "llama")


def call(directory, output, *texts, more=()):
    named = [argument for text in texts for argument in ("--text", str(text))]
    return main(["calibrate", "--model", str(directory), "--output", str(output), *named, *more])


def test_a_calibration_serves_the_model(directory, tmp_path, capsys):
    output = tmp_path / "model.npz"
    texts = [write(tmp_path / f"{seed}.txt", 400, seed) for seed in (1, 2)]
    assert call(directory, output, *texts, more=("--tokens", "300", "--max-tokens", "900")) == 0
    assert "2 texts, 600 tokens; for texts of 900 tokens" in capsys.readouterr().out
    model = tiny("llama")
    config = OasisConfig(budget_tokens=96, block_size=8, sink_tokens=8, window_tokens=16, workers=0, calibration=str(output))
    with OasisCache.for_model(model, config) as cache:
        assert cache.manager.rooms.summary.fitted
        model.generate(prompt(1, 300), **{cache.keyword: cache}, max_new_tokens=8, do_sample=False)
        assert cache.manager.fitted_length is None
        cache.manager.check_integrity()


@pytest.mark.parametrize(
    ("output", "tokens", "more", "message"),
    [
        ("model.pt", 400, (), "must end in .npz"),
        ("nowhere/model.npz", 400, (), "no directory"),
        ("model.npz", 100, (), "has 100 tokens; statistics need at least 256"),
        ("model.npz", 400, ("--tokens", "10"), "--tokens is 10; it must be at least 256"),
        ("model.npz", 400, ("--max-tokens", "0"), "--max-tokens is 0"),
    ],
)
def test_bad_input_is_refused(directory, tmp_path, capsys, output, tokens, more, message):
    assert call(directory, tmp_path / output, write(tmp_path / "text.txt", tokens), more=more) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / output).exists()
