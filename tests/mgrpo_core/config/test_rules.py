"""Each broken config is refused with the field, the value and the fix."""

import copy

import pytest
from pydantic import ValidationError

from mgrpo_core.config import RunConfig

SOUND = {
    "agents": {
        "main": {"policy": "big", "prompt": "Plan.", "delegates": ["searcher"]},
        "searcher": {"policy": "small", "prompt": "Search.", "tools": ["search:geo_facts"], "judge": "facts:geo_facts"},
    },
    "policies": {"big": {"init": "a"}, "small": {"init": "b", "context": 512}},
    "data": {"train": "geo_facts:train"},
    "rollout": {"queries_per_iteration": 4},
}
SOUND["agents"]["searcher"]["limits"] = {"max_turn_tokens": 64}


def broken(path: str, value: object) -> dict:
    config = copy.deepcopy(SOUND)
    *parents, last = path.split(".")
    section = config
    for key in parents:
        section = section.setdefault(key, {})
    section[last] = value
    return config


def test_the_sound_config_is_accepted():
    config = RunConfig.model_validate(SOUND)
    assert config.sub_agents == ("searcher",)
    assert config.trained_policies == ("big", "small")
    assert config.reward_of("searcher").expert == 0.5


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("agents.main.delegates", ["serch"], r"agents\.main\.delegates: 'serch' is no agent. Name one of: searcher"),
        ("agents.searcher.delegates", ["main"], r"cycle main -> searcher -> main .*Remove 'searcher'"),
        ("agents.searcher.delegates", ["searcher"], r"cycle searcher -> searcher"),
        ("agents.main.delegates", [], r"agents\.searcher: nobody delegates to 'searcher'"),
        ("agents.main.policy", "bigg", r"agents\.main\.policy: 'bigg' is no policy. Name one of: big, small"),
        ("main_agent", "boss", r"main_agent: 'boss' is no agent. Name one of: main, searcher"),
        ("policies.small.store_as", "big", r"policies\.small\.store_as: 'big' is where policy 'big' is written"),
        ("rollout.rollouts_per_query", 1, r"rollouts_per_query: 1 gives groups of one .*Use 2 or more"),
        ("agents.searcher.d", 0, r"greater than or equal to 1"),
        ("agents.main.temperature", 0, r"agents\.main\.temperature: 0.* with rollouts_per_query 8 gives 8 equal"),
        ("update.optimizer_steps", 33, r"optimizer_steps: 33 minibatches cannot be filled from 32 rollouts"),
        ("update.micro_batch_tokens", 100, r"micro_batch_tokens: 100 is less than policies\.small\.context 512"),
        ("agents.searcher.limits.max_turn_tokens", 512, r"max_turn_tokens: 512 leaves no room"),
        ("agents.main.reward", {"format": 0.1}, r"agents\.main\.reward\.correct: missing"),
        ("agents.searcher.reward", {"format": 0.1, "expert": 0.9}, r"agents\.searcher\.reward\.main_correct: missing"),
        ("agents.main.reward", {"format": 0.1, "correct": 0.9, "expert": 0.1}, r"reward\.expert: 0\.1 is a part that"),
        ("agents.searcher.judge", None, r"agents\.searcher\.judge: missing, although reward\.expert is 0\.5"),
        ("policies.small.optimizer", {"schedule": "cosine"}, r"optimizer\.total_steps: missing"),
        ("policies.small.lora", {"target_modules": []}, r"small\.lora\.target_modules: \[\] names no module"),
        ("policies.small.lora", {"target_modules": ["q_proj", "q_proj"]}, r"names no module, or one twice"),
        ("policies.small.lora", {"target_modules": ["mlp.up_proj"]}, r"'mlp.up_proj' is not the name of one module"),
        ("policies.small.lora", {"target_modules": ["q_proj", "lm_head"]}, r"lm_head is outside the layers"),
        ("policies.small.lora", {"rank": 0}, r"greater than or equal to 1"),
        ("policies.small.lora", {"dropout": 0.1}, r"Extra inputs are not permitted"),
        ("loss.reduction", "constant", r"loss\.constant_length: missing"),
        ("agents.main.tools", ["lib.searcher:make"], r"'searcher' is both a tool and a delegate"),
        ("agents.Boss", {"policy": "big", "prompt": "x"}, r"agents\.Boss: the name 'Boss' is not usable"),
        ("rollot", {}, r"Extra inputs are not permitted"),
        ("seed", -1, r"greater than or equal to 0"),
    ],
)
def test_a_broken_config_names_the_field_the_value_and_the_fix(path, value, said):
    with pytest.raises(ValidationError, match=said):
        RunConfig.model_validate(broken(path, value))


