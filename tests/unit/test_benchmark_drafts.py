import torch

from benchmarks.drafts import perfect, prompt_lookup


def test_perfect_drafts_are_the_text_itself():
    tokens = torch.arange(11)[None]
    drafted = perfect(tokens, 4)
    assert torch.equal(drafted.ids, tokens)
    assert drafted.rows == drafted.accepted == [5, 5, 1]


def test_prompt_lookup_proposes_what_followed_and_keeps_what_is_right():
    prompt, tokens = torch.tensor([[7, 1, 2, 3, 4, 9, 5]]), torch.tensor([[1, 2, 3, 8, 6]])
    drafted = prompt_lookup(prompt, tokens, 3)
    # 1 stood before 2 3 4; of these 2 and 3 are right. 8 and 6 stood nowhere.
    assert drafted.ids.tolist() == [[1, 2, 3, 4, 8, 6]]
    assert drafted.rows == [4, 1, 1]
    assert drafted.accepted == [3, 1, 1]
    assert drafted.acceptance == 2 / 3


def test_kept_rows_are_the_text():
    torch.manual_seed(0)
    prompt, tokens = torch.randint(0, 6, (1, 50)), torch.randint(0, 6, (1, 40))
    drafted = prompt_lookup(prompt, tokens, 4)
    kept, start = [], 0
    for rows, accepted in zip(drafted.rows, drafted.accepted, strict=True):
        kept.extend(drafted.ids[0, start : start + accepted].tolist())
        start += rows
    assert kept == tokens[0].tolist()
    assert max(drafted.rows) <= 5
    assert any(accepted < rows for rows, accepted in zip(drafted.rows, drafted.accepted, strict=True))
