"""Value and gradient of the KL estimators, as exact expectations over a vocabulary of three tokens. Case B4."""

import pytest
import torch

from mgrpo_core.update.loss import kl_estimate

POLICY = [0.4, -0.2, 0.1]
REFERENCE = [0.0, 0.3, -0.3]
REVERSE_KL = 0.084275  # KL(policy || reference)
REVERSE_GRADIENT = [0.09422, -0.16402, 0.06980]
FORWARD_GRADIENT = [0.11320, -0.19706, 0.08386]  # of KL(reference || policy): p - q


def expectation(estimator: str, old_logits: list[float] = POLICY) -> tuple[float, list[float]]:
    """Exact value, and gradient to the logits, of the estimate over tokens sampled from softmax(old_logits)."""
    logits = torch.tensor(POLICY, dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)
    old = torch.tensor(old_logits, dtype=torch.float64).log_softmax(0)
    ref = torch.tensor(REFERENCE, dtype=torch.float64).log_softmax(0)
    value = (old.exp() * kl_estimate(logp, ref, old, estimator)).sum()  # samples are constants to autograd
    value.backward()
    assert logits.grad is not None
    return value.item(), logits.grad.tolist()


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3_ratio"])
def test_k1_and_k3_estimate_the_kl_without_bias(estimator):
    assert expectation(estimator)[0] == pytest.approx(REVERSE_KL, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k2", "k3_ratio"])
def test_k2_and_k3_ratio_have_the_gradient_of_the_kl(estimator):
    assert expectation(estimator)[1] == pytest.approx(REVERSE_GRADIENT, abs=1e-5)


def test_k1_has_no_gradient_in_expectation():
    assert expectation("k1")[1] == pytest.approx([0, 0, 0], abs=1e-12)


def test_k3_has_the_gradient_of_the_other_kl():
    assert expectation("k3")[1] == pytest.approx(FORWARD_GRADIENT, abs=1e-5)


def test_k3_ratio_keeps_value_and_gradient_when_samples_come_from_an_older_policy():
    value, gradient = expectation("k3_ratio", old_logits=[-0.5, 0.6, 0.2])
    assert value == pytest.approx(REVERSE_KL, abs=1e-6)
    assert gradient == pytest.approx(REVERSE_GRADIENT, abs=1e-5)


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.106531), ("k3_ratio", 0.106531)]
)
def test_one_token_by_hand(estimator, expected):
    # logp -1, ref -1.5: k1 0.5, k2 0.25 / 2, k3 e^-0.5 + 0.5 - 1 (a swapped sign gives 0.14872)
    logp, ref = torch.tensor(-1.0, dtype=torch.float64), torch.tensor(-1.5, dtype=torch.float64)
    assert kl_estimate(logp, ref, logp, estimator).item() == pytest.approx(expected, abs=1e-6)
