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
    Country,
    Fact,
    attribute_of,
    countries,
    country_of_capital,
    country_of_city,
    facts_of,
)
from infra.tools.search import SearchTool

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
MIXED = Habits(ask_first=0.50, ask_on=0.45, search=0.70, report=0.45)
"""At these rates a rollout succeeds in about 2 of 100, and each agent alone caps the team."""


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


def made_up_countries(rng: np.random.Generator) -> tuple[Country, ...]:
    """The real countries with all that is known of them dealt out anew: searching it is as hard as the real corpus."""
    known, names = countries(), real_names()

    def dealt(options: tuple[str, ...]) -> list[str]:
        return [options[int(index)] for index in rng.permutation(len(options))]

    capitals, cities, own_names = dealt(names.capitals), dealt(names.cities), dealt(names.countries)
    made_up = []
    for country, name, capital in zip(known, own_names, capitals, strict=True):
        own_cities = tuple(cities.pop() for _ in country.cities)
        attributes = tuple(
            (relation, (names.values[relation][int(rng.integers(len(names.values[relation])))],))
            for relation, _ in country.attributes
        )
        made_up.append(Country(name, capital, own_cities, attributes))
    return tuple(made_up)


class _World:
    """Made-up facts, and the search over them."""

    def __init__(self, known: tuple[Country, ...]) -> None:
        self.facts: tuple[Fact, ...] = facts_of(known)
        self.search = SearchTool([fact.document for fact in self.facts])


class Demonstrator:
    """Draws dialogues. The same generator gives the same dialogues."""

    def __init__(self, rng: np.random.Generator, *, worlds: int = 200) -> None:
        self._names = real_names()
        self._rng = rng
        self._worlds = [_World(made_up_countries(rng)) for _ in range(worlds)]

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
        """A dialogue of the searcher, in a made-up world."""
        world = self._worlds[int(self._rng.integers(len(self._worlds)))]
        fact = world.facts[int(self._rng.integers(len(world.facts)))]
        task, found = fact.key, fact.value
        if self._chance(0.05):  # a task that no document answers
            task, found = attribute_of(self._pick(RELATIONS), self._bridge()[1]), UNKNOWN
        if not self._chance(habits.search):
            guess = self._pick(
                self._names.countries if self._chance(0.4) else self._names.values[self._pick(RELATIONS)]
            )
            return Demonstration(SUB_PROMPT, task, (_answer(guess if self._chance(0.5) else UNKNOWN),), ())
        shown = world.search.find(task)
        report = found
        if not self._chance(habits.report):
            report = UNKNOWN if self._chance(0.75) else self._pick(shown.split("\n")).rpartition(": ")[2]
        return Demonstration(SUB_PROMPT, task, (_search(task), _answer(report)), (shown,))

    def _bridge(self) -> tuple[str, str]:
        if self._chance(0.5):
            return "capital", self._pick(self._names.capitals)
        return "city", self._pick(self._names.cities)

    def _chance(self, share: float) -> bool:
        return bool(self._rng.random() < share)

    def _pick(self, options: tuple[str, ...] | list[str]) -> str:
        return options[int(self._rng.integers(len(options)))]


def _ask(task: str) -> str:
    return f'<tool_call>{{"name": "searcher", "arguments": {{"task": " {task}"}}}}</tool_call>'


def _search(query: str) -> str:
    return f'<tool_call>{{"name": "search", "arguments": {{"query": " {query}"}}}}</tool_call>'


def _answer(text: str) -> str:
    return f"<answer> {text}</answer>"
