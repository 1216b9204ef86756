import pytest

from flows.load_config import load_config, preset_names
from mgrpo_core.errors import ConfigError


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_is_a_sound_config(preset):
    load_config(preset)


def test_an_override_reaches_a_nested_setting_and_exponents_are_numbers():
    config = load_config("quickstart", ["policies.main.optimizer.lr=1e-3", "agents.main.trainable=false", "seed=2"])
    assert config.policies["main"].optimizer.lr == 1e-3
    assert config.trained_policies == ("sub",)
    assert config.seed == 2


@pytest.mark.parametrize(
    ("source", "overrides", "said"),
    [
        ("quikstart", [], r"'quikstart' is neither a preset \(.*quickstart.*\) nor a file"),
        ("missing.yaml", [], r"missing.yaml: cannot be read as a config file"),
        ("quickstart", ["loss.clip_lo=0.1"], r"loss.clip_lo: no such setting. Did you mean clip_low\?"),
        ("quickstart", ["agents.main.limts.max_turns=1"], r"agents.main.limts: no such setting. Did you mean limits\?"),
        (
            "quickstart",
            ["agents.main.limits.max_turns=0"],
            r"agents.main.limits.max_turns: 0 is refused. .* equal to 1",
        ),
        ("quickstart", ["seed"], r"--set seed: expected key=value"),
        ("quickstart", ["seed.deeper=1"], r"--set seed.deeper=1: seed is 0, which has no keys below it"),
        ("quickstart", ["agents.searcher.delegates=[main]"], r"cycle main -> searcher -> main"),
    ],
)
def test_a_wrong_source_or_override_is_refused_with_the_fix(source, overrides, said):
    with pytest.raises(ConfigError, match=said):
        load_config(source, overrides)


@pytest.mark.parametrize(
    ("text", "said"), [("a: [", "is not valid YAML"), ("- a", "expected a mapping"), ("", "NoneType")]
)
def test_a_malformed_file_is_refused(tmp_path, text, said):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_config(str(path))
