"""Dropout is off in an update: log-probs must be those of the policy that sampled (first-step ratio exactly 1)."""

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

# Names under which transformers' attention layers keep their probability; read only in training mode.
_ATTENTION_ATTRIBUTES = ("attention_dropout", "attn_dropout")


@contextmanager
def dropout_off(model: nn.Module) -> Generator[None]:
    """Run the block without dropout; every mode and probability is put back after it.

    A model with gradient checkpointing stays in training mode, since transformers checkpoints only there, and has its
    dropout probabilities set to 0. Any other is put in evaluation mode.
    """
    modes = [(module, module.training) for module in model.modules()]
    probabilities: list[tuple[nn.Module, str, float]] = []
    checkpointing = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    model.train(checkpointing)
    if checkpointing:
        for module in model.modules():
            names = ("p",) if isinstance(module, nn.modules.dropout._DropoutNd) else _ATTENTION_ATTRIBUTES  # pyright: ignore[reportPrivateUsage]
            for name in names:
                value = getattr(module, name, None)
                if isinstance(value, float) and value > 0:
                    probabilities.append((module, name, value))
                    setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in probabilities:
            setattr(module, name, value)
        for module, training in modes:
            module.training = training
