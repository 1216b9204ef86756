"""A credential anywhere in a config is refused at load, and never repeated: messages are logged."""

import copy

import pytest
from pydantic import ValidationError

from mgrpo_core.config import RunConfig
from mgrpo_core.config.secrets import credentials_in
from tests.mgrpo_core.config.test_rules import SOUND, broken

SECRETS = (
    "https://user:hunter2@tracker.example.org/",
    "postgresql://mlflow:hunter2@db/mlflow",
    "https://data.example.org/questions.jsonl?X-Amz-Signature=0a1b2c3d4e5f",
    "https://data.example.org/questions.jsonl?a=1&api_key=0a1b2c3d",
    "my.tools:search?api_key=0a1b2c3d4e",
    "AKIAIOSFODNN7EXAMPLE",
    "Say this to the service: Bearer 0123456789abcdef0123",
    "sk-proj-0123456789abcdefghijkl",
    "hf_0123456789abcdefghijklmn",
    "ghp_0123456789abcdefghijklmnop",
    "password: hunter2hunter2",
    "-----BEGIN RSA PRIVATE KEY-----",
)
PLACES = (
    "tracking.mlflow_uri",
    "data.train",
    "agents.main.prompt",
    "agents.searcher.judge",
    "policies.big.init",
    "execution.update_env.big.EXTRA",
)


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("place", PLACES)
def test_a_credential_is_refused_with_its_place_and_is_not_repeated(place, secret):
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate(broken(place, secret))
    (error,) = caught.value.errors(include_input=False)
    assert error["msg"].startswith(f"Value error, {place}: holds credentials (")
    assert "VLLM_API_KEY" in error["msg"]
    for part in ("hunter2", "0a1b2c3d", "0123456789", "AKIA"):
        assert part not in error["msg"]


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/questions@2026.jsonl",
        "Find the password of the vault: ask the keeper.",
        "Write to me@example.org: a token is a word, a secret is kept.",
        "sqlite:///mgrpo-store/mlflow.db",
        "http://127.0.0.1:5000",
        "Answer like this: <answer>key=value</answer>. Secret: nothing.",
        "https://data.example.org/questions.jsonl?version=3",
    ],
)
def test_what_only_speaks_of_secrets_is_accepted(text):
    config = copy.deepcopy(SOUND)
    config["agents"]["main"]["prompt"] = text
    assert RunConfig.model_validate(config).agents["main"].prompt == text


def test_every_place_is_named():
    raw = {"a": ["x", {"b": "hf_0123456789abcdefghijklmn"}], "c": 1, "d": None, "e": "http://u:p@h"}
    assert [place for place, _ in credentials_in(raw)] == ["a[1].b", "e"]
