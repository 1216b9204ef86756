"""Tools by name: those that mgrpo brings, or a user's own factory by import path."""

from functools import lru_cache

from infra.datasets.geo_facts import facts
from infra.tools.search import SearchTool
from mgrpo_core.errors import ConfigError
from mgrpo_core.rewards.verifiers import imported
from mgrpo_core.rollout.protocols import Tool

GEO_FACTS = "search:geo_facts"


def build_tool(spec: str) -> Tool:
    """The tool that a config names: `search:geo_facts`, or `package.module:factory`, called without arguments.

    Raises: ConfigError if there is none, or the factory returns something else.
    """
    if spec == GEO_FACTS:
        return _geo_facts()
    if ":" not in spec or spec.startswith("search:"):
        raise ConfigError(
            f"tool {spec!r}: unknown. Known: {GEO_FACTS}; or give an import path, package.module:factory."
        )
    tool = imported(spec, what="tool")()
    if not isinstance(tool, Tool):
        raise ConfigError(
            f"tool {spec}: the factory returned {type(tool).__name__}, expected name, description, parameters and an "
            "async call(arguments), as in mgrpo_core/rollout/protocols.py."
        )
    return tool


@lru_cache(maxsize=1)
def _geo_facts() -> SearchTool:
    return SearchTool([fact.document for fact in facts()])
