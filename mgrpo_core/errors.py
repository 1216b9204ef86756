"""One tree of errors. Each also derives from the built-in it refines, and is built from one message, so it pickles."""

from typing import cast


class MGRPOError(Exception):
    """Root of every error that mgrpo raises on purpose."""


class ConfigError(MGRPOError, ValueError):
    """A setting is wrong: names the field, the value and the fix."""


class ShapeError(MGRPOError, ValueError):
    """An array has another shape than the function is defined for."""


class NonFiniteError(MGRPOError, ArithmeticError):
    """A loss, gradient, reward or log-probability is NaN or infinite where a number is required."""


class DatasetError(MGRPOError, ValueError):
    """A query file cannot be read: names the file, the line and what was expected."""


class TemplateError(MGRPOError, ValueError):
    """A policy's chat template is missing, or does what token bookkeeping cannot follow."""


class ToolError(MGRPOError, ValueError):
    """A tool refuses its arguments. The policy's fault: the text goes back to the policy as an observation."""


class InfrastructureError(MGRPOError, RuntimeError):
    """Something of ours is down. Never a reward: retried, then the trajectory is excluded and the reason kept."""


class PolicyServerError(InfrastructureError):
    """A policy client cannot generate."""


class ToolOutageError(InfrastructureError):
    """A tool cannot answer, through no fault of the policy."""


class JudgeError(InfrastructureError):
    """A judge gives no usable score."""


class IncompleteIterationError(InfrastructureError):
    """Too many rollouts failed for the iteration to be trained on."""


class HistoryRewrittenError(MGRPOError, RuntimeError):
    """A chat template rewrites earlier turns at more prompts than the config accepts."""


class UpdateFailedError(InfrastructureError):
    """A policy's update on its work pool failed, was cancelled, or took too long."""


class StoreError(MGRPOError, RuntimeError):
    """The store of a run cannot be used as it stands."""


class StoreNotWritableError(StoreError, PermissionError):
    """The store cannot be written: wrong place, no permission, no space."""


class TableIntegrityError(StoreError):
    """A file of the store differs from what its manifest says, is missing, or cannot be parsed."""


class SchemaVersionError(StoreError):
    """A table or manifest was written by a newer mgrpo than this one."""


class AlreadyCommittedError(StoreError, FileExistsError):
    """Somebody else committed this iteration first."""


class IterationTakenError(StoreError, RuntimeError):
    """Another live process computes this iteration; it is left to it."""


class RunConflictError(StoreError, ValueError):
    """The run's name is in use with another config."""


def require_shape(array: object, axes: str, name: str = "array") -> None:
    """Raise ShapeError unless `array` has `len(axes)` axes and none is empty.

    Args:
        array: anything with a `shape`.
        axes: axis letters of the legend in `mgrpo_core`, one an axis, as in "N" or "BT".
        name: what to call the array in the message.
    """
    shape = cast("tuple[int, ...]", tuple(getattr(array, "shape", ())))
    if len(shape) != len(axes) or 0 in shape:
        raise ShapeError(f"{name}: shape {shape}, expected [{', '.join(axes)}] with every axis at least 1.")
