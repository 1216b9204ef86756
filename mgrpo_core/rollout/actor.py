"""An agent made ready to act: its policy's client and template, and what it may call."""

from collections.abc import Mapping
from dataclasses import dataclass

from mgrpo_core.dialogue.actions import Menu
from mgrpo_core.dialogue.template import ChatTemplate, ChatTokenizer
from mgrpo_core.errors import ConfigError
from mgrpo_core.rollout.agents import AgentSpec, Team, tool_signatures
from mgrpo_core.rollout.protocols import PolicyClient, Tool


@dataclass(frozen=True, slots=True)
class Actor:
    """What a controller needs to play one agent. `max_depth` and up: bounds of the whole team."""

    spec: AgentSpec
    client: PolicyClient
    template: ChatTemplate
    menu: Menu
    tools: Mapping[str, Tool]
    max_depth: int


def actor_of(
    team: Team, name: str, clients: Mapping[str, PolicyClient], tokenizers: Mapping[str, ChatTokenizer]
) -> Actor:
    """The agent `name` of the team.

    Args:
        team: who there is.
        name: whom to make ready.
        clients: by policy.
        tokenizers: by policy; each agent speaks through its own policy's tokenizer.
    Raises: ConfigError if the agent's policy has no client or tokenizer, or two things it may call share a name;
        TemplateError if its policy's chat template cannot be used.
    """
    spec = team.agents[name]
    for what, given in (("client", clients), ("tokenizer", tokenizers)):
        if spec.policy not in given:
            raise ConfigError(
                f"agent {name}: no {what} for its policy {spec.policy!r}. Given: {', '.join(sorted(given)) or 'none'}."
            )
    return Actor(
        spec=spec,
        client=clients[spec.policy],
        template=ChatTemplate(tokenizers[spec.policy], team.signatures_of(name)),
        menu=Menu(tool_signatures(spec), spec.delegates),
        tools={tool.name: tool for tool in spec.tools},
        max_depth=team.max_depth,
    )
