from oasiskv.summaries.minmax import MinMax
from oasiskv.summaries.transform import Transform
from oasiskv.testing.kits import KeySummaryTests


class TestMinMax(KeySummaryTests):
    def plugin(self):
        return MinMax


class TestTransform(KeySummaryTests):
    least_correlation = 0.95

    def plugin(self):
        return Transform
