"""An expert by rule: did the sub-agent report what the corpus holds? It never sees the query's reference answer."""

import re
from collections.abc import Mapping, Sequence

from infra.datasets.geo_facts import Fact
from mgrpo_core.rewards.verifiers import normalize_answer
from mgrpo_core.rollout.protocols import Report

SUPPORTED = 0.2
_LINE = re.compile(r"^- .*: (.+)$", re.MULTILINE)


class FactJudge:
    """Scores a report against a corpus of facts.

    1: the task asks for a fact of the corpus ("currency of Peru") and the reply states it.
    0.2: the task asks for none, and the reply is the value of a document that a search of it brought: the sub-agent
    did what could be done with a task that has no answer.
    0: everything else; a reply without a search scores 0 for such a task, whatever it says.

    A delegation's context follows its task after a blank line and is no part of what was asked for.
    """

    version = "facts-1"

    def __init__(self, facts: Sequence[Fact]) -> None:
        self._accepted: Mapping[str, frozenset[str]] = {
            normalize_answer(fact.key): frozenset(map(normalize_answer, fact.accepted)) for fact in facts
        }

    async def score(self, report: Report) -> float:
        """The score of one invocation."""
        if report.reply is None:
            return 0.0
        reply = normalize_answer(report.reply)
        accepted = self._accepted.get(normalize_answer(report.task.partition("\n\n")[0]))
        if accepted is not None:
            return float(reply in accepted)
        shown = {normalize_answer(value) for text in report.observations for value in _LINE.findall(text)}
        return SUPPORTED if reply in shown else 0.0
