"""`oasiskv eval`, as a person and as a machine calls it."""

import json
import re
import sys

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oasiskv.cli import main

from .hf.families import prompt, tiny


def save(path, family, dtype=torch.float32):
    """A tiny model with a tokenizer of one token per word."""
    tiny(family, dtype).save_pretrained(path)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, 211)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<s>", clean_up_tokenization_spaces=False
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def text(tmp_path):
    return write(tmp_path / "text.txt", 700)


def write(path, tokens, seed=3):
    path.write_text(" ".join(f"w{token}" for token in prompt(1, tokens, seed)[0].tolist()))
    return path


def call(directory, text, *more):
    return main(
        [
            *("eval", "--model", str(directory), "--text", str(text), "--context", "400", "--spans", "2"),
            *("--span-tokens", "16", "--budgets", "304,72,128", "--block-size", "8", "--window", "16", *more),
        ]
    )


def measured(capsys, *arguments):
    assert call(*arguments, "--json") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_table_and_answer(directory, text, capsys):
    assert call(directory, text) == 0
    out = capsys.readouterr().out
    for column in ("budget", "KL", "same token", "NLL, PPL", "coverage", "moved", "in place", "device share"):
        assert column in out
    assert [int(line.split("│")[1]) for line in out.splitlines() if line.startswith("│")] == [72, 128, 304]
    assert len(re.findall(r"\d ± \d", out)) == 3
    assert re.search(r"(smallest budget with|none of these budgets has) KL below 0.02", out)
    assert "700 tokens, 2 spans" in out
    assert "3 of 3 layers with full attention" in out
    assert "the spans overlap" in out


def test_json(directory, text, capsys):
    report = measured(capsys, directory, text)
    assert [one["budget_tokens"] for one in report["budgets"]] == [72, 128, 304]
    for one in report["budgets"]:
        assert one["kl"] > 0
        assert one["kl_error"] >= 0
        assert 0 <= one["agreement"] <= 1
        assert one["agreement_error"] >= 0
        assert one["nll_error"] >= 0
        assert one["perplexity_ratio"] == pytest.approx(2.718281828 ** one["nll_difference"])
        assert 0 < one["coverage"] <= 1
        assert len(one["coverage_by_layer"]) == 3
        assert sum(one["coverage_by_layer"]) / 3 == pytest.approx(one["coverage"], abs=1e-5)
        assert 0 <= one["moved_blocks"] <= 4
        assert 0 <= one["read_in_place_blocks"] <= 4
        assert one["budget_tokens"] / 399 < one["device_share"] < 1
        assert 0 < one["summary_share"] < 0.5
    assert report["rule"] == {"kl_below": 0.02, "agreement_at_least": 0.95}
    close = [one["budget_tokens"] for one in report["budgets"] if one["kl"] < 0.02 and one["agreement"] >= 0.95]
    assert report["enough"] == min(close, default=None)
    assert report["texts"] == [{"name": str(text), "tokens": 700, "spans": 2, "overlap": True}]
    assert report["model"]["dtype"] == "float32"
    assert report["settings"]["context"] == 400
    assert report["machine"]["threads"] > 0
    assert report["seconds"] > 0


def test_a_larger_budget_is_closer(directory, text, capsys):
    budgets = measured(capsys, directory, text)["budgets"]
    for name, sign in (("kl", -1), ("coverage", 1), ("device_share", 1)):
        values = [sign * one[name] for one in budgets]
        assert values == sorted(values), name


def test_several_texts(directory, text, tmp_path, capsys):
    other = write(tmp_path / "other.txt", 416, seed=5)
    report = measured(capsys, directory, text, "--text", str(other))
    # The second text holds just one span.
    assert [(one["tokens"], one["spans"], one["overlap"]) for one in report["texts"]] == [(700, 2, True), (416, 1, False)]


def test_one_span_has_no_error(directory, text, capsys):
    report = measured(capsys, directory, text, "--spans", "1")
    assert {one["kl_error"] for one in report["budgets"]} == {None}
    assert call(directory, text, "--spans", "1") == 0
    assert "±" not in capsys.readouterr().out


