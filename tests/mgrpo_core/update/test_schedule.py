import pytest

from mgrpo_core.update.schedule import learning_rate


def test_cosine_with_warmup_at_a_resumed_step():  # case H3: base 1e-6, warm-up 10, cosine to 100, stop after 60
    # p = 50/90, (1 + cos(pi * 5/9)) / 2 = 0.41318
    rate = learning_rate(60, base=1e-6, schedule="cosine", warmup_steps=10, total_steps=100)
    assert rate == pytest.approx(4.1318e-7, rel=1e-4)


def test_warmup_rises_linearly_to_the_base():
    rates = [learning_rate(step, base=1.0, warmup_steps=4) for step in range(6)]
    assert rates == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_reaches_zero_at_the_last_step_and_stays_there():
    rates = [learning_rate(step, base=1.0, schedule="linear", total_steps=4) for step in (0, 2, 4, 9)]
    assert rates == [1.0, 0.5, 0.0, 0.0]
