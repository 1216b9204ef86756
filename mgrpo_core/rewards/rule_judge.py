"""A judge by rule: does what was seen support what was said?"""

from collections.abc import Sequence

from mgrpo_core.rewards.verifiers import normalize_answer
from mgrpo_core.rollout.protocols import Report

# Words that support nothing, however often they were seen.
# fmt: off
_STOP_WORDS = frozenset(
    (
        "and", "are", "as", "at", "be", "by", "for", "from", "had", "has",
        "have", "in", "is", "it", "its", "not", "of", "on", "or", "that",
        "their", "there", "this", "to", "was", "were", "which", "with",
    )
)
# fmt: on


class SupportJudge:
    """Score = support × brevity, in [0, 1]; 0 without a reply or without an observation.

    support: share of the reply's different content words that occur in the observations.
    brevity: min(1, max_words / words of the reply): copying everything seen is no report.
    Content words are those of `normalize_answer` without stop words. Deterministic, general, and blind to truth: it
    pays for using tools and for reporting what they said, not for having asked the right thing.
    """

    def __init__(self, *, max_words: int = 64) -> None:
        self._max_words = max_words

    @property
    def version(self) -> str:
        return f"support-1/{self._max_words}"

    async def score(self, report: Report) -> float:
        """Score of one report."""
        return support(report.reply, report.observations, max_words=self._max_words)


def support(reply: str | None, observations: Sequence[str], *, max_words: int = 64) -> float:
    """See `SupportJudge`."""
    words = normalize_answer(reply or "").split()
    content = set(words) - _STOP_WORDS
    seen = {word for observation in observations for word in normalize_answer(observation).split()}
    if not content or not seen:
        return 0.0
    return len(content & seen) / len(content) * min(1.0, max_words / len(words))
