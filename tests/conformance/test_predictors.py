from oasiskv.predictors.layer_ahead import LayerAhead
from oasiskv.predictors.lookahead import Lookahead
from oasiskv.predictors.oracle import Oracle
from oasiskv.predictors.previous import Previous
from oasiskv.testing.kits import PredictorTests


class TestPrevious(PredictorTests):
    def plugin(self):
        return Previous


class TestLookahead(PredictorTests):
    def plugin(self):
        return Lookahead


class TestOracle(PredictorTests):
    def plugin(self):
        return Oracle


class TestLayerAhead(PredictorTests):
    def plugin(self):
        return LayerAhead