def test_a_correction_of_the_samplers_own_logprobs_is_refused():
    config = broken("loss.correction", {"mode": "mask"})
    RunConfig.model_validate(config)
    config["update"] = {"old_logprobs": "sampler"}
    with pytest.raises(
        ValidationError, match=r"loss\.correction\.mode: mask corrects nothing.*Use old_logprobs: trainer"
    ):
        RunConfig.model_validate(config)


def test_hotter_than_a_server_samples_is_refused_where_there_is_one():
    config = broken("agents.main.temperature", 2.5)
    RunConfig.model_validate(config)
    config["policies"]["small"]["servers"] = ["http://a:1"]
    RunConfig.model_validate(config)
    config["policies"]["big"]["servers"] = ["local"]
    with pytest.raises(ValidationError, match=r"agents\.main\.temperature: 2\.5, but vLLM samples at 2 at most"):
        RunConfig.model_validate(config)


def test_an_evaluation_hotter_than_a_server_samples_is_refused_whichever_policy_it_serves():
    config = broken("evaluation.temperature", 2.5)
    RunConfig.model_validate(config)
    config["policies"]["small"]["servers"] = ["http://a:1"]
    with pytest.raises(
        ValidationError,
        match=r"evaluation\.temperature: 2\.5, but vLLM samples at 2 at most, and policies\.small has servers\.",
    ):
        RunConfig.model_validate(config)
    RunConfig.model_validate(config | {"evaluation": {"temperature": 2}})


def test_all_problems_are_told_at_once():
    config = broken("agents.main.policy", "nobody")
    config["agents"]["main"]["delegates"] = ["searcher", "nowhere"]
    with pytest.raises(ValidationError) as refused:
        RunConfig.model_validate(config)
    assert "'nobody'" in str(refused.value)
    assert "'nowhere'" in str(refused.value)


def test_nothing_trainable_is_refused():
    config = copy.deepcopy(SOUND)
    for agent in config["agents"].values():
        agent["trainable"] = False
    with pytest.raises(ValidationError, match="none is trainable"):
        RunConfig.model_validate(config)


def test_how_far_and_how_fast_are_no_lineage_but_what_is_learnt_is():
    base = RunConfig.model_validate(SOUND).lineage_sha256()
    for path, value in [
        ("iterations", 99),
        ("rollout.concurrency", 3),
        ("rollout.max_rewritten_share", 1),
        ("agents.main.concurrency", 7),
    ]:
        assert RunConfig.model_validate(broken(path, value)).lineage_sha256() == base
    for path, value in [
        ("seed", 1),
        ("agents.searcher.d", 4),
        ("policies.big.optimizer", {"lr": 1e-3}),
        ("policies.big.lora", {}),
    ]:
        assert RunConfig.model_validate(broken(path, value)).lineage_sha256() != base


def test_a_shared_policy_is_trained_by_both_agents_and_freezing_one_leaves_the_other():
    config = broken("agents.searcher.policy", "big")
    del config["policies"]["small"]
    shared = RunConfig.model_validate(config)
    assert shared.agents_of("big") == ("main", "searcher")
    config["agents"]["main"]["trainable"] = False
    assert RunConfig.model_validate(config).agents_of("big") == ("searcher",)
