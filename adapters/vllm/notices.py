"""Warnings that an operator must see: those of OasisKV in vLLM's log, and one of its own about hints that cannot be had."""

from __future__ import annotations

import logging
from typing import Any

from oasiskv import registry
from oasiskv.abc import Predictor
from oasiskv.log import LOGGER, event

COST = (
    "this predictor acts as lookahead, which reads more blocks in place: a KL from full attention 4% higher at a budget of 512 "
    "of 4,096 tokens, 2.4 times as high with correction_blocks 0"
)
"""Measured in docs/fidelity.md, under "Predictors"."""


class _ToVllm(logging.Handler):
    """Passes warnings on to vLLM's handlers: vLLM sets up its own logger only, and others print nothing."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger("vllm").handle(record)


def show_warnings() -> None:
    """Let OasisKV's warnings appear in vLLM's log, unless the process logs everything anyway. Idempotent."""
    if logging.getLogger().handlers or any(isinstance(handler, _ToVllm) for handler in LOGGER.handlers):
        return
    LOGGER.addHandler(_ToVllm(logging.WARNING))


def uses_hints(predictor: str) -> bool:
    """Whether a predictor, by its name, makes use of hints where it gets them."""
    made = registry.load(registry.PREDICTORS, predictor, Predictor)
    return getattr(made, "guess", Predictor.guess) is not Predictor.guess


def why_no_hints(vllm_config: Any) -> tuple[str, str] | None:
    """Why an engine can have no hints, and what to do about it; `None` if it may have them. Hooks do not run in a compiled
    model, and layers with adapters know whose each row of the whole batch is."""
    if vllm_config.lora_config is not None:
        return "LoRA adapters are enabled", "merge the adapter into the weights, or set predictor to lookahead"
    if vllm_config.compilation_config.mode:
        return "the model is compiled", "--enforce-eager, or set predictor to lookahead"
    return None


def warn_of_lost_hints(vllm_config: Any, predictor: str) -> None:
    """Warn if a predictor wants hints that this engine cannot have. To be called once per engine."""
    lost = why_no_hints(vllm_config)
    if lost is not None and uses_hints(predictor):
        reason, instead = lost
        event(logging.WARNING, "hints-lost", predictor=predictor, reason=reason, cost=COST, instead=instead)
