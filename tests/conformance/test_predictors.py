from oasiskv.predictors.ema import Ema
from oasiskv.predictors.h2o import H2O
from oasiskv.predictors.layer_ahead import LayerAhead
from oasiskv.predictors.lookahead import Lookahead
from oasiskv.predictors.oracle import Oracle
from oasiskv.predictors.previous import Previous
from oasiskv.predictors.quest import Quest
from oasiskv.predictors.random import Random
from oasiskv.predictors.scissorhands import Scissorhands
from oasiskv.predictors.snapkv import SnapKV
from oasiskv.predictors.window import Window
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


class TestEma(PredictorTests):
    def plugin(self):
        return Ema


class TestH2O(PredictorTests):
    def plugin(self):
        return H2O


class TestScissorhands(PredictorTests):
    def plugin(self):
        return Scissorhands


class TestSnapKV(PredictorTests):
    follows_queries = False

    def plugin(self):
        return SnapKV


class TestQuest(PredictorTests):
    def plugin(self):
        return Quest


class TestWindow(PredictorTests):
    follows_queries = False

    def plugin(self):
        return Window


class TestRandom(PredictorTests):
    follows_queries = False

    def plugin(self):
        return Random
