"""Any sequence of what a serving engine may do with a manager in its memory: it begins sequences, lends blocks, and takes them
back without asking."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from oasiskv import Phase
from oasiskv.errors import ArenaExhausted, StateError

from ..unit.driver import PAGE_BYTES, SHAPE, Part, Rows
from ..unit.lending import Host
from .machines import Flushes, bounded, planned, row_counts

pytestmark = pytest.mark.timeout(600)  # finding takes seconds; making the finding short may take minutes

MOST_SEQUENCES = 5
MOST_TOKENS = 150
BUDGET = 80
WITHIN = BUDGET - 16
"""Tokens of which nothing is missed: the ring keeps four blocks for drafts."""

who = st.integers(0, MOST_SEQUENCES - 1)
prompts = st.sampled_from([1, 2, 3, 4, 5, 17, 20, 29, 41, 53, 60, 90])
plans = st.lists(st.tuples(who, row_counts, row_counts, row_counts), min_size=1, max_size=3)
shares = st.sampled_from([0.0, 0.1, 0.4, 0.6, 0.75, 0.9, 1.0])


class Engine(Host):
    """A host that keeps what the manager does not have yet: tails, and blocks that are being adopted."""

    def __init__(self, **changes):
        self.tails = {}
        self.adopting = []
        super().__init__(**changes)

    def create(self, tokens=0, chunk=1000):
        sequence = super().create()
        self.tails[sequence] = self.draw(0)
        return sequence

    def read(self, sequence, rows):
        """Compute more of the prompt of a sequence that has no strips."""
        tail = self.tails[sequence]
        self.observe(sequence, rows, sequence.length + tail.keys.shape[1], pieces=2)
        both = Rows(*(torch.cat(parts, 1) for parts in zip(tail, rows, strict=True)))
        self.tails[sequence] = both  # should the arena be full
        self.tails[sequence] = self.adopt(sequence, both)

    def give(self, sequence):
        tail, whole = self.tails[sequence], self.config.block_size
        if tail.keys.shape[1] < whole and self.lendable:
            self.lend(sequence, tail)
            self.tails[sequence] = self.draw(0)

    def reclaim(self, sequence):
        super().reclaim(sequence)
        self.free_blocks.reverse()  # other blocks the next time

    def branch(self, sequence, length):
        child = super().branch(sequence, length)
        self.tails[child] = self.draw(0)

    def crop(self, sequence, length):
        super().crop(sequence, length)
        self.tails[sequence] = self.draw(0)

    def free(self, sequence):
        super().free(sequence)
        del self.tails[sequence]
        self.adopting = [entry for entry in self.adopting if entry[0].sequence is not sequence]

    def begin_adoption(self, sequence, blocks):
        rows = self.draw(blocks * self.config.block_size)
        self.adopting.append((self.manager.adopt(sequence, blocks), rows, self.texts[sequence], set()))

    def write(self, number, layer):
        adoption, rows, _, written = self.adopting[number]
        if layer not in written:
            adoption.write(layer, self.blocks_of(rows, 0, rows.keys.shape[1] // self.config.block_size)[layer])
            written.add(layer)

    def commit(self, number):
        """Refused if the sequence has changed, and only then."""
        adoption, rows, before, _ = self.adopting.pop(number)
        sequence = adoption.sequence
        try:
            adoption.commit()
        except StateError:
            assert sequence.strips or self.texts[sequence] is not before
            adoption.abort()
        else:
            assert not sequence.strips
            self.remember(Part(sequence, rows.keys.shape[1], rows=rows))
            self.tails[sequence] = self.draw(0)


class LentMachine(RuleBasedStateMachine):
    """Rules name a sequence by number, counted round those that can do it; sizes are cut to what is possible."""

    settings_drawn = st.fixed_dictionaries(
        {
            "budget_per": st.sampled_from(["head", "sequence"]),
            "summary": st.sampled_from(["minmax", "transform"]),
            "predictor": st.sampled_from(["lookahead", "previous", "oracle"]),
            "workers": st.integers(0, 2),
            "on_late": st.sampled_from(["wait", "wait", "skip"]),
        }
    )

    @initialize(data=st.data(), parts=st.sampled_from([1, 2, 4]), first=prompts, second=prompts)
    def begin(self, data, parts, first, second):
        changes = data.draw(self.settings_drawn)
        self.engine = Engine(parts=parts, blocks=60 // parts + 1, budget_tokens=BUDGET, correction_blocks=4, **changes)
        self.manager = self.engine.manager
        for tokens in (first, second):
            sequence = self.engine.create()
            with contextlib.suppress(ArenaExhausted):
                self.engine.read(sequence, self.engine.draw(tokens))
            self.engine.give(sequence)

    def some(self, number, lent=None):
        """A sequence, one that has strips, or one that has none."""
        found = [sequence for sequence in self.manager.sequences if lent is None or bool(sequence.strips) == lent]
        return found[number % len(found)]

    def count(self, lent):
        return sum(bool(sequence.strips) == lent for sequence in self.manager.sequences) if hasattr(self, "manager") else 0

    def plan(self, drawn):
        """Parts of a step."""
        chosen = planned(drawn, lambda number: self.some(number, lent=True))
        return [Part(sequence, *sizes, rows=self.engine.draw(sizes[0])) for sequence, sizes in chosen.items()]

    def exact(self, part, fetched):
        """Whether a part attends to everything: it is prompt, or fits the budget and nothing had to be left out."""
        sequence, end = part.sequence, part.sequence.length + part.tokens
        if (part.tokens > 1 and not part.drafts) or sequence.length == 0:
            return True
        config = self.manager.config
        floored = config.predictor == "oracle" and config.budget_per == "sequence"  # keeps slots free, and corrects nothing
        return end <= WITHIN and config.on_late == "wait" and not floored and fetched

    def run(self, *plan):
        """A whole step, or none at all when the room does not suffice."""
        lost = self.manager.stats().lost_blocks
        wanted = [self.engine.full(part.sequence, part.rows) for part in plan]
        exact = [self.exact(part, fetched=True) for part in plan]
        prompt = [self.exact(part, fetched=False) for part in plan]
        try:
            outputs = self.engine.run(*plan)
        except ArenaExhausted:
            if self.manager.open_step:
                self.manager.open_step.abort()
            return
        kept = exact if self.manager.stats().lost_blocks == lost else prompt
        for output, expected, is_exact in zip(outputs, wanted, kept, strict=True):
            assert output.isfinite().all()
            if is_exact:
                torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=3e-5)

    # What an engine computes itself

    @precondition(lambda self: len(self.manager.sequences) < MOST_SEQUENCES)
    @rule(tokens=prompts)
    def start(self, tokens):
        sequence = self.engine.create()
        with contextlib.suppress(ArenaExhausted):
            self.engine.read(sequence, self.engine.draw(tokens))

    @precondition(lambda self: self.count(lent=False))
    @rule(number=who, tokens=prompts)
    def read_more(self, number, tokens):
        sequence = self.some(number, lent=False)
        if sequence.length + tokens <= MOST_TOKENS:
            with contextlib.suppress(ArenaExhausted):
                self.engine.read(sequence, self.engine.draw(tokens))

    @precondition(lambda self: self.count(lent=False) and len(self.engine.adopting) < 3)
    @rule(number=who, blocks=st.integers(1, 6))
    def begin_adoption(self, number, blocks):
        sequence = self.some(number, lent=False)
        if sequence.length < MOST_TOKENS:
            with contextlib.suppress(ArenaExhausted):
                self.engine.begin_adoption(sequence, blocks)

    @precondition(lambda self: hasattr(self, "engine") and self.engine.adopting)
    @rule(number=who, layer=st.integers(0, SHAPE.num_layers - 1), end=st.sampled_from(["wait", "commit", "commit", "abort"]))
    def go_on_adopting(self, number, layer, end):
        number %= len(self.engine.adopting)
        self.engine.write(number, layer)
        if end == "commit":
            for other in range(SHAPE.num_layers):
                self.engine.write(number, other)
            self.engine.commit(number)
        elif end == "abort":
            self.engine.adopting.pop(number)[0].abort()

    # What it lends, and takes back

    @precondition(lambda self: self.count(lent=False))
    @rule(number=who)
    def lend(self, number):
        self.engine.give(self.some(number, lent=False))

    @precondition(lambda self: self.count(lent=True))
    @rule(number=who)
    def reclaim(self, number):
        self.engine.reclaim(self.some(number, lent=True))

    @precondition(lambda self: 0 < len(self.manager.sequences) < MOST_SEQUENCES)
    @rule(number=who, share=shares, lent=st.booleans())
    def branch(self, number, share, lent):
        sequence = self.some(number)
        self.engine.branch(sequence, int(share * len(sequence.pages)) * 4)
        if lent:
            self.engine.give(self.manager.sequences[-1])

    @precondition(lambda self: self.manager.sequences)
    @rule(number=who, share=shares)
    def crop(self, number, share):
        sequence = self.some(number)
        length = int(share * sequence.length)
        self.engine.crop(sequence, length if sequence.strips else length // 4 * 4)

    @precondition(lambda self: len(self.manager.sequences) > 2)
    @rule(number=who)
    def free(self, number):
        self.engine.free(self.some(number))

    # Steps

    @precondition(lambda self: self.count(lent=True))
    @rule(number=who, steps=st.sampled_from([1, 2, 4, 8]))
    def decode(self, number, steps):
        for _ in range(steps):
            self.run(Part(self.some(number, lent=True), 1, rows=self.engine.draw(1)))

    @precondition(lambda self: self.count(lent=True))
    @rule(drawn=plans)
    def step(self, drawn):
        self.run(*self.plan(drawn))

    @precondition(lambda self: self.count(lent=True))
    @rule(number=who, tokens=prompts, drafts=st.sampled_from([0, 0, 5, 30]), accepted=st.integers(1, 60), beside=plans)
    def prompt_piece(self, number, tokens, drafts, accepted, beside):
        sequence, drafts = self.some(number, lent=True), min(drafts, tokens - 1)
        if sequence.length + tokens > MOST_TOKENS:
            return
        accepted = min(tokens, max(accepted, tokens - drafts))
        piece = Part(sequence, tokens, drafts, accepted, self.engine.draw(tokens), prompt=True)
        self.run(piece, *(part for part in self.plan(beside) if part.sequence is not sequence))

    @precondition(lambda self: self.count(lent=True))
    @rule(drawn=plans, prompt=st.sampled_from([0, 0, 20, 50]), layers=st.integers(0, SHAPE.num_layers))
    def abort(self, drawn, prompt, layers):
        plan = self.plan(drawn)
        if prompt:
            plan[0] = Part(plan[0].sequence, prompt, rows=self.engine.draw(prompt))
        try:
            step = self.engine.begin(*plan)
        except ArenaExhausted:
            return
        for layer in range(layers):
            assert self.engine.attend(step, layer, *plan).isfinite().all()
        step.abort()

    @precondition(lambda self: self.count(lent=True) and 1 < len(self.manager.sequences) < MOST_SEQUENCES)
    @rule(drawn=plans, act=st.sampled_from(["read", "give", "reclaim", "branch", "free"]), number=who)
    def change_others_in_the_middle_of_a_step(self, drawn, act, number):
        plan = self.plan(drawn[:1])
        others = [sequence for sequence in self.manager.sequences if sequence is not plan[0].sequence]
        other = others[number % len(others)]
        try:
            step = self.engine.begin(*plan)
            assert self.engine.attend(step, 0, *plan).isfinite().all()
            if act == "branch":
                self.engine.branch(other, len(other.pages) * 4)
            elif act == "read" and not other.strips:
                with contextlib.suppress(ArenaExhausted):
                    self.engine.read(other, self.engine.draw(9))
            elif act == "free" or (act == "give" and not other.strips) or (act == "reclaim" and other.strips):
                getattr(self.engine, act)(other)
            for layer in range(1, SHAPE.num_layers):
                assert self.engine.attend(step, layer, *plan).isfinite().all()
            step.commit([plan[0].kept])
        except ArenaExhausted:
            if self.manager.open_step:
                self.manager.open_step.abort()
        else:
            self.engine.remember(*plan)

    # What must hold

    @invariant()
    def nothing_is_lost_and_nothing_leaks(self):
        if hasattr(self, "engine"):
            self.engine.check()
            assert all(sequence.phase is not Phase.DENSE for sequence in self.manager.sequences)

    def teardown(self):
        if hasattr(self, "engine"):
            if self.manager.open_step:
                self.manager.open_step.abort()
            for sequence in self.manager.sequences:
                self.engine.free(sequence)
            assert self.manager.rooms.arena.used_pages == 0
            assert not self.manager.adoptions
            assert self.engine.pool.slots.isnan().all()
            self.manager.close()


class TieredLentMachine(Flushes, LentMachine):
    """The arena runs out, and what was not used lately is in a tier store."""

    settings_drawn = st.fixed_dictionaries(
        {
            "summary": st.sampled_from(["minmax", "transform"]),
            "predictor": st.sampled_from(["lookahead", "oracle"]),
            "workers": st.integers(0, 2),
            "arena_bytes": st.integers(30, 90).map(lambda pages: pages * PAGE_BYTES),
            "tier": st.just("memory:"),
            "segment_blocks": st.integers(1, 4),
        }
    )


SETTINGS = bounded(examples=25, steps=25)

for machine in (LentMachine, TieredLentMachine):
    machine.TestCase.settings = SETTINGS

TestLent = LentMachine.TestCase
TestTieredLent = TieredLentMachine.TestCase
