"""Judges by name, or a user's own factory by import path."""

from infra.datasets.geo_facts import facts
from infra.judges.facts import FactJudge
from mgrpo_core.errors import ConfigError
from mgrpo_core.rewards.rule_judge import SupportJudge
from mgrpo_core.rewards.verifiers import imported
from mgrpo_core.rollout.protocols import Judge

_KNOWN = ("facts:geo_facts", "support")


def build_judge(spec: str) -> Judge:
    """The judge that a config names: `facts:geo_facts`, `support`, or `package.module:factory`.

    Raises: ConfigError if there is none, or the factory returns something else.
    """
    if spec == "facts:geo_facts":
        return FactJudge(facts())
    if spec == "support":
        return SupportJudge()
    if ":" not in spec or spec.startswith("facts:"):
        raise ConfigError(f"judge {spec!r}: unknown. Known: {', '.join(_KNOWN)}; or give an import path.")
    judge = imported(spec, what="judge")()
    if not isinstance(judge, Judge):
        raise ConfigError(
            f"judge {spec}: the factory returned {type(judge).__name__}, expected version and an async score(report), "
            "as in mgrpo_core/rollout/protocols.py."
        )
    return judge
