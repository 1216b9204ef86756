"""What the loss is made of: small frozen records, each default with its source."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from mgrpo_core.errors import ConfigError

RatioLevel = Literal["token", "sequence"]
Reduction = Literal["trajectory_mean", "token_mean", "constant"]
KLEstimator = Literal["k1", "k2", "k3", "k3_ratio"]
CorrectionMode = Literal["none", "truncate", "mask"]
CorrectionLevel = Literal["token", "sequence"]


def _require_choice(where: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{where} is {value!r}, expected one of {', '.join(choices)}.")


@dataclass(frozen=True, slots=True)
class ClipRange:
    """The ratio is clipped to [1 - low, 1 + high]; `dual` c bounds the loss of a negative advantage by c |A|.

    0.2 and 0.28: the released M-GRPO code. `dual` (arXiv:1912.09729, c = 3 there) is off: None.
    """

    low: float = 0.2
    high: float = 0.28
    dual: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.low < 1 or self.high <= 0:
            raise ConfigError(f"ClipRange: low {self.low}, high {self.high}; expected 0 < low < 1 and high > 0.")
        if self.dual is not None and self.dual <= 1 + self.high:
            raise ConfigError(
                f"ClipRange: dual {self.dual} is not above 1 + high = {1 + self.high}. Use 3, or None to switch it off."
            )


@dataclass(frozen=True, slots=True)
class KLPenalty:
    """coefficient x estimated KL(policy || reference), a token at a time. 0: M-GRPO has none."""

    coefficient: float = 0.0
    estimator: KLEstimator = "k3_ratio"

    def __post_init__(self) -> None:
        _require_choice("KLPenalty: estimator", self.estimator, get_args(KLEstimator))
        if not self.coefficient >= 0:
            raise ConfigError(f"KLPenalty: coefficient {self.coefficient}, expected 0 or more.")


@dataclass(frozen=True, slots=True)
class Correction:
    """Importance correction w = pi_old / pi_sampler for the gap between trainer and sampler log-probs.

    - `none`: w = 1.
    - `truncate`: min(w, cap) (truncated importance sampling).
    - `mask`: w where 1/cap <= w <= cap, else 0 (IcePop, arXiv:2510.18855).

    Level `token`: one w a token. Level `sequence`: one a trajectory, exp of the mean log-ratio over its sampled tokens:
    a plain product over thousands of tokens is 0 or infinite. A w of 0 takes the place out of the numerator only: the
    mean is over what was sampled, as for any importance weight.
    """

    mode: CorrectionMode = "none"
    level: CorrectionLevel = "token"
    cap: float = 2.0

    def __post_init__(self) -> None:
        _require_choice("Correction: mode", self.mode, get_args(CorrectionMode))
        _require_choice("Correction: level", self.level, get_args(CorrectionLevel))
        if not self.cap > 1:
            raise ConfigError(f"Correction: cap {self.cap}, expected more than 1.")


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The clipped surrogate and its companions.

    Attributes:
        ratio: `token` (released code): exp(logp - old) at each token; `sequence` (GSPO, arXiv:2507.18071): exp of its
            mean over the sampled tokens of the trajectory. The literal product of M-GRPO Eq. 15 over- or underflows.
        clip: range of the ratio.
        reduction: `trajectory_mean` (M-GRPO Eq. 14 and 16): mean over sampled tokens, then over trajectories;
            `token_mean` (DAPO, arXiv:2503.14476): over all sampled tokens; `constant` (Dr. GRPO, arXiv:2503.20783):
            token sums / `constant_length`, then over trajectories.
        constant_length: tokens, divisor of `constant`; None with every other reduction.
        kl: pull towards the reference policy.
        correction: for the gap between sampler and trainer.
        entropy_bonus: coefficient of the entropy, nats a token, that is subtracted from the loss. 0: M-GRPO has none.
    """

    ratio: RatioLevel = "token"
    clip: ClipRange = field(default_factory=ClipRange)
    reduction: Reduction = "trajectory_mean"
    constant_length: int | None = None
    kl: KLPenalty = field(default_factory=KLPenalty)
    correction: Correction = field(default_factory=Correction)
    entropy_bonus: float = 0.0

    def __post_init__(self) -> None:
        _require_choice("LossSettings: ratio", self.ratio, get_args(RatioLevel))
        _require_choice("LossSettings: reduction", self.reduction, get_args(Reduction))
        if (self.reduction == "constant") != (self.constant_length is not None):
            raise ConfigError(
                f"LossSettings: reduction {self.reduction!r} with constant_length {self.constant_length}. "
                "Give a length in tokens with `constant`, and None with any other reduction."
            )
        if self.constant_length is not None and self.constant_length < 1:
            raise ConfigError(f"LossSettings: constant_length {self.constant_length}, expected 1 token or more.")
        if not self.entropy_bonus >= 0:
            raise ConfigError(f"LossSettings: entropy_bonus {self.entropy_bonus}, expected 0 or more.")

    @property
    def whole_trajectories(self) -> bool:
        """Whether a micro-batch must hold a trajectory whole: one number is computed over all of its tokens."""
        return self.ratio == "sequence" or (self.correction.mode != "none" and self.correction.level == "sequence")
