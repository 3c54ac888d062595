"""The layer-ahead predictor and `Step.hint`."""

import pytest
import torch

from oasiskv import KVManager, ModelShape, OasisConfig, Rotary
from oasiskv.errors import InputError, StateError
from oasiskv.predictors.layer_ahead import KEEP, LayerAhead, projection_error

SHAPE = ModelShape(num_layers=3, query_heads=4, kv_heads=2, head_dim=8, rotary=Rotary((1.0, 0.1, 0.01, 0.001)))
CONFIG = OasisConfig(budget_tokens=48, block_size=4, sink_tokens=4, window_tokens=8, predictor="layer-ahead", workers=0)


class Linear:
    """A projection of its own weights, as a model would have them."""

    def __init__(self):
        self.weights = torch.randn((SHAPE.num_layers, 16, SHAPE.query_heads * SHAPE.head_dim))

    def project(self, layer, hidden):
        return (hidden @ self.weights[layer]).unflatten(-1, (SHAPE.query_heads, SHAPE.head_dim))


def predictor(rows=2):
    made = LayerAhead(SHAPE, CONFIG)
    made.bind(Linear())
    made.reserve_rows(rows)
    return made


ROWS = torch.tensor([1])
POSITION = torch.tensor([[37]])


def test_rotation_and_back():
    vectors, positions = torch.randn((3, 5, 4, 10)), torch.randint(0, 1000, (3, 5))
    rotary = Rotary((1.0, 0.1, 0.01, 0.001), scaling=1.2)
    turned = rotary.rotate(vectors, positions)
    torch.testing.assert_close(rotary.rotate(turned, positions, inverse=True), vectors)
    torch.testing.assert_close(turned[..., 8:], vectors[..., 8:])
    angle = positions[1, 2] * 0.1
    expected = 1.2 * (vectors[1, 2, 0, 1] * angle.cos() - vectors[1, 2, 0, 5] * angle.sin())
    torch.testing.assert_close(turned[1, 2, 0, 1], expected)


def test_the_average_of_past_errors_mends_a_constant_error():
    made, bias, distance = predictor(), torch.randn((4, 8)), []
    for step in range(12):
        hidden, position = torch.randn((1, 1, 16)), POSITION + step
        true = SHAPE.rotary.rotate(made._projection.project(1, hidden) + bias, position)
        guessed = made.guess(1, hidden, position, ROWS)
        distance.append(float((guessed - true).norm() / bias.norm()))
        made.learn(1, true, position, ROWS)
    expected = [KEEP**step for step in range(12)]
    assert distance == pytest.approx(expected, rel=1e-3)


def test_the_error_of_a_projection_is_relative_and_keeps_no_graph():
    """Models may run with gradients on: making a number of a tensor that has a graph is a warning of torch's."""
    queries = torch.randn((4, 8), requires_grad=True)
    raw = SHAPE.rotary.rotate(queries * 1.25, torch.tensor(37), inverse=True)
    assert projection_error(raw, queries, 37, SHAPE.rotary) == pytest.approx(0.25, rel=1e-4)
    assert projection_error(raw, torch.zeros((4, 8)), 37, SHAPE.rotary) > 1e30


def test_a_late_guess_teaches_nothing():
    made = predictor()
    made.guess(1, torch.randn((1, 1, 16)), POSITION, ROWS)
    made.learn(1, torch.randn((1, 1, 4, 8)), POSITION + 1, ROWS)
    made.guess(1, torch.randn((2, 1, 16)), POSITION.expand(2, 1), torch.tensor([0, 1]))
    made.learn(1, torch.randn((1, 1, 4, 8)), POSITION, ROWS)
    made.learn(2, torch.randn((1, 1, 4, 8)), POSITION, ROWS)
    assert all(not table.any() for table in made._errors)


def test_what_was_learned_follows_forks_and_ends_with_the_sequence():
    made = predictor()
    made.guess(1, torch.randn((1, 1, 16)), POSITION, ROWS)
    made.learn(1, torch.randn((1, 1, 4, 8)), POSITION, ROWS)
    made.copy_row(1, 0)
    assert made._errors[1][0].any()
    assert torch.equal(made._errors[1][0], made._errors[1][1])
    made.reserve_rows(5)
    made.clear_row(1)
    assert made._errors[1][0].any()
    assert not made._errors[1][1].any()
    assert made.device_bytes() == 3 * 5 * 4 * 8 * 4


