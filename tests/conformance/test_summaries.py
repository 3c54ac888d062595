import dataclasses

from oasiskv.summaries.bit2 import Bit2
from oasiskv.summaries.minmax import MinMax
from oasiskv.summaries.minmax_int4 import MinMaxInt4
from oasiskv.summaries.transform import Transform
from oasiskv.summaries.two_stage import TwoStage
from oasiskv.testing.kits import KeySummaryTests


class Bit2WithInt4Scales(Bit2):
    def __init__(self, shape, config):
        super().__init__(shape, config, int4_scales=True)


class TwoStageOfAllBlocks(TwoStage):
    """With so many selected places that the kit's blocks are all scored again."""

    def __init__(self, shape, config):
        super().__init__(shape, dataclasses.replace(config, budget_tokens=2 * config.budget_tokens))


class TestMinMax(KeySummaryTests):
    def plugin(self):
        return MinMax


class TestMinMaxInt4(KeySummaryTests):
    least_correlation = 0.98

    def plugin(self):
        return MinMaxInt4


class TestTransform(KeySummaryTests):
    least_correlation = 0.95

    def plugin(self):
        return Transform


class TestBit2(KeySummaryTests):
    least_correlation = 0.9995

    def plugin(self):
        return Bit2


class TestBit2WithInt4Scales(KeySummaryTests):
    least_correlation = 0.9995

    def plugin(self):
        return Bit2WithInt4Scales


class TestTwoStageOfAllBlocks(KeySummaryTests):
    least_correlation = 0.9995

    def plugin(self):
        return TwoStageOfAllBlocks


class TestTwoStage(KeySummaryTests):
    least_correlation = 0.999

    # Which blocks are scored again depends on the others that are listed, so these hold as above only.
    test_padding_pages_are_ignored = None
    test_pages_are_independent = None
    test_reserving_keeps_what_is_written = None

    def plugin(self):
        return TwoStage
