import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from infra.serving.sampling import draw_tokens, uniforms_of


def draw(logits: list[list[float]], temperature: list[float], uniform: list[float]) -> tuple[list[int], np.ndarray]:
    tokens, logprobs = draw_tokens(
        torch.tensor(logits, dtype=torch.float32),
        torch.tensor(temperature, dtype=torch.float32),
        torch.tensor(uniform, dtype=torch.float64),
    )
    return tokens.tolist(), logprobs.numpy()


def test_logprobs_are_at_the_sampling_temperature() -> None:
    # case B6: logits [2, 1, 0, -1] at 0.6 -> [-0.2081, -1.8747, -3.5414, -5.2081]
    # cumulative: exp(-0.2081) = 0.8121, + exp(-1.8747) = 0.9655, + exp(-3.5414) = 0.9945, + exp(-5.2081) = 1
    tokens, logprobs = draw([[2, 1, 0, -1]] * 4, [0.6] * 4, [0.81, 0.82, 0.97, 0.999])
    assert tokens == [0, 1, 2, 3]
    np.testing.assert_allclose(logprobs, [-0.2081, -1.8747, -3.5414, -5.2081], atol=5e-5)


def test_the_whole_vocabulary_is_sampled_from() -> None:
    # case C8: at temperature 1 without top-p, log-probs [-0.4402, -1.4402, …]; a kept set of two would give -0.3133
    _, logprobs = draw([[2, 1, 0, -1]] * 2, [1.0, 1.0], [0.0, 0.7])
    np.testing.assert_allclose(logprobs, [-0.4402, -1.4402], atol=5e-5)


def test_temperature_zero_takes_the_likeliest_and_scores_it_at_one() -> None:
    tokens, logprobs = draw([[0, 3, 1], [0, 3, 1]], [0.0, 1.0], [0.999, 0.0])
    # log softmax: 3 - log(e^0 + e^3 + e^1) = 3 - log(23.8038) = -0.1698; and 0 - 3.1698
    assert tokens == [1, 0]
    np.testing.assert_allclose(logprobs, [-0.1698, -3.1698], atol=5e-5)


def test_the_ends_of_the_unit_interval_never_pick_a_token_without_mass() -> None:
    lowest, highest = 0.0, float(np.nextafter(1, 0))
    tokens, logprobs = draw([[-200.0, 0.0, 0.0, -200.0]] * 2, [1.0, 1.0], [lowest, highest])
    assert tokens == [1, 2]
    np.testing.assert_allclose(logprobs, np.log([0.5, 0.5]), atol=1e-6)


def test_a_row_that_is_not_finite_is_marked_and_spoils_no_other() -> None:
    nan, inf = float("nan"), float("inf")
    _, logprobs = draw([[0, nan], [0, inf], [0, -inf], [0, 0]], [1.0, 1.0, 0.0, 1.0], [0.5] * 4)
    assert np.isnan(logprobs).tolist() == [True, True, True, False]


def test_frequencies_are_the_probabilities() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    n = 20_000
    tokens, _ = draw_tokens(logits.expand(n, 4), torch.full((n,), 0.8), torch.from_numpy(uniforms_of(7, n)))
    expected = torch.softmax(logits / 0.8, dim=0).numpy()
    # standard error of a share at n = 20,000 is at most 0.0035; four of them
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / n, expected, atol=0.014)


@given(
    logits=st.lists(st.floats(-8, 8), min_size=2, max_size=30),
    temperature=st.floats(0.1, 3),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_agrees_with_a_plain_walk_along_the_distribution(
    logits: list[float], temperature: float, uniform: float
) -> None:
    scaled = np.array(logits, dtype=np.float32).astype(np.float64) / np.float32(temperature)
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    (token,), (logprob,) = draw([logits], [temperature], [uniform])
    below, upto = p[:token].sum(), p[: token + 1].sum()
    assert below - 1e-5 <= uniform <= upto + 1e-5
    np.testing.assert_allclose(logprob, np.log(p[token]), atol=1e-4)


def test_a_longer_limit_begins_with_the_same_draws() -> None:
    np.testing.assert_array_equal(uniforms_of(2**63 - 1, 500)[:3], uniforms_of(2**63 - 1, 3))
    assert not np.array_equal(uniforms_of(1, 8), uniforms_of(2, 8))
