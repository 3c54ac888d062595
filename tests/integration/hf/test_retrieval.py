import torch
from transformers import BatchEncoding

from oasiskv import OasisConfig
from oasiskv.adapters.hf.retrieval import measure_retrieval
from oasiskv.testing.retrieval import Document, Item

from .families import prompt, tiny


class Numbers:
    """A tokenizer of texts that are token ids."""

    def __call__(self, text, **_):
        return BatchEncoding({"input_ids": torch.tensor([[int(word) for word in text.split()]])})


def written(ids):
    return " ".join(str(number) for number in ids)


def task(model, length=200):
    """Questions whose answers the model gives by itself, and the same with a wrong last token."""
    ids = prompt(1, length)[0]
    items = []
    for number, question in enumerate(([5, 9, 17], [30, 8], [101])):
        asked = torch.cat([ids, torch.tensor(question, device=ids.device)])[None]
        answer = model.generate(asked, max_new_tokens=4, min_new_tokens=4, do_sample=False)[0, -4:].tolist()
        items.append(Item("right", 0.1 * number, written(question), written(answer)))
        items.append(Item("wrong", 0.1 * number, written(question), written([*answer[:-1], (answer[-1] + 1) % 211])))
    return Document("numbers", length, written(ids.tolist()), tuple(items))


def test_questions_that_full_attention_gets_are_told_from_those_that_it_does_not():
    model = tiny("llama")
    configs = {
        "wide": OasisConfig(budget_tokens=192, block_size=8, sink_tokens=8, window_tokens=16, workers=0),
        "narrow": OasisConfig(budget_tokens=96, block_size=8, sink_tokens=8, window_tokens=16, workers=0, predictor="oracle"),
    }
    shown = []
    before = model.config._attn_implementation
    outcomes = measure_retrieval(model, Numbers(), configs, [task(model), task(model, 250)], shown.append)
    assert [outcome.full for outcome in outcomes] == [True, False] * 6
    assert [outcome.sparse["wide"] for outcome in outcomes[:6]] == [True, False] * 3
    assert all(set(outcome.sparse) == {"wide", "narrow"} for outcome in outcomes)
    assert [(outcome.kind, outcome.length) for outcome in outcomes[:6]] == [("right", 200), ("wrong", 200)] * 3
    assert shown == outcomes
    assert model.config._attn_implementation == before
