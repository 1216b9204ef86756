"""Servers that a test plays, in place of a real one, and how it asks them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from infra.serving.vllm.client import VllmPolicyClient
from infra.serving.vllm.probe import TEXT, Probe, probe_of
from mgrpo_core.rollout.protocols import Generation, Sampling
from tests.infra.serving.vllm.played_server import CONTEXT, GENERATE, PlayedServer

Clients = Callable[..., VllmPolicyClient]
PROMPT = np.array([5, 6, 7], dtype=np.int32)
QUICK = {"deadline_s": 0.6, "connect_timeout_s": 0.5}


@pytest.fixture(scope="session")
def text_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return tokenizer.encode(TEXT, add_special_tokens=False)


@pytest.fixture(scope="session")
def probe(folder: Path, text_ids: list[int]) -> Probe:
    return probe_of(folder, text_ids, CONTEXT)


@pytest.fixture
def servers(probe: Probe, text_ids: list[int]) -> Iterator[Callable[[], PlayedServer]]:
    made: list[PlayedServer] = []

    def server() -> PlayedServer:
        made.append(PlayedServer(probe, text_ids))
        return made[-1]

    yield server
    for one in made:
        one.stop()


@pytest.fixture
def server(servers: Callable[[], PlayedServer]) -> PlayedServer:
    return servers()


@pytest.fixture(scope="session")
def folder(versions: tuple[Path, Path]) -> Path:
    return versions[0]


async def ask(client: VllmPolicyClient, trajectory: str = "t", tokens: int = 8) -> Generation:
    return await client.generate(PROMPT, Sampling(0.7, tokens, 17, (2,)), trajectory_id=trajectory)


def spoiled(**changes: object) -> Callable[[str, object], object]:
    """Change fields of the only completion, but leave the probe (of one token) honest."""

    def spoil(route: str, answer: object) -> object:
        if route != GENERATE or len(answer["choices"][0]["token_ids"]) == 1:
            return answer
        return {"choices": [answer["choices"][0] | changes]}

    return spoil
