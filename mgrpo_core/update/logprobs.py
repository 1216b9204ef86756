"""Log-probabilities and entropies at the sampled positions, without ever holding [batch, tokens, vocabulary]."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from mgrpo_core.errors import ConfigError

LOGITS_AT_ONCE = 2**25
"""Logits held at a time: 128 MB in float32. A matter of memory, never of the result beyond rounding."""


class SampledLogprobs(nn.Module):
    """A causal LM that returns log pi(token) of chosen tokens and the entropy at their positions.

    With z the logits at the position before a token and T its sequence's temperature:
    logprob = log_softmax(z / T)[token] and entropy = -sum_v p_v log p_v, p = softmax(z / T), in nats.
    Log-softmax is float32 (float64 for a float64 model) whatever the model computes in. The same T for the current, the
    old and the reference policy: the behaviour policy is softmax(z / T).

    Peak memory holds a chunk of logits and one gradient of the head, not tokens x vocabulary: the backward pass
    computes each chunk of logits again.

    A module, so that it can be sharded as one (FSDP gathers the head's weights when its root is called).

    Args:
        model: a Hugging Face causal LM: `get_decoder()` and `get_output_embeddings()`.
        logits_at_once: most logits (positions x vocabulary) held at a time.
        compute_dtype: bfloat16 runs the model under autocast; float32 leaves it as it is. Weights keep their dtype.

    Raises:
        ConfigError: if the model has no decoder and plain linear head, or scales its logits in a way not known here.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        logits_at_once: int = LOGITS_AT_ONCE,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.model = model
        self._logits_at_once = logits_at_once
        self._compute_dtype = compute_dtype
        self._softcap = _softcap(model)
        _head(model)

    def forward(
        self,
        token_ids_BT: Tensor,
        attention_mask_BT: Tensor,
        position_ids_BT: Tensor,
        loss_mask_BT: Tensor,
        temperature_B: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies, [B, T] each, 0 where `loss_mask_BT` is False.

        Args:
            token_ids_BT: int64; any valid id at padded places.
            attention_mask_BT: bool, True on real tokens.
            position_ids_BT: int64.
            loss_mask_BT: bool, True on tokens whose log-prob is wanted; False on each sequence's first real token,
                which nothing predicts.
            temperature_B: > 0, one a sequence.
        """
        device_type = token_ids_BT.device.type
        with torch.autocast(device_type, torch.bfloat16, enabled=self._compute_dtype == torch.bfloat16):
            hidden_BTH = _decoder(self.model)(
                input_ids=token_ids_BT,
                attention_mask=attention_mask_BT.long(),
                position_ids=position_ids_BT,
                use_cache=False,
            ).last_hidden_state
        predicts_BT = torch.zeros_like(loss_mask_BT)
        predicts_BT[:, :-1] = loss_mask_BT[:, 1:]
        rows = loss_mask_BT.nonzero()[:, 0]
        head = _head(self.model)
        compute_dtype = self._compute_dtype if self._compute_dtype == torch.bfloat16 else head.weight.dtype
        logprobs, entropies = cast(
            "tuple[Tensor, Tensor]",
            cast("Any", _HeadLogprobs).apply(
                hidden_BTH[predicts_BT],
                head.weight,
                head.bias,
                token_ids_BT[loss_mask_BT],
                temperature_B[rows],
                max(1, self._logits_at_once // head.weight.shape[0]),
                compute_dtype,
                self._softcap,
            ),
        )
        blank_BT = torch.zeros(loss_mask_BT.shape, dtype=logprobs.dtype, device=logprobs.device)
        return blank_BT.masked_scatter(loss_mask_BT, logprobs), blank_BT.masked_scatter(loss_mask_BT, entropies)


def _decoder(model: nn.Module) -> nn.Module:
    return cast("Any", model).get_decoder()


def _head(model: nn.Module) -> nn.Linear:
    head = cast("Any", model).get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if type(head) is not nn.Linear or not hasattr(model, "get_decoder"):
        raise ConfigError(
            f"SampledLogprobs: {type(model).__name__} has the output head {type(head).__name__}, expected a plain "
            "nn.Linear from get_output_embeddings() beside get_decoder(). Use a Hugging Face causal LM, and leave its "
            "head out of LoRA's target modules."
        )
    return head


def _softcap(model: nn.Module) -> float | None:
    """The model's `final_logit_softcapping` c, logits = c * tanh(logits / c), if it has one."""
    config = getattr(model, "config", None)
    for name in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        value = getattr(config, name, None)
        if value not in (None, 1, 1.0):
            raise ConfigError(
                f"SampledLogprobs: config.{name} is {value}: this model scales its logits, which is not supported. "
                "Use a model whose head is a plain linear map, as Qwen, Llama or SmolLM have."
            )
    return getattr(config, "final_logit_softcapping", None)


class _HeadLogprobs(torch.autograd.Function):
    """Head, temperature, log-softmax and entropy over chunks of positions; logits are computed again in backward.

    With u = z / T the scaled logits of a position, p = softmax(u), H the entropy, y the token:
    d logprob / du_j = [j = y] - p_j and dH / du_j = -p_j (log p_j + H).
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden_SH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        token_S: Tensor,
        temperature_S: Tensor,
        chunk: int,
        compute_dtype: torch.dtype,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        context = cast("Any", ctx)
        statistics_dtype = _statistics_dtype(weight_VH)
        logprob_S = torch.empty(len(token_S), dtype=statistics_dtype, device=hidden_SH.device)
        entropy_S = torch.empty_like(logprob_S)
        weight_in_VH = weight_VH.to(compute_dtype)
        for part in _chunks(len(token_S), chunk):
            logp_CV = _capped(_raw_logits(hidden_SH[part], weight_in_VH, bias_V, statistics_dtype), softcap)
            logp_CV = logp_CV.div_(temperature_S[part, None]).log_softmax(-1)
            logprob_S[part] = logp_CV.gather(1, token_S[part, None])[:, 0]
            entropy_S[part] = _entropy(logp_CV)
        context.save_for_backward(hidden_SH, weight_VH, bias_V, token_S, temperature_S, entropy_S)
        context.constants = (chunk, compute_dtype, softcap)
        return logprob_S, entropy_S

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        context = cast("Any", ctx)
        grad_logprob_S, grad_entropy_S = grads
        hidden_SH, weight_VH, bias_V, token_S, temperature_S, entropy_S = context.saved_tensors
        chunk, compute_dtype, softcap = context.constants
        statistics_dtype = _statistics_dtype(weight_VH)
        weight_in_VH = weight_VH.to(compute_dtype)
        grad_hidden_SH = torch.empty_like(hidden_SH)
        grad_weight_VH = torch.zeros_like(weight_VH) if context.needs_input_grad[1] else None
        grad_bias_V = torch.zeros_like(bias_V) if bias_V is not None and context.needs_input_grad[2] else None
        for part in _chunks(len(token_S), chunk):
            logits_CV = _raw_logits(hidden_SH[part], weight_in_VH, bias_V, statistics_dtype)
            slope_CV = None if softcap is None else 1 - torch.tanh(logits_CV / softcap).square()
            logp_CV = _capped(logits_CV, softcap).div_(temperature_S[part, None]).log_softmax(-1)
            del logits_CV  # a chunk of logits is most of the memory here
            p_CV = logp_CV.exp()
            # -p * (grad_logprob + grad_entropy * (log p + H)); a token of probability 0 has log p = -inf and adds 0
            factor_CV = logp_CV.clamp_(min=torch.finfo(statistics_dtype).min)
            factor_CV = factor_CV.add_(entropy_S[part, None]).mul_(grad_entropy_S[part, None])
            grad_CV = factor_CV.add_(grad_logprob_S[part, None]).mul_(p_CV).neg_()
            grad_CV.scatter_add_(1, token_S[part, None], grad_logprob_S[part, None])
            grad_CV.div_(temperature_S[part, None])
            if slope_CV is not None:
                grad_CV.mul_(slope_CV)
            grad_in_CV = grad_CV.to(compute_dtype)
            grad_hidden_SH[part] = (grad_in_CV @ weight_in_VH).to(hidden_SH.dtype)
            if grad_weight_VH is not None:
                if compute_dtype == weight_VH.dtype:
                    grad_weight_VH.addmm_(grad_in_CV.T, hidden_SH[part].to(compute_dtype))
                else:
                    grad_weight_VH += grad_in_CV.T @ hidden_SH[part].to(compute_dtype)
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
        return grad_hidden_SH, grad_weight_VH, grad_bias_V, None, None, None, None, None


def _statistics_dtype(weight_VH: Tensor) -> torch.dtype:
    return torch.float64 if weight_VH.dtype == torch.float64 else torch.float32


def _chunks(length: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]


def _raw_logits(hidden_CH: Tensor, weight_in_VH: Tensor, bias_V: Tensor | None, dtype: torch.dtype) -> Tensor:
    logits_CV = (hidden_CH.to(weight_in_VH.dtype) @ weight_in_VH.T).to(dtype)
    return logits_CV if bias_V is None else logits_CV.add_(bias_V)


def _capped(logits_CV: Tensor, softcap: float | None) -> Tensor:
    return logits_CV if softcap is None else logits_CV.div_(softcap).tanh_().mul_(softcap)


def _entropy(logp_CV: Tensor) -> Tensor:
    """-sum p log p with 0 log 0 = 0."""
    return -(logp_CV.exp() * logp_CV.clamp(min=torch.finfo(logp_CV.dtype).min)).sum(-1)
