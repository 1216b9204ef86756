"""From a preset's name or a YAML file, and `--set` overrides, to a checked RunConfig; or a ConfigError that teaches."""

import difflib
import typing
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from mgrpo_core.config import RunConfig
from mgrpo_core.errors import ConfigError


def preset_names() -> list[str]:
    """Names of the presets that mgrpo ships."""
    folder = resources.files("flows.presets")
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_config(source: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The checked config of `source`, a preset's name or the path of a YAML file.

    Args:
        source: `quickstart`, or `path/to/my.yaml`.
        overrides: `key=value` each, the key dotted (`loss.clip_low=0.1`), the value YAML.

    Raises:
        ConfigError: unreadable file, malformed YAML, unknown key, wrong value; every problem in one message.
    """
    raw = _parse(_read(source), source)
    for override in overrides:
        _apply(raw, override)
    return config_from(raw, source)


def config_from(raw: object, source: str) -> RunConfig:
    """Check `raw`; `source` says in the message where it came from."""
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        problems = "\n".join(f"  - {problem}" for problem in _problems(error))
        raise ConfigError(f"{source}: this config cannot be run.\n{problems}") from None


def _read(source: str) -> str:
    path = Path(source)
    if path.suffix in {".yaml", ".yml"} or path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{source}: cannot be read as a config file ({error}). Give the path of a YAML file."
            ) from None
    if source not in preset_names():
        raise ConfigError(
            f"{source!r} is neither a preset ({', '.join(preset_names())}) nor a file. "
            "Name a preset, or give the path of a YAML file."
        )
    return (resources.files("flows.presets") / f"{source}.yaml").read_text(encoding="utf-8")


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: is not valid YAML. {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{source}: holds {type(raw).__name__}, expected a mapping with agents, policies, data, rollout."
        )
    return raw


def _apply(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {override}: expected key=value, as in --set loss.clip_low=0.1")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override}: the value is not valid YAML. {error}") from None
    *parents, last = key.split(".")
    section = raw
    for depth, parent in enumerate(parents):
        below = section.get(parent)
        if below is None:
            below = section[parent] = {}
        if not isinstance(below, dict):
            where = ".".join(parents[: depth + 1])
            raise ConfigError(f"--set {override}: {where} is {below!r}, which has no keys below it.")
        section = below
    section[last] = value


def _problems(error: ValidationError) -> list[str]:
    problems: list[str] = []
    for found in error.errors(include_url=False):
        where = ".".join(str(part) for part in found["loc"])
        if found["type"] == "value_error":  # our own rules: they name the field themselves
            problems.extend(found["msg"].removeprefix("Value error, ").split("\n"))
        elif found["type"] == "extra_forbidden":
            problems.append(f"{where}: no such setting. {_known_settings(found['loc'])}")
        elif found["type"] == "missing":
            problems.append(f"{where}: missing. Add it.")
        else:
            problems.append(f"{where}: {found['input']!r} is refused. {found['msg']}.")
    return problems


def _known_settings(loc: tuple[int | str, ...]) -> str:
    """What could have been meant at `loc`."""
    section: Any = RunConfig
    parts = iter(loc[:-1])
    for part in parts:
        field = section.model_fields.get(str(part)) if section else None
        section = _inner(field.annotation) if field else None
        if field and typing.get_origin(field.annotation) is dict:
            next(parts, None)  # the key of a mapping of sections
    if section is None:
        return "Remove it."
    known = list(section.model_fields)
    close = difflib.get_close_matches(str(loc[-1]), known, n=1)
    return f"Did you mean {close[0]}?" if close else f"Known here: {', '.join(known)}."


def _inner(annotation: Any) -> Any:
    """The section behind `Section`, `Section | None` or `dict[str, Section]`."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
