"""From a config's agents to a team that can act: tools built, limits set, temperatures as they are used."""

from infra.tools.registry import build_tool
from mgrpo_core.config import RunConfig
from mgrpo_core.rollout.agents import AgentSpec, Limits, Team


def team_of(config: RunConfig, *, temperature: float | None = None) -> Team:
    """The team of a run.

    Args:
        config: a checked config.
        temperature: for every agent, in place of its own; 0 = greedy. None = each agent's own.

    Raises:
        ConfigError: a tool cannot be built.
    """
    agents = {
        name: AgentSpec(
            name=name,
            policy=agent.policy,
            system_prompt=agent.prompt,
            description=agent.description,
            tools=tuple(build_tool(tool) for tool in agent.tools),
            delegates=agent.delegates,
            limits=Limits(**agent.limits.model_dump()),
            temperature=agent.temperature if temperature is None else temperature,
        )
        for name, agent in config.agents.items()
    }
    return Team(config.main_agent, agents, config.rollout.max_depth, config.rollout.max_delegations)
