"""Any sequence of calls, against a model that is a plain list of every token's keys and values."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from oasiskv import KVManager
from oasiskv.errors import CapacityError

from ..unit.driver import PAGE_BYTES, SHAPE, STRIP_BYTES, Driver, Part, close_to, tiny
from .machines import Flushes, bounded, planned, row_counts

pytestmark = pytest.mark.timeout(600)  # finding takes seconds; making the finding short may take minutes

MOST_SEQUENCES = 4
MOST_TOKENS = 150

who = st.integers(0, MOST_SEQUENCES - 1)
prompts = st.sampled_from([1, 3, 4, 17, 20, 29, 38, 40, 41, 47, 53, 60])
parts = st.lists(st.tuples(who, row_counts, row_counts, row_counts), min_size=1, max_size=3)


class ManagerMachine(RuleBasedStateMachine):
    """Rules name a sequence by number, counted round the live ones; sizes are cut to what is possible."""

    stretch = 1
    settings_drawn = st.fixed_dictionaries(
        {
            "budget_per": st.sampled_from(["head", "sequence"]),
            "summary": st.sampled_from(["minmax", "transform"]),
            "predictor": st.sampled_from(["lookahead", "previous", "oracle"]),
            "dense_threshold": st.sampled_from([None, 80]),
            "correction_blocks": st.integers(0, 2),
            "workers": st.integers(0, 2),
            "on_late": st.sampled_from(["wait", "skip"]),
        }
    )

    @initialize(data=st.data(), first=prompts, second=prompts)
    def begin(self, data, first, second):
        config = tiny(max_new_blocks=1, **data.draw(self.settings_drawn))
        self.driver = Driver(KVManager(SHAPE, config))
        self.manager = self.driver.manager
        self.most_rows = 1
        for tokens in (first, second):
            self.run(Part(self.driver.create(), self.stretch * tokens))

    def one(self, number):
        live = self.manager.sequences
        return live[number % len(live)]

    def plan(self, drawn):
        """Parts of a step."""
        chosen = planned(drawn, self.one)
        self.most_rows = max(self.most_rows, *(tokens for tokens, _, _ in chosen.values()), 1)
        return [Part(sequence, *sizes) for sequence, sizes in chosen.items()]

    def run(self, *plan):
        """A whole step, or none at all when the room does not suffice. What fits the budget must attend to everything."""
        for part in plan:
            part.rows = self.driver.draw(part.tokens)
        config = self.manager.config
        within = [part.sequence.length + part.tokens <= config.budget_tokens for part in plan]
        expected = [self.driver.full(p.sequence, p.rows) if full else None for p, full in zip(plan, within, strict=True)]
        try:
            outputs = self.driver.run(*plan)
        except CapacityError:
            if self.manager.open_step:
                self.manager.open_step.abort()
            return
        for output, wanted in zip(outputs, expected, strict=True):
            assert output.isfinite().all()
            if wanted is not None:
                close_to(output, wanted)

    @precondition(lambda self: len(self.manager.sequences) < MOST_SEQUENCES)
    @rule()
    def create(self):
        self.driver.create()

    @precondition(lambda self: self.manager.sequences)
    @rule(number=who, tokens=prompts)
    def prefill(self, number, tokens):
        sequence, tokens = self.one(number), self.stretch * tokens
        if sequence.length + tokens <= MOST_TOKENS:
            self.run(Part(sequence, tokens))

    @precondition(lambda self: self.manager.sequences)
    @rule(number=who, tokens=st.integers(1, 60), drafts=st.integers(0, 59), accepted=st.integers(1, 60))
    def prefill_with_drafts(self, number, tokens, drafts, accepted):
        sequence, drafts = self.one(number), min(drafts, tokens - 1)
        if sequence.length + tokens <= MOST_TOKENS:
            self.run(Part(sequence, tokens, drafts, min(tokens, max(accepted, tokens - drafts)), prompt=True))

    @precondition(lambda self: self.manager.sequences)
    @rule(number=who, steps=st.sampled_from([1, 2, 4, 8]))
    def decode(self, number, steps):
        for _ in range(steps):
            self.run(Part(self.one(number), 1))

    @precondition(lambda self: self.manager.sequences)
    @rule(drawn=parts)
    def step(self, drawn):
        self.run(*self.plan(drawn))

    @precondition(lambda self: self.manager.sequences)
    @rule(drawn=parts, prefilled=st.sampled_from([0, 0, 20, 50, 80]), layers=st.integers(0, SHAPE.num_layers))
    def abort(self, drawn, prefilled, layers):
        plan = self.plan(drawn)
        if prefilled > 16:
            plan[0].tokens, plan[0].drafts = prefilled, 0
        for part in plan:
            part.rows = self.driver.draw(part.tokens)
        try:
            step = self.driver.begin(*plan)
        except CapacityError:
            return
        for layer in range(layers):
            assert self.driver.attend(step, layer, *plan).isfinite().all()
        step.abort()

    @precondition(lambda self: 1 < len(self.manager.sequences) < MOST_SEQUENCES)
    @rule(drawn=parts, act=st.sampled_from(["create", "fork", "crop", "free", "read"]), number=who)
    def change_others_in_the_middle_of_a_step(self, drawn, act, number):
        plan = self.plan(drawn[:1])
        others = [sequence for sequence in self.manager.sequences if sequence is not plan[0].sequence]
        other = others[number % len(others)]
        try:
            step = self.driver.begin(*plan)
            assert self.driver.attend(step, 0, *plan).isfinite().all()
            with contextlib.suppress(CapacityError):
                if act == "create":
                    self.driver.create()
                elif act == "crop":
                    self.driver.crop(other, other.length // 2)
                elif act == "read":
                    self.manager.full_kv(other, 1)
                else:
                    getattr(self.driver, act)(other)
            for layer in range(1, SHAPE.num_layers):
                assert self.driver.attend(step, layer, *plan).isfinite().all()
            step.commit([plan[0].kept])
        except CapacityError:
            if self.manager.open_step:
                self.manager.open_step.abort()
        else:
            self.driver.remember(*plan)

    @precondition(lambda self: self.manager.sequences)
    @rule(number=who, share=st.sampled_from([0.0, 0.1, 0.4, 0.6, 0.75, 0.9, 0.95]))
    def crop(self, number, share):
        sequence = self.one(number)
        self.driver.crop(sequence, int(share * sequence.length))

    @precondition(lambda self: 0 < len(self.manager.sequences) < MOST_SEQUENCES)
    @rule(number=who)
    def fork(self, number):
        with contextlib.suppress(CapacityError):
            self.driver.fork(self.one(number))

    @precondition(lambda self: len(self.manager.sequences) > 2)
    @rule(number=who)
    def free(self, number):
        self.driver.free(self.one(number))

    @invariant()
    def nothing_is_lost_and_nothing_leaks(self):
        if hasattr(self, "driver"):
            self.driver.check()

    @invariant()
    def limits_hold(self):
        if hasattr(self, "driver"):
            config, pool, arena = self.manager.config, self.manager.rooms.pool, self.manager.rooms.arena
            assert config.pool_bytes is None or pool.allocated_bytes <= config.pool_bytes
            assert arena.used_bytes <= config.arena_bytes
            stats = self.manager.stats()
            assert config.predictor == "oracle" or stats.most_new_blocks <= config.burst_blocks
            assert stats.most_corrected_blocks <= config.correction_blocks * self.most_rows

    def teardown(self):
        if hasattr(self, "driver"):
            if self.manager.open_step:
                self.manager.open_step.abort()
            for sequence in self.manager.sequences:
                self.driver.free(sequence)
            assert self.manager.rooms.arena.used_pages == 0
            assert self.manager.rooms.pool.free_strips == self.manager.rooms.pool.num_strips
            self.manager.close()


class TightMachine(ManagerMachine):
    """Pool and arena run out; dense sequences never exceed the budget, so that none can make room."""

    settings_drawn = st.fixed_dictionaries(
        {
            "summary": st.sampled_from(["minmax", "transform"]),
            "workers": st.integers(0, 1),
            "pool_bytes": st.integers(10, 26).map(lambda strips: strips * STRIP_BYTES),
            "arena_bytes": st.integers(8, 60).map(lambda pages: pages * PAGE_BYTES),
        }
    )


class PressedMachine(ManagerMachine):
    """The pool runs out, and sequences that are dense beyond the budget make room."""

    stretch = 2
    settings_drawn = st.fixed_dictionaries(
        {
            "summary": st.sampled_from(["minmax", "transform"]),
            "workers": st.integers(0, 1),
            "pool_bytes": st.integers(24, 40).map(lambda strips: strips * STRIP_BYTES),
            "dense_threshold": st.sampled_from([60, 120]),
        }
    )

    @rule(number=who, tokens=st.sampled_from([24, 40, 44, 60, 100]))
    def newcomer(self, number, tokens):
        if len(self.manager.sequences) == MOST_SEQUENCES:
            self.driver.free(self.one(number))
        self.run(Part(self.driver.create(), tokens))

    @precondition(lambda self: self.manager.sequences)
    @rule(number=who)
    def step_of_all(self, number):
        self.run(*(Part(sequence, 1) for sequence in self.manager.sequences))


class TieredMachine(Flushes, ManagerMachine):
    """The arena runs out, and what was not used lately is in a tier store."""

    settings_drawn = st.fixed_dictionaries(
        {
            "summary": st.sampled_from(["minmax", "transform"]),
            "predictor": st.sampled_from(["lookahead", "oracle"]),
            "correction_blocks": st.integers(0, 2),
            "workers": st.integers(0, 2),
            "on_late": st.sampled_from(["wait", "skip"]),
            "arena_bytes": st.integers(20, 60).map(lambda pages: pages * PAGE_BYTES),
            "tier": st.just("memory:"),
            "segment_blocks": st.integers(1, 4),
        }
    )


SETTINGS = bounded(examples=40, steps=30)

for machine in (ManagerMachine, TightMachine, PressedMachine, TieredMachine):
    machine.TestCase.settings = SETTINGS

TestManager = ManagerMachine.TestCase
TestTightManager = TightMachine.TestCase
TestPressedManager = PressedMachine.TestCase
TestTieredManager = TieredMachine.TestCase
