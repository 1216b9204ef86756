from infra.datasets.queries import load_queries


def test_every_sum_is_asked_once_and_held_out_ones_never_in_training():
    train, held_out = load_queries("sums:train"), load_queries("sums:held_out")
    assert len(train) + len(held_out) == 81
    pairs = [{frozenset(query.query_id.split("+")) for query in part} for part in (train, held_out)]
    assert not pairs[0] & pairs[1]
    assert len(held_out) >= 10
    for query in (*train, *held_out):
        a, b = query.query_id.split("+")
        assert query.question == f"What is {a} + {b}?"
        assert query.answers == (str(int(a) + int(b)),)
