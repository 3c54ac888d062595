"""The command, as a person and as a machine calls it."""

import json
import re
from collections import Counter

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oasiskv.cli import main

from ..unit.traces import check
from .hf.families import tiny


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny model with a tokenizer of one token per word."""
    path = tmp_path_factory.mktemp("model")
    tiny("llama").save_pretrained(path)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, 211)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<s>", clean_up_tokenization_spaces=False
    ).save_pretrained(path)
    return path


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text(" ".join(f"w{3 + number * 7 % 200}" for number in range(400)))
    return path


def call(directory, text, *more):
    return main(
        [
            *("generate", "--model", str(directory), "--prompt-file", str(text), "--max-new-tokens", "12"),
            *("--budget", "128", "--block-size", "8", "--window", "16", *more),
        ]
    )


def test_text_and_table(directory, text, capsys):
    assert call(directory, text) == 0
    out = capsys.readouterr().out
    assert "KV on the device" in out
    assert "share of full KV" in out


@pytest.mark.parametrize("more", [[], ["--compare"], ["--draft", "prompt-lookup"]], ids=["plain", "compare", "lookup"])
def test_json(directory, text, capsys, more):
    assert call(directory, text, "--json", *more) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["prompt_tokens"] == 400
    assert 0 < report["new_tokens"] <= 12
    assert report["stats"]["device_bytes"] > 0
    assert (report["fidelity"] is not None) == ("--compare" in more)
    if report["fidelity"]:
        assert report["fidelity"]["mean_kl"] >= 0
        assert 0 <= report["fidelity"]["agreement"] <= 1


def test_a_draft_model(directory, text, capsys):
    assert call(directory, text, "--json", "--draft", str(directory)) == 0
    assert json.loads(capsys.readouterr().out)["new_tokens"] > 0


@pytest.mark.parametrize("more", [[], ["--compare"]], ids=["plain", "compare"])
def test_a_trace_shows_every_step_and_layer(directory, text, tmp_path, capsys, more):
    path = tmp_path / "steps.json"
    assert call(directory, text, "--json", "--trace", str(path), *more) == 0
    report = json.loads(capsys.readouterr().out)
    tracks = check(json.loads(path.read_text()))
    names = Counter(event["name"] for event in tracks["foreground"])
    assert names["step"] == report["stats"]["steps"]
    assert names["attend 0"] == names["attend 1"] == names["step"]
    assert sum(event["args"]["blocks"] for event in tracks["transfer"]) == report["stats"]["loaded_blocks"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--budget", "100"], "budget_tokens is 100, not a multiple of block_size 8"),
        (["--budget", "32"], "cannot hold the sinks"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["--summary", "nonsense"], "no plug-in 'nonsense'.*minmax.*transform"),
        (["--trace", "/"], "--trace is /, a directory"),
        (["--trace", "/nowhere/steps.json"], "--trace is /nowhere/steps.json, and there is no directory /nowhere"),
        (["--compare", "--draft", "prompt-lookup"], "takes no --draft"),
    ],
)
def test_bad_settings(directory, text, capsys, more, message):
    assert call(directory, text, *more) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert "Traceback" not in error


def test_a_prompt_longer_than_the_model(directory, tmp_path, capsys):
    path = tmp_path / "long.txt"
    path.write_text("w5 " * 2000)
    assert call(directory, path) == 2
    assert "2000 tokens and the model reads 1024" in capsys.readouterr().err


def test_missing_and_empty_files(directory, tmp_path, capsys):
    assert call(directory, tmp_path / "nowhere.txt") == 2
    assert "nowhere.txt" in capsys.readouterr().err
    empty = tmp_path / "empty.txt"
    empty.write_text("  \n")
    assert call(directory, empty) == 2
    assert "is empty" in capsys.readouterr().err


def test_no_such_model(text, capsys, tmp_path):
    assert call(tmp_path / "no-model", text) == 2
    assert "no-model" in capsys.readouterr().err


def test_bad_usage_exits_with_2():
    with pytest.raises(SystemExit) as caught:
        main(["generate"])
    assert caught.value.code == 2
