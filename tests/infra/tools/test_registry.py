import sys

import pytest

from infra.tools.registry import build_tool
from mgrpo_core.errors import ConfigError
from mgrpo_core.rollout.protocols import Tool
from mgrpo_core.rollout.scripted import ScriptedTool


def factory_of_a_tool() -> ScriptedTool:
    return ScriptedTool("echo", lambda arguments: str(arguments))


def factory_of_something_else() -> str:
    return "echo"


def test_search_over_the_facts_is_built_in_and_one_index_serves_all() -> None:
    tool = build_tool("search:geo_facts")
    assert isinstance(tool, Tool)
    assert tool.name == "search"
    assert build_tool("search:geo_facts") is tool


def test_an_import_path_names_a_users_own_factory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "users_own", sys.modules[__name__])
    assert build_tool("users_own:factory_of_a_tool").name == "echo"
    with pytest.raises(ConfigError, match="the factory returned str"):
        build_tool("users_own:factory_of_something_else")


@pytest.mark.parametrize("spec", ["search:wikipedia", "search", ""])
def test_an_unknown_tool_is_refused_with_what_there_is(spec: str) -> None:
    with pytest.raises(ConfigError, match="search:geo_facts"):
        build_tool(spec)


def test_a_module_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="no_such_module"):
        build_tool("no_such_module:factory")
