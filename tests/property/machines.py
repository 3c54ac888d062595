"""What the machines of managers share."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

row_counts = st.sampled_from([1, 2, 3, 4, 5, 7, 9, 12, 16])


def bounded(examples, steps):
    """The same runs every time, and one finding each."""
    return settings(
        deadline=None,
        max_examples=examples,
        stateful_step_count=steps,
        report_multiple_bugs=False,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


def planned(drawn, sequence_of):
    """Sequences with `(rows, drafts, accepted)`: each once, drafts fewer than rows, no more accepted than there are."""
    chosen = {}
    for number, tokens, drafts, accepted in drawn:
        drafts = min(drafts, tokens) - 1
        chosen[sequence_of(number)] = (tokens, drafts, min(tokens, max(tokens - drafts, accepted)))
    return chosen


class Flushes:
    """For a machine whose manager has a tier store."""

    @precondition(lambda self: self.manager.sequences)
    @rule()
    def flush(self):
        self.manager.flush()
