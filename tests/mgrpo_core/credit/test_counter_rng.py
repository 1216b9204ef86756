import numpy as np

from mgrpo_core.credit.counter_rng import below, mix
from tests.oracles import splitmix64


def test_words_are_those_of_the_published_splitmix64():
    # Reference output of Vigna's splitmix64.c for the seed 1234567.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert mix(np.full(4, 1234567, dtype=np.uint64), np.arange(4)).tolist() == expected


def test_words_equal_those_computed_in_python_integers():
    key = np.array([0, 1, 2**63, 2**64 - 1], dtype=np.uint64)
    counter = np.array([0, 7, 2**31, 2**40])
    assert mix(key, counter).tolist() == [splitmix64(k, c) for k, c in zip(key.tolist(), counter.tolist(), strict=True)]


def test_words_of_one_key_never_tie():
    assert len(np.unique(mix(np.full(100_000, 5, dtype=np.uint64), np.arange(100_000)))) == 100_000


def test_below_covers_the_range_and_stays_in_it():
    words = np.array([0, 2**32 - 1, 2**63, 2**64 - 1], dtype=np.uint64)
    assert below(words, np.full(4, 6)).tolist() == [0, 0, 3, 5]
