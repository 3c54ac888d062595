"""Retrieval through a working set beside full attention: which of the facts that full attention finds are found?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from oasiskv import OasisConfig
from oasiskv.testing.retrieval import Document, Item

from .replay import full_attention, read_prompt, replay
from .replay_cache import Prompt


@dataclass(frozen=True)
class Outcome:
    """Whether an item was got, by full attention and by working sets.

    Attributes:
        kind, depth: of the item.
        length: tokens of its document.
        full: whether every token of the answer was the most likely one, the true ones before it given.
        sparse: the same under each configuration, by name.
    """

    kind: str
    length: int
    depth: float
    full: bool
    sparse: dict[str, bool]


def measure_retrieval(
    model: PreTrainedModel,
    tokenizer: Any,  # noqa: ANN401 - tokenizers share no typed base
    configs: Mapping[str, OasisConfig],
    documents: Iterable[Document],
    progress: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Read each document once, without its questions, and ask each as if it were the only one.

    A forward of several tokens attends to everything, so a question is decoded token by token, as if the model had written it:
    what is not resident when the document ends must be found while the question is read. The steps are replayed
    (`oasiskv.replay`).

    Args:
        model: any that an `OasisCache` serves.
        tokenizer: of the model.
        configs: of the working sets, by name; all of one block size.
        documents: see `oasiskv.testing.retrieval.documents`.
        progress: gets each outcome.
    """
    outcomes = []
    first = next(iter(configs.values()))
    summaries = sorted({config.summary for config in configs.values()})
    for document in documents:
        ids = _encoded(tokenizer, model, document.text, special=True)
        prompt = read_prompt(model, ids[:, :-1], summaries, first)
        for item in document.items:
            outcomes.append(_ask(model, tokenizer, configs, prompt, ids[:, -1:], item))
            progress(outcomes[-1])
    return outcomes


def _ask(
    model: PreTrainedModel,
    tokenizer: Any,  # noqa: ANN401 - as above
    configs: Mapping[str, OasisConfig],
    prompt: Prompt,
    last: torch.Tensor,
    item: Item,
) -> Outcome:
    question, answer = (_encoded(tokenizer, model, text) for text in (item.question, item.answer))
    rows = torch.cat([last, question, answer[:, :-1]], dim=1)

    def got(log_probabilities: torch.Tensor) -> bool:
        return torch.equal(log_probabilities[:, -answer.shape[1] :].argmax(-1), answer)

    return Outcome(
        item.kind,
        prompt.length + 1,
        item.depth,
        got(full_attention(model, [prompt], rows)),
        {name: got(replay(model, [prompt], rows, config).log_probabilities) for name, config in configs.items()},
    )


def _encoded(tokenizer: Any, model: PreTrainedModel, text: str, special: bool = False) -> torch.Tensor:  # noqa: ANN401 - as above
    ids: torch.Tensor = tokenizer(text, return_tensors="pt", verbose=False, add_special_tokens=special).input_ids
    return ids.to(model.device)
