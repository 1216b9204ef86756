"""Slow, plain loops that say what the vectorised functions must give. Written from the formulas, not from the code."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_MASK = 2**64 - 1


def splitmix64(key: int, counter: int) -> int:
    """Word number `counter` of the SplitMix64 stream seeded with `key`, in Python integers."""
    z = (key + (counter + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@dataclass(frozen=True)
class AlignedRow:
    rollout: int
    slot: int
    member: int
    copy: int
    weight: float


def align_by_loop(rollout_of: Sequence[int], keys: Sequence[int], d: int, mode: str) -> list[AlignedRow]:
    """Alignment, a rollout and a slot at a time."""
    rows: list[AlignedRow] = []
    for rollout, key in enumerate(keys):
        members = [member for member, its in enumerate(rollout_of) if its == rollout]
        d_k = len(members)
        if d_k == 0:
            empties = 0 if mode == "none" else d
            rows += [AlignedRow(rollout, slot, -1, 0, 0.0) for slot in range(empties)]
        elif mode != "random":
            weight = d / d_k if mode == "weighted" else 1.0
            rows += [AlignedRow(rollout, slot, member, 0, weight) for slot, member in enumerate(members)]
        else:
            if d_k > d:
                by_word = sorted(range(d_k), key=lambda number, key=key: splitmix64(key, number))
                numbers = sorted(by_word[:d])
            else:
                draws = [(splitmix64(key, slot) >> 32) * d_k >> 32 for slot in range(d_k, d)]
                numbers = [*range(d_k), *draws]
            for slot, number in enumerate(numbers):
                rows.append(AlignedRow(rollout, slot, members[number], numbers[:slot].count(number), 1.0))
    return rows


def advantages_of_group(
    rewards: Sequence[float], weights: Sequence[float], normalization: str, eps: float, batch_std: float = 0.0
) -> list[float]:
    """Advantages of one group whose rows all count, with exact sums."""
    total = math.fsum(weights)
    mean = math.fsum(w * r for w, r in zip(weights, rewards, strict=True)) / total
    squares = math.fsum(w * (r - mean) ** 2 for w, r in zip(weights, rewards, strict=True))
    if max(rewards) == min(rewards) or (normalization == "sample" and total <= 1):
        return [0.0] * len(rewards)
    if normalization == "leave_one_out":
        result: list[float] = []
        for i, own in enumerate(rewards):
            others = [j for j in range(len(rewards)) if j != i]
            weight = math.fsum(weights[j] for j in others)
            result.append(own - math.fsum(weights[j] * rewards[j] for j in others) / weight)
        return result
    divisor = {
        "population": math.sqrt(squares / total) + eps,
        "sample": math.sqrt(squares / (total - 1)) + eps if total > 1 else 1.0,
        "center": 1.0,
        "batch_std": batch_std + eps,
    }[normalization]
    return [(r - mean) / divisor for r in rewards]


def batch_std_of(groups: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    """Standard deviation of the centred rewards of all (rewards, weights) with two rows or more."""
    squares = weight = 0.0
    for rewards, weights in groups:
        if len(rewards) > 1:
            total = math.fsum(weights)
            mean = math.fsum(w * r for w, r in zip(weights, rewards, strict=True)) / total
            squares += math.fsum(w * (r - mean) ** 2 for w, r in zip(weights, rewards, strict=True))
            weight += total
    return math.sqrt(squares / weight) if weight else 0.0


@dataclass(frozen=True)
class LoopTrajectory:
    """Log-probs of the sampled tokens of one trajectory, and its credit."""

    new: Sequence[float]
    old: Sequence[float]
    sampler: Sequence[float]
    ref: Sequence[float]
    entropy: Sequence[float]
    advantage: float
    weight: float


def loss_by_loop(
    trajectories: Sequence[LoopTrajectory],
    *,
    ratio: str = "token",
    low: float = 0.2,
    high: float = 0.28,
    dual: float | None = None,
    reduction: str = "trajectory_mean",
    constant_length: int | None = None,
    kl_coefficient: float = 0.0,
    kl_estimator: str = "k3_ratio",
    correction: str = "none",
    correction_level: str = "token",
    cap: float = 2.0,
    entropy_bonus: float = 0.0,
) -> float:
    """The loss of a whole optimiser batch, a token at a time."""
    numerator = 0.0
    total_weight = sum(t.weight for t in trajectories)
    total_tokens = sum(t.weight * len(t.new) for t in trajectories)
    for t in trajectories:
        n = len(t.new)
        log_ratios = [new - old for new, old in zip(t.new, t.old, strict=True)]
        gaps = [0.0 if math.isnan(s) else old - s for old, s in zip(t.old, t.sampler, strict=True)]
        for i in range(n):
            r = math.exp(sum(log_ratios) / n if ratio == "sequence" else log_ratios[i])
            a = t.advantage
            token = max(-a * r, -a * min(max(r, 1 - low), 1 + high))
            if dual is not None and a < 0:
                token = min(token, -a * dual)
            if correction != "none":
                w = math.exp(sum(gaps) / n if correction_level == "sequence" else gaps[i])
                if correction == "truncate":
                    w = min(w, cap)
                elif not 1 / cap <= w <= cap:
                    w = 0.0
                token *= w
            x = t.ref[i] - t.new[i]
            kl = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - x - 1}.get(kl_estimator)
            if kl is None:
                kl = math.exp(log_ratios[i]) * (math.exp(x) - x - 1)
            token += kl_coefficient * kl - entropy_bonus * t.entropy[i]
            numerator += t.weight * token / (n if reduction == "trajectory_mean" else 1)
    if reduction == "trajectory_mean":
        return numerator / total_weight
    if reduction == "token_mean":
        return numerator / total_tokens
    return numerator / (constant_length * total_weight)


def full_logits_logprobs(
    model: torch.nn.Module, token_ids: Sequence[int], temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of token t given those before it, and the entropy there, for t = 1 … T-1: one sequence, no padding."""
    logits = model(input_ids=torch.tensor([list(token_ids)])).logits[0, :-1]
    logp = (logits / temperature).log_softmax(-1)
    chosen = logp.gather(1, torch.tensor(list(token_ids)[1:])[:, None])[:, 0]
    return chosen, -(logp.exp() * logp).sum(-1)


def left_out_by_loop(
    rewards: Sequence[float],
    groups: Sequence[int],
    rollouts: Sequence[int],
    keys: Sequence[int],
    gone: int,
    *,
    d: int,
    mode: str,
    normalization: str,
    eps: float,
) -> tuple[dict[int, float], dict[int, float]]:
    """Weights and advantages by row, of a whole batch in which the row `gone` never was."""
    rows = [row for row in range(len(rewards)) if row != gone]
    weights = dict.fromkeys(rows, 0.0)
    for slot in align_by_loop([rollouts[row] for row in rows], keys, d, mode):
        if slot.member >= 0:
            weights[rows[slot.member]] += slot.weight
    members = {group: [row for row in rows if groups[row] == group and weights[row]] for group in set(groups)}
    columns = {group: ([rewards[row] for row in of], [weights[row] for row in of]) for group, of in members.items()}
    batch_std = batch_std_of(list(columns.values()))
    advantages = dict.fromkeys(rows, 0.0)
    for group, of in members.items():
        if len(of) > 1:
            found = advantages_of_group(*columns[group], normalization, eps, batch_std)
            advantages.update(zip(of, found, strict=True))
    return weights, advantages
