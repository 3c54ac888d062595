import sys
from importlib.metadata import EntryPoint

import pytest

from oasiskv import KVManager, ModelShape, OasisConfig, registry
from oasiskv.abc import KeySummary, Predictor
from oasiskv.errors import PluginError
from oasiskv.predictors.previous import Previous

POINTS = (
    EntryPoint("good", "oasiskv.predictors.previous:Previous", registry.PREDICTORS),
    EntryPoint("broken", "no_such_module_at_all:Thing", registry.PREDICTORS),
    EntryPoint("nameless", "oasiskv.predictors.previous:NoSuchClass", registry.PREDICTORS),
    EntryPoint("wrong", "oasiskv.config:OasisConfig", registry.PREDICTORS),
    EntryPoint("function", "oasiskv.registry:names", registry.PREDICTORS),
    EntryPoint("digest", "oasiskv.summaries.minmax:MinMax", registry.KEY_SUMMARIES),
)


@pytest.fixture
def fake_points(monkeypatch):
    def find(group, name=None):
        return [point for point in POINTS if point.group == group and name in (None, point.name)]

    monkeypatch.setattr(registry, "entry_points", find)


def test_first_party_plugins_register_the_same_way():
    assert {"lookahead", "oracle", "previous"} <= set(registry.names(registry.PREDICTORS))
    assert {"minmax", "transform"} <= set(registry.names(registry.KEY_SUMMARIES))
    for group, base in ((registry.PREDICTORS, Predictor), (registry.KEY_SUMMARIES, KeySummary)):
        for name in registry.names(group):
            assert issubclass(registry.load(group, name, base), base)


@pytest.mark.usefixtures("fake_points")
def test_names_are_sorted_per_group_and_import_nothing():
    assert registry.names(registry.PREDICTORS) == ["broken", "function", "good", "nameless", "wrong"]
    assert registry.names(registry.KEY_SUMMARIES) == ["digest"]
    assert "no_such_module_at_all" not in sys.modules


@pytest.mark.usefixtures("fake_points")
def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(PluginError, match=r"no plug-in 'gud' in .*: broken, function, good, nameless, wrong"):
        registry.load(registry.PREDICTORS, "gud", Predictor)


def test_an_empty_group_asks_whether_the_library_is_installed():
    with pytest.raises(PluginError, match="is oasiskv installed"):
        registry.load("oasiskv.no_such_group", "any", Predictor)


@pytest.mark.usefixtures("fake_points")
@pytest.mark.parametrize("name", ["broken", "nameless"])
def test_a_broken_plugin_breaks_its_own_name_only(name):
    with pytest.raises(PluginError, match=rf"plug-in '{name}' .* fails to import") as caught:
        registry.load(registry.PREDICTORS, name, Predictor)
    assert caught.value.__cause__ is not None
    assert registry.load(registry.PREDICTORS, "good", Predictor) is Previous


@pytest.mark.usefixtures("fake_points")
@pytest.mark.parametrize("name", ["wrong", "function"])
def test_a_plugin_of_the_wrong_kind_is_refused(name):
    with pytest.raises(PluginError, match=rf"'{name}' .* is not a subclass of Predictor"):
        registry.load(registry.PREDICTORS, name, Predictor)


@pytest.mark.parametrize("field", ["summary", "predictor"])
def test_a_manager_refuses_a_plugin_that_is_not_there(field):
    with pytest.raises(PluginError, match="no plug-in 'nonesuch'"):
        KVManager(ModelShape(1, 1, 1, 8), OasisConfig(**{field: "nonesuch"}))


def test_a_plugin_error_is_an_import_error():
    assert issubclass(PluginError, ImportError)
