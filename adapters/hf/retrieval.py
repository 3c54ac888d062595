"""Retrieval through a working set beside full attention: which of the facts that full attention finds are found?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from oasiskv import OasisConfig
from oasiskv.testing.retrieval import Document

from .binding import cache_keyword
from .cache import OasisCache

_Asked = list[tuple[torch.Tensor, torch.Tensor]]
"""Tokens of questions and of their answers, `(1, num_tokens)`."""


@dataclass(frozen=True)
class Outcome:
    """Whether an item was got, by full attention and by the working set.

    Attributes:
        kind, depth: of the item.
        length: tokens of its document.
        full, sparse: whether every token of the answer was the most likely one, the true ones before it given.
    """

    kind: str
    length: int
    depth: float
    full: bool
    sparse: bool


def measure_retrieval(
    model: PreTrainedModel,
    tokenizer: Any,  # noqa: ANN401 - tokenizers share no typed base
    config: OasisConfig,
    documents: Iterable[Document],
    progress: Callable[[Outcome], None] = lambda _: None,
    chunk: int = 4096,
) -> list[Outcome]:
    """Read each document once per cache, without its questions, and ask them one after the other.

    A forward of several tokens attends to everything, so questions are fed to the working set token by token, as if the model
    had written them: what is not resident must be found. `crop` removes a question before the next one. The blocks that it had
    selected stay selected, as between the turns of a conversation.

    Args:
        model: with full attention in every layer; sliding layers cannot be cropped behind their window.
        tokenizer: of the model.
        config: of the working set.
        documents: see `oasiskv.testing.retrieval.documents`.
        progress: gets each outcome. Those of a document come one after the other, once its questions are all answered.
        chunk: most tokens of a document in one forward.
    """
    outcomes = []
    with torch.no_grad():
        for document in documents:
            ids = _encoded(tokenizer, model, document.text, special=True)
            asked = [
                (_encoded(tokenizer, model, item.question), _encoded(tokenizer, model, item.answer)) for item in document.items
            ]
            full = list(_full(model, ids, asked, chunk))
            sparse = list(_sparse(model, ids, asked, chunk, config))
            for item, full_got, sparse_got in zip(document.items, full, sparse, strict=True):
                outcomes.append(Outcome(item.kind, ids.shape[1], item.depth, full_got, sparse_got))
                progress(outcomes[-1])
    return outcomes


def _encoded(tokenizer: Any, model: PreTrainedModel, text: str, special: bool = False) -> torch.Tensor:  # noqa: ANN401 - as above
    ids: torch.Tensor = tokenizer(text, return_tensors="pt", verbose=False, add_special_tokens=special).input_ids
    return ids.to(model.device)


def _full(model: PreTrainedModel, ids: torch.Tensor, asked: _Asked, chunk: int) -> Iterator[bool]:
    """Full attention needs one forward per question."""
    held = DynamicCache(config=model.config.get_text_config(decoder=True))
    keyword = cache_keyword(model)
    for piece in ids.split(chunk, dim=1):
        model(piece, **{keyword: held}, logits_to_keep=1)
    for question, answer in asked:
        tokens = torch.cat([question, answer[:, :-1]], dim=1)
        logits = model(tokens, **{keyword: held}, logits_to_keep=answer.shape[1]).logits
        yield torch.equal(logits.argmax(-1), answer)
        held.crop(-tokens.shape[1])


def _sparse(model: PreTrainedModel, ids: torch.Tensor, asked: _Asked, chunk: int, config: OasisConfig) -> Iterator[bool]:
    """The working set is looked up in forwards of one token only."""
    with OasisCache.for_model(model, config) as cache:
        for piece in ids.split(chunk, dim=1):
            model(piece, **{cache.keyword: cache}, logits_to_keep=1)
        for question, answer in asked:
            tokens = torch.cat([question, answer[:, :-1]], dim=1)
            picked = [model(token, **{cache.keyword: cache}).logits[:, -1].argmax(-1) for token in tokens.split(1, dim=1)]
            yield torch.equal(torch.stack(picked[-answer.shape[1] :], dim=1), answer)
            cache.crop(-tokens.shape[1])
