"""What an operator is told of hints that cannot be had, and that it reaches vLLM's log."""

import logging
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from oasiskv.adapters.vllm.notices import show_warnings, warn_of_lost_hints
from oasiskv.log import LOGGER, event


def config(mode=0, lora=None):
    return SimpleNamespace(lora_config=lora, compilation_config=SimpleNamespace(mode=mode))


@pytest.mark.parametrize(
    ("engine", "reason", "instead"),
    [
        (config(mode=3), "the model is compiled", "--enforce-eager, or set predictor to lookahead"),
        (
            config(lora=object()),
            "LoRA adapters are enabled",
            "merge the adapter into the weights, or set predictor to lookahead",
        ),
        (config(mode=3, lora=object()), "LoRA adapters are enabled", "merge the adapter"),
    ],
)
def test_what_lost_hints_cost_is_said_with_the_way_out(caplog, engine, reason, instead):
    warn_of_lost_hints(engine, "layer-ahead")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.event == "hints-lost"
    assert record.values["reason"] == reason
    assert instead in record.values["instead"]
    assert "4% higher" in record.getMessage()


@pytest.mark.parametrize(("engine", "predictor"), [(config(), "layer-ahead"), (config(mode=3, lora=object()), "lookahead")])
def test_nothing_is_said_where_nothing_is_lost(caplog, engine, predictor):
    warn_of_lost_hints(engine, predictor)
    assert not caplog.records


@contextmanager
def logged_by_vllm(monkeypatch, root_handlers):
    """What vLLM's handler gets, in a process whose root logger has these handlers."""
    got, root, vllm = [], logging.getLogger(), logging.getLogger("vllm")
    handler = logging.Handler()
    handler.emit = got.append
    monkeypatch.setattr(LOGGER, "handlers", [])
    monkeypatch.setattr(vllm, "handlers", [handler])
    monkeypatch.setattr(vllm, "propagate", False)
    kept = root.handlers[:]
    root.handlers[:] = root_handlers
    try:
        yield got
    finally:
        root.handlers[:] = kept  # pytest's own


def test_warnings_reach_the_log_of_vllm_once(monkeypatch):
    with logged_by_vllm(monkeypatch, []) as got:
        show_warnings()
        show_warnings()
        event(logging.WARNING, "tier-wait")
        event(logging.INFO, "settle")
    assert [record.event for record in got] == ["tier-wait"]


def test_a_process_that_logs_everything_is_let_alone(monkeypatch):
    with logged_by_vllm(monkeypatch, [logging.NullHandler()]) as got:
        show_warnings()
        event(logging.WARNING, "tier-wait")
    assert not got
