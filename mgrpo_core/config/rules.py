"""Rules between the sections of a config. Each problem names the field, the value, and the fix."""

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from mgrpo_core.config.policies import LOCAL_SERVER, PolicyConfig
from mgrpo_core.config.secrets import credentials_in

if TYPE_CHECKING:
    from mgrpo_core.config.run import RunConfig

_CREDENTIAL = re.compile(r"KEY|SECRET|TOKEN$|TOKEN_|PASSWORD|PASSWD|CREDENTIAL|AUTH", re.IGNORECASE)
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OUTSIDE_LAYERS = ("lm_head", "embed_tokens", "embed_out", "wte")
# vLLM answers 400 beyond, at every turn.
_HOTTEST_SERVED = 2.0
_POOL = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")

# Names become file names, flow-run names, metric names and tool names: one alphabet that is legal in all of them.
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")


def problems_of(config: "RunConfig") -> list[str]:
    """Every broken rule, as a sentence; empty when the config is sound."""
    if secrets := list(_credentials(config)):  # alone: other messages repeat what they refuse
        return secrets
    found = [*_names(config), *_references(config)]
    if found:  # the rules below follow references
        return found
    return [
        *_hierarchy(config),
        *_rewards(config),
        *_policies(config),
        *_adapters(config),
        *_servers(config),
        *_batches(config),
        *_correction(config),
        *_pools(config),
    ]


def _credentials(config: "RunConfig") -> Iterator[str]:
    for place, kind in credentials_in(config.model_dump(mode="json")):
        yield (
            f"{place}: holds credentials ({kind}), and a config is stored, shown and exported. Leave them out; give "
            "them in the environment of whoever needs them (VLLM_API_KEY for a policy's servers), or as its role."
        )