def test_without_a_projection_or_a_rotary_embedding_there_are_no_hints():
    made = LayerAhead(SHAPE, CONFIG)
    assert not made.uses_hints
    made.bind(Linear())
    assert made.uses_hints
    made.bind(None)
    assert not made.uses_hints
    bare = LayerAhead(ModelShape(num_layers=1, query_heads=1, kv_heads=1, head_dim=8), CONFIG)
    bare.bind(Linear())
    assert not bare.uses_hints


def run(manager, projection, hints, steps=6):
    """A prompt and some steps; the queries are those that the projection makes. Returns all outputs."""
    generator = torch.Generator().manual_seed(5)
    sequence, outputs = manager.create(), []
    for tokens in (150, *[1] * steps):
        step = manager.begin_step([sequence], [tokens])
        hidden = torch.randn((3, tokens, 16), generator=generator)
        positions = torch.arange(sequence.length, sequence.length + tokens)
        for layer in range(3):
            if hints:
                step.hint(layer, hidden[layer])
            queries = SHAPE.rotary.rotate(projection.project(layer, hidden[layer]), positions)
            keys, values = torch.randn((2, tokens, 2, 8), generator=generator)
            outputs.append(step.attend(layer, queries, keys, values))
        step.commit()
        manager.check_integrity()
    return outputs


@pytest.mark.parametrize("workers", [0, 1])
def test_a_hint_that_is_exact_chooses_by_the_queries_of_the_step(workers):
    config = OasisConfig(
        budget_tokens=48, block_size=4, sink_tokens=4, window_tokens=8, correction_blocks=0, max_new_blocks=8, swap_margin=0.0,
        budget_per="head", predictor="layer-ahead", workers=workers, poison_freed=True,
    )  # fmt: skip
    projection = Linear()
    with KVManager(SHAPE, config, projection=projection) as manager:
        chosen = []
        select = manager.rooms.predictor.aggregate

        def watched(layer, mass, weights, rows):
            chosen.append((layer, select(layer, mass, weights, rows)))
            return chosen[-1][1]

        manager.rooms.predictor.aggregate = watched
        outputs = run(manager, projection, hints=True)
        assert all(bool(output.isfinite().all()) for output in outputs)
        assert [layer for layer, _ in chosen] == [0, 1, 2] * 6
        assert manager.stats().loaded_blocks > 0
        # With an exact guess and no margin, the residents of the last layer are the best blocks of its last query.
        mass = chosen[-1][1][0]
        low, high = config.sink_blocks, 156 // 4 - config.window_blocks
        best = mass[:, low:high].topk(config.selected_blocks).indices + low
        resident = manager.rooms.sets.selected.blocks[2][0]
        assert torch.equal(best.sort().values, resident.sort().values)


def test_hints_come_before_their_layer_and_fit_the_step():
    with KVManager(SHAPE, CONFIG, projection=Linear()) as manager:
        step = manager.begin_step([manager.create()], [5])
        with pytest.raises(InputError, match=r"hidden has shape \(4, 16\); this step needs \(5, hidden_size\)"):
            step.hint(0, torch.randn((4, 16)))
        keys = torch.randn((5, 2, 8))
        step.attend(0, torch.randn((5, 4, 8)), keys, keys)
        with pytest.raises(StateError, match="hint for layer 0 comes too late"):
            step.hint(0, torch.randn((5, 16)))
        with pytest.raises(StateError, match="hint for layer 3"):
            step.hint(3, torch.randn((5, 16)))


def test_without_hints_it_is_lookahead():
    outputs = []
    for name in ("layer-ahead", "lookahead"):
        config = OasisConfig(budget_tokens=48, block_size=4, sink_tokens=4, window_tokens=8, predictor=name, workers=0)
        torch.manual_seed(2)
        projection = Linear()
        with KVManager(SHAPE, config, projection=projection) as manager:
            outputs.append(torch.cat(run(manager, projection, hints=False)))
    assert torch.equal(*outputs)