def test_a_sample_text(directory, capsys):
    arguments = ["--span-tokens", "4", "--spans", "2", "--context"]
    assert main(["eval", "--model", str(directory), "--sample-text", "typing", *arguments, "400"]) == 0
    out = capsys.readouterr().out
    assert "typing (" in out
    assert "│ 256 " in out
    assert "│ 512 " not in out  # the context holds less
    assert main(["eval", "--model", str(directory), "--sample-text", "typing", *arguments, "200"]) == 2
    assert "--context is 200, and --budgets begins at 256" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "dtype"), [("gemma3", torch.float32), ("llama", torch.bfloat16), ("gemma3", torch.bfloat16)]
)
def test_hybrids_and_half_precision(family, dtype, tmp_path, text, capsys):
    directory = save(tmp_path / "model", family, dtype)
    report = measured(capsys, directory, text, "--dtype", str(dtype).removeprefix("torch."))
    assert report["model"]["full_attention_layers"] == (2 if family == "gemma3" else 3)
    assert all(-1e-3 < one["kl"] < 1 for one in report["budgets"])


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_plot(directory, text, tmp_path, capsys, ending):
    path = tmp_path / f"figure.{ending}"
    assert call(directory, text, "--plot", str(path)) == 0
    start = path.read_bytes()[:100]
    assert start.startswith(b"\x89PNG") if ending == "png" else b"<?xml" in start


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--budgets", "128,much"], "--budgets is '128,much'; it must be whole numbers"),
        (["--budgets", ""], "--budgets is ''"),
        (["--budgets", "128,400,800"], r"--budgets has 400, 800, and --context is 400.*below 399, or a larger --context"),
        (["--budgets", "100"], "budget_tokens is 100, not a multiple of block_size 8"),
        (["--budgets", "32"], "cannot hold the sinks"),
        (["--span-tokens", "0"], "--span-tokens is 0; it must be at least 1"),
        (["--spans", "0"], "--spans is 0; it must be at least 1"),
        (["--context", "1"], "--context is 1; it must be at least 2"),
        (["--span-tokens", "400"], "has 700 tokens, and --context 400 and --span-tokens 400 need 800; .*use --context 300 or"),
        (["--span-tokens", "699"], "the model reads 1024 tokens, and .* need 1099; use --context 325 or less"),
        (["--span-tokens", "1100"], "the model reads 1024 tokens, .*; use a smaller --context and --span-tokens"),
        (["--summary", "nonsense"], "no plug-in 'nonsense'.*minmax, "),
        (["--predictor", "nonsense"], "no plug-in 'nonsense'.*lookahead, "),
        (["--plot", "figure.gif"], r"--plot is figure.gif; it must end in .png or .svg"),
        (["--plot", "/nowhere/at/all/figure.png"], "there is no directory /nowhere/at/all"),
    ],
)
def test_errors(directory, text, capsys, more, message):
    assert call(directory, text, *more) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert "Traceback" not in error


def test_files_that_cannot_be_read(directory, tmp_path, capsys):
    assert call(directory, tmp_path / "nowhere.txt") == 2
    assert "nowhere.txt" in capsys.readouterr().err
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    assert call(directory, empty) == 2
    assert re.search(r"--text .*empty.txt is empty", capsys.readouterr().err)


def test_without_matplotlib(directory, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert call(directory, text, "--plot", str(tmp_path / "figure.png")) == 1
    assert "pip install matplotlib" in capsys.readouterr().err


def test_interrupted(directory, text, capsys, monkeypatch):
    from oasiskv.adapters.hf.measure import Spans

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Spans, "measure", interrupt)
    assert call(directory, text) == 130
    assert "interrupted" in capsys.readouterr().err


def test_bad_usage_exits_with_2():
    for arguments in (["eval"], ["eval", "--model", "x"], ["eval", "--model", "x", "--text", "a", "--sample-text", "manual"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
