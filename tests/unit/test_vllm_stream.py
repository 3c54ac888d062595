"""The residual stream of a model as vLLM builds them: fused norms that write in place, and one projection for all heads."""

import pytest
import torch
from torch import nn

from adapters.vllm.batch_rows import rows_of
from adapters.vllm.decoder_layers import decoder_layers_around, forget_modules, watch_modules
from adapters.vllm.residual_stream import ResidualStream
from oasiskv.types import Rotary

HEADS, HEAD_DIM, HIDDEN = 2, 8, 12
ROTARY = Rotary(tuple(0.5**plane for plane in range(HEAD_DIM // 2)), 1.0)


class Norm(nn.Module):
    """Scales; with a residual, adds it and writes both in place."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))

    def forward(self, hidden, residual=None):
        if residual is None:
            return hidden / hidden.norm(dim=-1, keepdim=True) * self.weight
        residual += hidden
        hidden[:] = self(residual)
        return hidden, residual


class Projection(nn.Module):
    def __init__(self, num_outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_outputs, HIDDEN))

    def forward(self, hidden):
        return hidden @ self.weight.T, None


class SelfAttention(nn.Module):
    def __init__(self, queries_are_normed):
        super().__init__()
        self.qkv_proj = Projection((HEADS + 2) * HEAD_DIM)
        self.o_proj = Projection(HIDDEN)
        if queries_are_normed:
            self.q_norm = Norm(HEAD_DIM)
        self.attn = nn.Identity()
        self.made = None

    def forward(self, hidden, positions):
        queries = self.qkv_proj(hidden)[0][:, : HEADS * HEAD_DIM].view(-1, HEADS, HEAD_DIM)
        if hasattr(self, "q_norm"):
            queries = self.q_norm(queries)
        self.made = torch.stack([ROTARY.rotate(row, at) for row, at in zip(queries, positions, strict=True)])
        return hidden * 0.5


class DecoderLayer(nn.Module):
    def __init__(self, queries_are_normed=False):
        super().__init__()
        self.self_attn = SelfAttention(queries_are_normed)
        self.input_layernorm = Norm(HIDDEN)
        self.post_attention_layernorm = Norm(HIDDEN)
        self.after = None

    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(hidden_states, positions)
        if self.after is not None:  # attention is where an adapter looks
            self.after()
        return self.post_attention_layernorm(hidden_states, residual)


class Model(nn.Module):
    def __init__(self, **layer):
        super().__init__()
        self.layers = nn.ModuleList([DecoderLayer(**layer) for _ in range(4)])

    def forward(self, hidden, positions):
        hidden, residual = hidden.clone(), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        return hidden + residual


@pytest.fixture(autouse=True)
def torch_state():
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    forget_modules()


def build(make=Model, **arguments):
    watch_modules()
    model = make(**arguments)
    return model, [layer.self_attn.attn for layer in model.layers]


def stream_of(attentions):
    return ResidualStream.around(attentions, HEADS, HEAD_DIM, ROTARY)


def run_checked(model, stream, spoil=None):
    """A forward in which every layer's queries are looked at; returns what the looks said."""
    positions, said = torch.arange(3, 6), []
    for number, layer in enumerate(model.layers):

        def look(number=number, layer=layer):
            made = layer.self_attn.made
            said.append(stream.check(number, made + 1 if number == spoil else made, 5))

        layer.after = look
    model(torch.randn(3, HIDDEN), positions)
    for layer in model.layers:
        layer.after = None
    return said


def hooks(model):
    return sum(len(layer._forward_pre_hooks) for layer in model.layers)


def test_the_decoder_layers_are_found_from_within():
    model, attentions = build()
    assert decoder_layers_around(attentions[2]) == (model.layers, 2)
    forget_modules()
    assert decoder_layers_around(attentions[2]) is None


def test_what_was_built_unwatched_is_not_found():
    model = Model()
    watch_modules()
    assert stream_of([layer.self_attn.attn for layer in model.layers]) is None


def test_a_model_without_a_list_of_layers_is_left_alone():
    class Lone(nn.Module):
        def __init__(self):
            super().__init__()
            self.only = DecoderLayer()

        @property
        def layers(self):
            return [self.only]

    model, attentions = build(Lone)
    assert stream_of(attentions) is None
    assert hooks(model) == 0


def test_layers_with_other_arguments_are_left_alone():
    class Other(DecoderLayer):
        def forward(self, x):
            return x

    class OtherModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Other(), Other()])

    model, attentions = build(OtherModel)
    assert stream_of(attentions) is None
    assert hooks(model) == 0


@pytest.mark.parametrize("normed", [False, True])
def test_the_stream_is_shown_two_layers_ahead_after_it_was_checked(normed):
    model, attentions = build(queries_are_normed=normed)
    stream, shown = stream_of(attentions), []
    stream.show(lambda number, project: shown.append((number, project(rows_of([(0, 1), (2, 1)], torch.device("cpu"))))))
    plain = Model(queries_are_normed=normed)
    plain.load_state_dict(model.state_dict())
    assert run_checked(model, stream) == [True] * 4
    assert stream.checked
    assert not shown

    hidden, positions = torch.randn(3, HIDDEN), torch.arange(3, 6)
    output = model(hidden, positions)
    assert torch.equal(output, plain(hidden, positions))  # looking changes nothing
    assert [number for number, _ in shown] == [2, 3]
    layer, kept = model.layers[2], hidden[[0, 2]]
    expected = layer.self_attn.qkv_proj(layer.input_layernorm(kept))[0][:, : HEADS * HEAD_DIM]
    expected = expected.view(-1, HEADS, HEAD_DIM)
    if normed:
        expected = layer.self_attn.q_norm(expected)
    assert torch.allclose(stream.project(2, shown[0][1]), expected)


@pytest.mark.parametrize("spoil", range(4))
def test_one_wrong_layer_ends_the_hints(spoil):
    model, attentions = build()
    stream = stream_of(attentions)
    stream.show(lambda number, project: pytest.fail("nothing may be shown"))
    said = run_checked(model, stream, spoil)
    assert said == [number != spoil for number in range(4)]
    assert not stream.checked
    assert hooks(model) == 0
    model(torch.randn(3, HIDDEN), torch.arange(3))


def test_a_checked_stream_keeps_only_the_hooks_that_it_needs():
    model, attentions = build()
    stream = stream_of(attentions)
    assert hooks(model) == 4 + 2
    run_checked(model, stream)
    assert hooks(model) == 2
    stream.detach()
    assert hooks(model) == 0


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([(2, 3)], slice(2, 5)),
        ([(0, 1), (1, 4)], slice(0, 5)),
        ([(0, 1), (2, 2)], [0, 2, 3]),
        ([(3, 1), (1, 1)], [3, 1]),
        ([], []),
    ],
)
def test_rows_that_lie_together_are_a_slice(pieces, expected):
    rows = rows_of(pieces, torch.device("cpu"))
    assert rows == expected if isinstance(expected, slice) else rows.tolist() == expected
