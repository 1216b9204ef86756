"""What-if: from `key=value` to configs. A list of values makes a grid."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from mgrpo_core.config import RunConfig
from mgrpo_core.errors import ConfigError

_SECTIONS = ("alignment", "advantage", "loss", "update", "optimizer")
_OF_AGENT = ("d", "reward", "judge", "verifier", "trainable")
_CHOICES = (
    "alignment.* (alignment.d: of every sub-agent), advantage.*, loss.*, update.*, "
    "optimizer.* (of every policy), agents.NAME.{d, reward.*, judge, verifier, trainable}, policies.NAME.optimizer.*"
)


@dataclass(frozen=True, slots=True)
class Variation:
    """One config to try, and how it differs from the stored one."""

    changes: Mapping[str, Any]
    config: RunConfig

    @property
    def words(self) -> tuple[str, ...]:
        """`key=value` each."""
        return tuple(f"{key}={_word(value)}" for key, value in self.changes.items())


def variations(config: RunConfig, settings: Sequence[str]) -> list[Variation]:
    """Every combination of the values, in the order of the settings.

    Args:
        config: the stored one.
        settings: `key=value` each, the value YAML; a list is a value for each of its items.

    Raises: ConfigError where a key decides what was rolled out, or a value is refused.
    """
    keys: list[str] = []
    choices: list[list[Any]] = []
    for setting in settings:
        key, value = _parsed(setting)
        if key in keys:
            raise ConfigError(f"--set {setting}: {key} is set twice. Give its values as a list: {key}=[a, b].")
        keys.append(key)
        choices.append(value if isinstance(value, list) else [value])
    return [
        Variation(changes, _changed(config, changes))
        for changes in (dict(zip(keys, chosen, strict=True)) for chosen in itertools.product(*choices))
    ]


def _parsed(setting: str) -> tuple[str, Any]:
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {setting}: expected key=value, as in --set alignment.d=4 or --set alignment.d=[2,4]")
    parts = key.split(".")
    known = parts[0] in _SECTIONS and len(parts) > 1
    known |= parts[0] == "agents" and len(parts) > 2 and parts[2] in _OF_AGENT
    known |= parts[0] == "policies" and len(parts) > 3 and parts[2] == "optimizer"
    if not known:
        raise ConfigError(
            f"--set {setting}: a replay starts from stored rollouts, and {key} cannot be tried on them. "
            f"It takes {_CHOICES}."
        )
    try:
        return key, yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {setting}: the value is not valid YAML. {error}") from None


def _changed(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    raw = config.model_dump(mode="json")
    for key, value in changes.items():
        for path in _paths(config, key):
            if path[0] == "agents" and path[1] in config.agents and path[2:3] == ["reward"]:
                agent = raw["agents"][path[1]]
                agent["reward"] = agent["reward"] or config.reward_of(path[1]).model_dump(mode="json")
            _put(raw, key, path, value)
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False)]
        words = " ".join(f"{key}={_word(value)}" for key, value in changes.items())
        raise ConfigError(f"--set {words}: cannot be tried.\n" + "\n".join(problems)) from None


def _paths(config: RunConfig, key: str) -> list[list[str]]:
    """Where a key is in the config; a short one stands for several."""
    head, *rest = key.split(".")
    if key == "alignment.d":
        return [["agents", agent, "d"] for agent in config.sub_agents]
    if head == "optimizer":
        return [["policies", policy, "optimizer", *rest] for policy in config.policies]
    return [[head, *rest]]


def _put(raw: dict[str, Any], key: str, path: list[str], value: Any) -> None:
    section = raw
    for part in path[:-1]:
        below = section.get(part)
        if not isinstance(below, dict):
            raise ConfigError(f"--set {key}: the config has no {part!r} there. It has {', '.join(section)}.")
        section = below
    section[path[-1]] = value


def _word(value: Any) -> str:
    return value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).split("\n")[0]
