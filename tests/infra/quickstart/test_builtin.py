"""What is shipped: loads, speaks the chat format, and carries no facts."""

import asyncio
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from flows.load_config import load_config
from infra.datasets.geo_facts import questions
from infra.quickstart.builtin import builtin_policy
from infra.quickstart.demonstrations import real_names
from infra.serving.embedded import EmbeddedPolicyClient
from infra.team import team_of
from infra.training.load_policy import load_policy, load_tokenizer
from mgrpo_core.errors import ConfigError
from mgrpo_core.rewards.verifiers import exact_match
from mgrpo_core.rollout.stages import RolloutPlan, RolloutStages
from mgrpo_core.trajectories import Query, Rollout, Status

ROLES = ("main", "sub")
MEBIBYTE = 1 << 20


def _folder(role: str) -> Path:
    return builtin_policy(f"builtin:quickstart/{role}")


_TOKENIZERS = {role: load_tokenizer(_folder(role)) for role in ROLES}


@pytest.fixture(scope="module")
def shipped() -> dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]]:
    return {role: load_policy(_folder(role), torch.float32) for role in ROLES}


@pytest.mark.parametrize("name", ["builtin:quickstart/other", "quickstart/main", "builtin:quickstart/", "main"])
def test_a_name_that_is_not_shipped_is_refused_with_the_names_that_are(name: str) -> None:
    with pytest.raises(ConfigError, match=r"builtin:quickstart/main, builtin:quickstart/sub"):
        builtin_policy(name)


@pytest.mark.parametrize("role", ROLES)
def test_the_shipped_policy_is_small_and_of_a_shape_that_servers_take(
    role: str, shipped: dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]]
) -> None:
    config = shipped[role][0].config
    assert config.head_dim in (32, 64)  # 16 kills vLLM at the first request
    assert config.max_position_embeddings >= load_config("quickstart").policies[role].context
    assert sum(file.stat().st_size for file in _folder(role).iterdir()) < 4 * MEBIBYTE


def test_the_two_policies_share_neither_weights_nor_tokenizer(
    shipped: dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]],
) -> None:
    (_, main), (_, sub) = shipped["main"], shipped["sub"]
    assert main.get_vocab() != sub.get_vocab()
    ids = [tokenizer.encode("currency of Peru", add_special_tokens=False) for tokenizer in (main, sub)]
    assert ids[0] != ids[1]


@pytest.mark.parametrize("role", ROLES)
def test_a_name_inside_a_text_is_about_one_token(role: str) -> None:
    tokenizer = load_tokenizer(_folder(role))
    names = real_names()
    lengths = [len(tokenizer.encode(f" {name}", add_special_tokens=False)) for name in names.countries]
    words = [len(name.split()) for name in names.countries]
    # Names of several words take one token a word; a byte-level tokenizer without merges would take 5 a word.
    assert sum(lengths) < 1.5 * sum(words)


@given(text=st.text(max_size=40))
def test_any_text_survives_the_tokenizers(text: str) -> None:
    for role in ROLES:
        tokenizer = _TOKENIZERS[role]
        ids = tokenizer.encode(f" {text}", add_special_tokens=False)
        assert tokenizer.decode(ids) == f" {text}"


def test_the_shipped_pair_speaks_the_format_and_has_nearly_everything_to_learn() -> None:
    rollouts = _rolled_out(questions("train")[:32], temperature=1.0)
    everyone = [one for rollout in rollouts for one in rollout.trajectories]
    valid = sum(one.status is Status.OK and one.reply is not None for one in everyone)
    assert valid / len(everyone) > 0.95
    delegated = sum(len(rollout.trajectories) > 1 for rollout in rollouts) / len(rollouts)
    assert 0.2 < delegated < 0.95  # a choice among habits that the policy makes either way
    asked = {query.query_id: query for query in questions("train")[:32]}
    right = sum(
        exact_match(rollout.trajectories[0].reply or "", asked[rollout.query_id]) == 1.0 for rollout in rollouts
    )
    assert right / len(rollouts) < 0.2


def _rolled_out(asked: tuple[Query, ...], *, temperature: float) -> list[Rollout]:
    config = load_config("quickstart")
    clients = {role: EmbeddedPolicyClient(role, config.policies[role].context or 384, threads=1) for role in ROLES}
    made: list[Rollout] = []

    async def keep(query: Query, rollouts: tuple[Rollout, ...]) -> None:
        made.extend(rollouts)

    try:
        for role, client in clients.items():
            client.load(0, _folder(role))
        stages = RolloutStages(
            team_of(config, temperature=temperature),
            RolloutPlan("shipped", 0, 0, rollouts_per_query=4),
            clients=clients,
            tokenizers=_TOKENIZERS,  # type: ignore[arg-type]
        )
        asyncio.run(stages.run(asked, keep))
    finally:
        for client in clients.values():
            client.close()
    return made
