"""Every option of every command with values that cannot be right: one line, exit code 2, nothing read or loaded."""

import argparse
import re

import pytest

from oasiskv.cli import calibrate, doctor, evaluate, generate, main

COMMANDS = {
    "generate": (generate, ["--model", "nowhere/at/all", "--sample-text", "argparse"]),
    "eval": (evaluate, ["--model", "nowhere/at/all", "--sample-text", "argparse"]),
    "calibrate": (calibrate, ["--model", "nowhere/at/all", "--sample-text", "argparse", "--output", "model.npz"]),
    "doctor": (doctor, []),
}
BAD = {int: ["x", "-1", "1.5", ""], float: ["x", "-1", "nan", "inf"], str: [""]}
NAMED = {
    "--device": ["", "cuda:99", "gpu", "meta", "cpu:1"],
    "--model": ["", "nowhere/at/all"],
    "--sample-text": ["", "nowhere"],
    "--arena": ["", "x", "-1"],
    "--tier": ["", "nowhere", "nowhere:", "memory:?limit=1", "file:", "file:~nobody-of-this-name/kv", "memory:?limit=x"],
    "--budgets": ["", "x", "-1", "1,,2"],
    "--summary": ["", "nowhere"],
    "--predictor": ["", "nowhere"],
    "--prompt-file": ["/nowhere", "/"],
    "--text": ["/nowhere", "/"],
    "--output": ["", "/nowhere/x.npz", "x.txt"],
    "--plot": ["", "x.txt", "/nowhere/x.png"],
    "--trace": ["/", "/nowhere/x.json"],
    "--draft": ["nowhere/at/all"],
    "--dtype": ["", "int8"],
    "--question": [],
}


def options_of(command: str) -> list[argparse.Action]:
    commands = argparse.ArgumentParser().add_subparsers()
    COMMANDS[command][0].add_parser(commands)
    (parser,) = commands.choices.values()
    return [action for action in parser._actions if action.option_strings and action.nargs != 0]


CASES = [
    (command, action.option_strings[0], value)
    for command in COMMANDS
    for action in options_of(command)
    for value in NAMED.get(action.option_strings[0], BAD.get(action.type or str, []))
]


@pytest.mark.parametrize(("command", "option", "value"), CASES)
def test_a_wrong_value_ends_in_one_line(command, option, value, capfd, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = list(COMMANDS[command][1])
    if option in ("--prompt-file", "--text", "--sample-text"):  # one of them at a time
        place = arguments.index("--sample-text")
        del arguments[place : place + 2]
    try:
        code = main([command, *arguments, f"{option}={value}"])
    except SystemExit as error:  # how argparse ends
        code = error.code
    printed = capfd.readouterr().err
    assert code == 2, printed
    assert "Traceback" not in printed
    message = [line for line in printed.splitlines() if re.match(r"oasiskv.*: error: ", line)]
    assert len(message) == 1
    assert printed.splitlines()[-1] == message[0]
