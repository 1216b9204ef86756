"""Dialogues for the warm start: skills on made-up facts, then a mix of good and bad habits.

Names are the real ones, paired at random, so that no real fact leaks into a policy. What the skills are: to copy a name
from question to delegation, from document to report, from report to answer. What the habits are: when to ask, when to
search, what to report. Reinforcement shifts habits; it does not teach to copy.
"""

from dataclasses import dataclass

import numpy as np

from infra.datasets.geo_facts import (
    QUESTION_WORDINGS,
    RELATIONS,
    attribute_of,
    countries,
    country_of_capital,
    country_of_city,
)

MAIN_PROMPT = "Answer the question. Ask the searcher for facts."
SUB_PROMPT = "Search the facts and report."
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A dialogue: what the agent is asked, then its turns and the replies between them (one fewer)."""

    system: str
    user: str
    turns: tuple[str, ...]
    replies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Habits:
    """How often each choice is the good one; 1 everywhere = skills only.

    Attributes:
        ask_first: main asks for the country before anything else; otherwise it answers at once, or asks nonsense.
        ask_on: main asks on when it knows the country; otherwise it answers with the country.
        search: the searcher searches; otherwise it reports a guess.
        report: the searcher reports the matching document; otherwise that it knows nothing, or a wrong document.
    """

    ask_first: float = 1.0
    ask_on: float = 1.0
    search: float = 1.0
    report: float = 1.0


GOOD = Habits()
MIXED = Habits(ask_first=0.40, ask_on=0.45, search=0.55, report=0.40)
"""At these rates a rollout succeeds in about 1 of 100, and each agent alone caps the team."""


@dataclass(frozen=True, slots=True)
class Names:
    """Everything that a question, a document or a report can name."""

    countries: tuple[str, ...]
    capitals: tuple[str, ...]
    cities: tuple[str, ...]
    values: dict[str, tuple[str, ...]]


def real_names() -> Names:
    """Names that occur in the real facts; which belongs to which is not kept."""
    known = countries()
    values: dict[str, set[str]] = {relation: set() for relation in RELATIONS}
    for country in known:
        for relation, accepted in country.attributes:
            values[relation].add(accepted[0])
    return Names(
        countries=tuple(country.name for country in known),
        capitals=tuple(country.capital for country in known),
        cities=tuple(city for country in known for city in country.cities),
        values={relation: tuple(sorted(found)) for relation, found in values.items()},
    )


class Demonstrator:
    """Draws dialogues. The same generator gives the same dialogues."""

    def __init__(self, names: Names, rng: np.random.Generator) -> None:
        self._names = names
        self._rng = rng

    def main(self, habits: Habits) -> Demonstration:
        """A dialogue of the main agent."""
        kind, bridge = self._bridge()
        relation = self._pick(RELATIONS)
        opening, closing = QUESTION_WORDINGS[relation], QUESTION_WORDINGS[kind]
        question = f"{self._pick(opening)} {self._pick(closing).format(bridge)}"
        country, value = self._pick(self._names.countries), self._pick(self._names.values[relation])
        first = country_of_capital(bridge) if kind == "capital" else country_of_city(bridge)
        turns: list[str] = []
        replies: list[str] = []

        def done(answer: str) -> Demonstration:
            return Demonstration(MAIN_PROMPT, question, (*turns, _answer(answer)), tuple(replies))

        if not self._chance(habits.ask_first):
            if self._chance(0.75):
                return done(value)  # at once, a guess
            turns.append(_ask(attribute_of(relation, bridge)))  # of a city, which no document knows
            replies.append(UNKNOWN)
            return done(UNKNOWN)
        turns.append(_ask(first))
        if self._chance(0.08):  # a searcher that knows nothing
            replies.append(UNKNOWN)
            return done(UNKNOWN)
        replies.append(country)
        if not self._chance(habits.ask_on):
            return done(country)
        turns.append(_ask(attribute_of(relation, country)))
        if self._chance(0.08):
            replies.append(UNKNOWN)
            return done(UNKNOWN)
        replies.append(value)
        return done(value)

    def sub(self, habits: Habits) -> Demonstration:
        """A dialogue of the searcher."""
        task, value, documents, match = self._looked_up()
        if not self._chance(habits.search):
            return Demonstration(SUB_PROMPT, task, (_answer(value if self._chance(0.5) else UNKNOWN),), ())
        shown = "\n".join(f"- {document}" for document in documents)
        report = match if match is not None else UNKNOWN
        if match is not None and not self._chance(habits.report):
            report = UNKNOWN if self._chance(0.75) else self._pick(documents).rpartition(": ")[2]
        return Demonstration(SUB_PROMPT, task, (_search(task), _answer(report)), (shown,))

    def _looked_up(self) -> tuple[str, str, list[str], str | None]:
        """A task, a guess at its answer, three documents, and what the matching one says (None if none matches)."""
        names = self._names
        kind = self._rng.random()
        if kind < 0.5:
            relation, country = self._pick(RELATIONS), self._pick(names.countries)
            task, value = attribute_of(relation, country), self._pick(names.values[relation])
            near = [
                f"{attribute_of(self._pick(RELATIONS), country)}",
                f"{attribute_of(relation, self._pick(names.countries))}",
                f"capital of {country}",
            ]
        else:
            place, bridge = self._bridge()
            key = country_of_capital if place == "capital" else country_of_city
            task, value = key(bridge), self._pick(names.countries)
            others = names.capitals if place == "capital" else names.cities
            near = [key(self._pick(others)), key(self._pick(others)), f"capital of {self._pick(names.countries)}"]
            if self._chance(0.06):  # a task that no document answers
                task = attribute_of(self._pick(RELATIONS), bridge)
                keys = [key(bridge), *near[:2]]
                return task, value, [f"{one}: {self._value_of(one)}" for one in self._shuffled(keys)], None
        wrong = [one for one in self._shuffled(near) if one != task][:2]
        documents = [f"{task}: {value}", *(f"{one}: {self._value_of(one)}" for one in wrong)]
        return task, value, self._shuffled(documents), value

    def _value_of(self, key: str) -> str:
        for relation in RELATIONS:
            if key.startswith(f"{relation} of "):
                return self._pick(self._names.values[relation])
        return self._pick(self._names.capitals if key.startswith("capital of ") else self._names.countries)

    def _bridge(self) -> tuple[str, str]:
        if self._chance(0.5):
            return "capital", self._pick(self._names.capitals)
        return "city", self._pick(self._names.cities)

    def _chance(self, share: float) -> bool:
        return bool(self._rng.random() < share)

    def _pick(self, options: tuple[str, ...] | list[str]) -> str:
        return options[int(self._rng.integers(len(options)))]

    def _shuffled(self, items: list[str]) -> list[str]:
        return [items[int(index)] for index in self._rng.permutation(len(items))]


def _ask(task: str) -> str:
    return f'<tool_call>{{"name": "searcher", "arguments": {{"task": " {task}"}}}}</tool_call>'


def _search(query: str) -> str:
    return f'<tool_call>{{"name": "search", "arguments": {{"query": " {query}"}}}}</tool_call>'


def _answer(text: str) -> str:
    return f"<answer> {text}</answer>"
