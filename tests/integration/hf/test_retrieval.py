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


def test_a_budget_above_the_context_gets_what_full_attention_gets():
    model = tiny("llama")
    shown = []
    outcomes = measure_retrieval(
        model, Numbers(), OasisConfig(budget_tokens=256, block_size=8), [task(model)], shown.append, 64
    )
    assert [outcome.full for outcome in outcomes] == [True, False] * 3
    assert [outcome.sparse for outcome in outcomes] == [True, False] * 3
    assert [(outcome.kind, outcome.length) for outcome in outcomes] == [("right", 200), ("wrong", 200)] * 3
    assert shown == outcomes


def test_a_small_budget_is_asked_too_and_the_model_is_put_back():
    model = tiny("llama")
    config = OasisConfig(budget_tokens=96, block_size=8, sink_tokens=8, window_tokens=16)
    before = model.config._attn_implementation
    outcomes = measure_retrieval(model, Numbers(), config, [task(model), task(model, 150)])
    assert len(outcomes) == 12
    assert [outcome.full for outcome in outcomes] == [True, False] * 6
    assert model.config._attn_implementation == before