def _known(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _names(config: "RunConfig") -> Iterator[str]:
    for section, names in (("agents", config.agents), ("policies", config.policies)):
        for name in names:
            if not _NAME.fullmatch(name):
                yield (
                    f"{section}.{name}: the name {name!r} is not usable as a file, metric and tool name. "
                    "Use a lowercase letter, then up to 31 of a-z, 0-9, _ and -."
                )


def _references(config: "RunConfig") -> Iterator[str]:
    if config.main_agent not in config.agents:
        yield (
            f"main_agent: {config.main_agent!r} is no agent. Name one of: {_known(config.agents)}; or add it to agents."
        )
    for name, agent in config.agents.items():
        if agent.policy not in config.policies:
            yield (
                f"agents.{name}.policy: {agent.policy!r} is no policy. "
                f"Name one of: {_known(config.policies)}; or add it to policies."
            )
        for delegate in agent.delegates:
            if delegate not in config.agents:
                yield (
                    f"agents.{name}.delegates: {delegate!r} is no agent. "
                    f"Name one of: {_known(config.agents.keys() - {name})}; or add it to agents."
                )
        if len(set(agent.delegates)) != len(agent.delegates):
            yield f"agents.{name}.delegates: {list(agent.delegates)} names an agent twice. Name each once."


def _hierarchy(config: "RunConfig") -> Iterator[str]:
    cycle = _cycle(config)
    if cycle:
        yield (
            f"agents.{cycle[0]}.delegates: the delegation cycle {' -> '.join(cycle)} would never end. "
            f"Remove {cycle[1]!r} from the delegates of {cycle[0]!r}, or another link of the cycle."
        )
        return
    reached = {config.main_agent}
    frontier = [config.main_agent]
    while frontier:
        new = set(config.agents[frontier.pop()].delegates) - reached
        reached |= new
        frontier.extend(new)
    for name in config.agents:
        if name not in reached:
            yield (
                f"agents.{name}: nobody delegates to {name!r}, so it would never act. "
                f"Add it to the delegates of an agent ({_known(reached)}), or remove it."
            )
    for name, agent in config.agents.items():
        called = {tool.split(":")[0].rsplit(".", 1)[-1] for tool in agent.tools}
        for clash in sorted(called & set(agent.delegates)):
            yield (
                f"agents.{name}: {clash!r} is both a tool and a delegate, and a call names only one. Rename the agent."
            )


def _cycle(config: "RunConfig") -> list[str]:
    """A delegation cycle as [a, b, …, a], or []."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for delegate in config.agents[name].delegates:
            found = walk(delegate, [*path, name])
            if found:
                return found
        done.add(name)
        return []

    for name in config.agents:
        found = walk(name, [])
        if found:
            return found
    return []


def _rewards(config: "RunConfig") -> Iterator[str]:
    for name, agent in config.agents.items():
        is_main = name == config.main_agent
        wanted = ("correct",) if is_main else ("main_correct", "expert")
        foreign = ("main_correct", "expert") if is_main else ("correct",)
        role = "the main agent" if is_main else "a sub-agent"
        reward = config.reward_of(name)
        for part in wanted:
            if getattr(reward, part) is None:
                yield (
                    f"agents.{name}.reward.{part}: missing. {role} is rewarded for format, {' and '.join(wanted)}; "
                    "give a weight, 0 to switch the part off."
                )
        for part in foreign:
            if getattr(reward, part) is not None:
                value = getattr(reward, part)
                yield f"agents.{name}.reward.{part}: {value} is a part that {role} does not have. Remove it."
        if not is_main and reward.expert and agent.judge is None:
            yield (
                f"agents.{name}.judge: missing, although reward.expert is {reward.expert}. "
                "Name a judge, or set reward.expert to 0."
            )


def _policies(config: "RunConfig") -> Iterator[str]:
    used = {agent.policy for agent in config.agents.values()}
    places: dict[str, str] = {}
    for name, policy in config.policies.items():
        if name not in used:
            yield f"policies.{name}: no agent acts with it. Remove it, or give it to an agent."
        folder = config.store_folder_of(name)
        if not _NAME.fullmatch(folder):
            yield f"policies.{name}.store_as: {folder!r} is no folder name. Use a-z, 0-9, _ and -."
        if folder in places:
            yield (
                f"policies.{name}.store_as: {folder!r} is where policy {places[folder]!r} is written, "
                "and two policies in one place would overwrite each other. Give each a folder of its own."
            )
        places.setdefault(folder, name)
        optimizer = policy.optimizer
        if optimizer.schedule != "constant":
            if optimizer.total_steps is None:
                yield (
                    f"policies.{name}.optimizer.total_steps: missing. The {optimizer.schedule} schedule ends there; "
                    "give the number of optimiser steps."
                )
            elif optimizer.total_steps <= optimizer.warmup_steps:
                yield (
                    f"policies.{name}.optimizer.total_steps: {optimizer.total_steps} is not above warmup_steps "
                    f"{optimizer.warmup_steps}. Raise it."
                )


def _adapters(config: "RunConfig") -> Iterator[str]:
    for name, policy in config.policies.items():
        if policy.lora is None:
            continue
        modules = policy.lora.target_modules
        if not modules or len(set(modules)) < len(modules):
            yield (
                f"policies.{name}.lora.target_modules: {list(modules)} names no module, or one twice. Name linear maps "
                "of the layers, each once: q_proj, v_proj."
            )
        for module in modules:
            if not _MODULE.fullmatch(module):
                yield (
                    f"policies.{name}.lora.target_modules: {module!r} is not the name of one module. Give the last "
                    "part alone, without dots and patterns: q_proj."
                )
            elif module in _OUTSIDE_LAYERS:
                yield (
                    f"policies.{name}.lora.target_modules: {module} is outside the layers, and log-probs and servers "
                    "take embeddings and head as they are. Remove it, or train all weights (lora: null)."
                )


def _servers(config: "RunConfig") -> Iterator[str]:
    owner: dict[str, str] = {}
    for name, policy in config.policies.items():
        for url in policy.servers:
            if url == LOCAL_SERVER:
                continue
            if problem := _problem_of_url(url):
                yield f"policies.{name}.servers: {problem}"
            elif (place := url.rstrip("/")) in owner:
                yield (
                    f"policies.{name}.servers: {url} is a server of policy {owner[place]!r} already, and one server "
                    "holds one policy's weights. Name each server once."
                )
            else:
                owner[place] = name
        serving = policy.serving
        if serving.connect_timeout_s > serving.deadline_s:
            yield (
                f"policies.{name}.serving.connect_timeout_s: {serving.connect_timeout_s:g} is above deadline_s "
                f"{serving.deadline_s:g}, so a server that is down would never be asked twice. Lower it."
            )
        if serving.transfer == "nccl" and (problem := _problem_of_nccl(policy)):
            yield f"policies.{name}.serving.transfer: nccl {problem}"

    for place, policy, temperature in _sampled_at(config):
        if config.policies[policy].servers and temperature > _HOTTEST_SERVED:
            yield (
                f"{place}: {temperature:g}, but vLLM samples at {_HOTTEST_SERVED:g} at most, "
                f"and policies.{policy} has servers. Lower it, or sample in this process (no servers)."
            )


def _problem_of_nccl(policy: PolicyConfig) -> str | None:
    if policy.lora is not None:
        return (
            "sends all weights, and this policy trains an adapter (lora), which is megabytes and goes by folder. "
            "Use transfer: folder, or train all weights (lora: null)."
        )
    if LOCAL_SERVER in policy.servers:
        return (
            f"needs a GPU for the sender that no server uses, and a server that mgrpo starts (`{LOCAL_SERVER}`) takes "
            "this machine's first, and reads its disk. Use transfer: folder, or start it with `mgrpo serve` and give "
            "its URL."
        )
    if policy.serving.folder is not None:
        return f"and serving.folder {policy.serving.folder!r}: servers read no folder then. Remove one of the two."
    return None


def _sampled_at(config: "RunConfig") -> Iterator[tuple[str, str, float]]:
    """Field, policy and temperature of all that is sampled: an evaluation sets every agent's temperature."""
    for name, agent in config.agents.items():
        yield f"agents.{name}.temperature", agent.policy, agent.temperature
    for policy in config.policies:
        yield "evaluation.temperature", policy, config.evaluation.temperature


def _problem_of_url(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        port_is_legal = parts.port is None or parts.port > 0
    except ValueError:
        return f"{url!r} is no URL. Give http://host:port, or `{LOCAL_SERVER}` for a server that mgrpo starts."
    if parts.username is not None or parts.password is not None:  # not repeated: messages are logged
        return "a URL holds credentials, and a config is stored and shown. Give the key as VLLM_API_KEY."
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_legal:
        return f"{url!r} is no server's URL. Give http://host:port, or `{LOCAL_SERVER}` for a server that mgrpo starts."
    if parts.path.rstrip("/") or parts.query or parts.fragment:
        return (
            f"{url!r} names a page of the server. Give http://host:port alone; the routes, /v1 included, are mgrpo's."
        )
    return None


def _batches(config: "RunConfig") -> Iterator[str]:
    rollout, update = config.rollout, config.update
    k = rollout.rollouts_per_query
    trained = [name for name, agent in config.agents.items() if agent.trainable]
    if not trained:
        yield "agents: none is trainable, so there is nothing to learn. Set trainable: true for one, or use evaluate."
    if k == 1 and trained:
        yield (
            "rollout.rollouts_per_query: 1 gives groups of one main trajectory, whose advantage is always 0. "
            "Use 2 or more (8 in the paper)."
        )
    for name in trained:
        temperature = config.agents[name].temperature
        if temperature == 0 and k > 1:
            yield (
                f"agents.{name}.temperature: 0 with rollouts_per_query {k} gives {k} equal rollouts and no signal. "
                "Use a temperature above 0 (1.0), or trainable: false."
            )
    rollouts = rollout.queries_per_iteration * k
    if update.optimizer_steps > rollouts:
        yield (
            f"update.optimizer_steps: {update.optimizer_steps} minibatches cannot be filled from {rollouts} rollouts "
            f"({rollout.queries_per_iteration} queries x {k}). Use at most {rollouts}."
        )
    for name in config.trained_policies:
        context = config.policies[name].context
        if context is not None and update.micro_batch_tokens < context:
            yield (
                f"update.micro_batch_tokens: {update.micro_batch_tokens} is less than policies.{name}.context "
                f"{context}, so its longest trajectory would fit no micro-batch. Use at least {context}."
            )
    for name, agent in config.agents.items():
        context = config.policies[agent.policy].context
        if context is not None and agent.limits.max_turn_tokens >= context:
            yield (
                f"agents.{name}.limits.max_turn_tokens: {agent.limits.max_turn_tokens} leaves no room for a prompt in "
                f"policies.{agent.policy}.context {context}. Lower it, or raise the context."
            )


def _correction(config: "RunConfig") -> Iterator[str]:
    mode = config.loss.correction.mode
    if mode != "none" and config.update.old_logprobs == "sampler":
        yield (
            f"loss.correction.mode: {mode} corrects nothing with update.old_logprobs: sampler, whose ratio holds the "
            "gap to the sampler already. Use old_logprobs: trainer, or mode: none."
        )
    staleness = config.rollout.max_staleness
    if staleness and mode == "none" and config.update.old_logprobs == "trainer":
        yield (
            f"rollout.max_staleness: {staleness} trains on what older weights sampled, and nothing corrects for it. "
            "Set loss.correction.mode: truncate (or mask), or max_staleness: 0."
        )


def _pools(config: "RunConfig") -> Iterator[str]:
    execution = config.execution
    for field in ("update_pools", "update_processes", "update_env"):
        for policy in getattr(execution, field):
            if policy not in config.policies:
                yield (
                    f"execution.{field}.{policy}: is no policy. Name one of: {_known(config.policies)}; or remove it."
                )
    for policy, count in execution.update_processes.items():
        if count < 1:
            yield f"execution.update_processes.{policy}: {count} processes update nothing. Use 1 or more."
        elif count > 1 and execution.mode == "embedded":
            yield (
                f"execution.update_processes.{policy}: {count} processes need execution.mode: work_pools. "
                "Set it, or use 1."
            )
    for policy, env in execution.update_env.items():
        for name in env:
            if _CREDENTIAL.search(name):
                yield (
                    f"execution.update_env.{policy}.{name}: looks like a credential, and a config is stored and shown. "
                    "Set it in the environment of the worker, or give the worker a role."
                )
    for place, pool in (("iteration_pool", execution.iteration_pool), *execution.update_pools.items()):
        if not _POOL.fullmatch(pool):
            yield f"execution: {place} {pool!r} is no name for a work pool. Use a-z, 0-9, _ and -."
