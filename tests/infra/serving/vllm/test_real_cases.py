"""Cases C and I against a real vLLM server, where the fault would be the server's. Skipped without `make vllm`."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from infra.serving.vllm.client import VllmPolicyClient
from infra.serving.vllm.connections import Answer, Connections
from infra.serving.vllm.failures import ServerUnfitError
from infra.serving.vllm.server_api import ServerApi
from infra.serving.vllm.server_process import ServerProcess
from infra.training.load_policy import load_model, load_tokenizer
from mgrpo_core.dialogue.template import ChatTemplate
from mgrpo_core.dialogue.transcript import TokenStream, Transcript
from mgrpo_core.errors import ShapeError
from mgrpo_core.rollout.protocols import Sampling
from tests.infra.serving.vllm.played_server import CONTEXT

Clients = Callable[..., VllmPolicyClient]
Versions = tuple[Path, Path]

pytestmark = pytest.mark.timeout(600)
TOLERANCE = 1e-4  # of the probe, in float32
HOT = 2.0  # the most that vLLM takes; cooler, this policy says what it has learned, in the ids that its text encodes to


async def dialogue(client: VllmPolicyClient, template: ChatTemplate, seed: int) -> tuple[TokenStream, list[np.ndarray]]:
    """Three turns with replies between them; the stream and what was sampled."""
    transcript = Transcript(template, system="Look things up.", user="Which is the capital of Peru?")
    said = []
    for turn in range(3):
        sampling = Sampling(HOT, 24, seed * 10 + turn, template.stop_token_ids)
        made = await client.generate(transcript.context_ids, sampling, trajectory_id=f"t{seed}")
        transcript.sampled(made.token_ids, made.logprobs, made.finish_reason)
        said.append(made.token_ids)
        if turn < 2:
            transcript.observe("Lima is one.", max_tokens=40, context_length=CONTEXT, reply_tokens=24)
    return transcript.stream(), said


def largest_gap(folder: Path, stream: TokenStream, temperature: float) -> float:
    """Between the stream's log-probs and the trainer's, which sees every segment as the context it was."""
    model = load_model(folder, torch.float32)
    gaps = []
    for start, stop in zip(stream.segment_starts, [*stream.segment_starts[1:], len(stream.token_ids)], strict=True):
        ids = torch.from_numpy(stream.token_ids[start:stop]).long()
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0] / temperature, dim=-1)
        own = logprobs[:-1].gather(1, ids[1:, None])[:, 0].numpy()
        mask = stream.loss_mask[start:stop][1:]
        gaps.append(np.abs(own - stream.logprobs[start:stop][1:])[mask])
    return float(np.concatenate(gaps).max())


async def test_c1_what_was_sampled_is_what_is_sent_back_and_trained_though_its_text_encodes_otherwise(
    server: ServerProcess, client_of: Clients, versions: Versions, tokenizer: PreTrainedTokenizerBase
) -> None:
    client = client_of(server.url)
    client.load(0, versions[0])
    template = ChatTemplate(tokenizer)
    differs = 0
    for seed in range(8):
        stream, said = await dialogue(client, template, seed)
        assert stream.segment_starts == (0,)
        assert len(stream.token_ids) == len(stream.logprobs) == len(stream.loss_mask)
        np.testing.assert_array_equal(stream.token_ids[stream.loss_mask], np.concatenate(said))
        assert largest_gap(versions[0], stream, HOT) < TOLERANCE
        text = [tokenizer.decode(one) for one in said]
        differs += sum(
            tokenizer.encode(t, add_special_tokens=False) != one.tolist() for t, one in zip(text, said, strict=True)
        )
    assert differs > 0, "the sampled ids were all what their text encodes to: nothing was shown"


async def test_c2_a_template_that_forgets_is_trained_in_the_contexts_that_the_server_saw(
    server: ServerProcess, client_of: Clients, versions: Versions
) -> None:
    forgetful = load_tokenizer(versions[0])
    said = "{{ message['content'] }}"
    assert said in forgetful.chat_template
    forgetful.chat_template = forgetful.chat_template.replace(
        said, "{% if message['role'] == 'assistant' %}{{ message['content'][-20:] }}{% else %}" + said + "{% endif %}"
    )
    client = client_of(server.url)
    client.load(0, versions[0])
    stream, sampled = await dialogue(client, ChatTemplate(forgetful), seed=1)
    assert len(stream.segment_starts) >= 2  # a turn of 20 characters or less is not cut
    np.testing.assert_array_equal(stream.token_ids[stream.loss_mask], np.concatenate(sampled))
    assert largest_gap(versions[0], stream, HOT) < TOLERANCE
    # the same tokens as one stream: old reasoning would be trained in a context that never held it
    glued = TokenStream(stream.token_ids, stream.loss_mask, stream.logprobs, (0,))
    assert largest_gap(versions[0], glued, HOT) > 100 * TOLERANCE


async def test_c7_a_prompt_that_fills_the_context_is_computed_whole_and_i4_one_that_exceeds_it_is_never_sent(
    server: ServerProcess, client_of: Clients, versions: Versions
) -> None:
    client = client_of(server.url)
    client.load(0, versions[0])
    prompt = np.random.default_rng(1).integers(10, 2900, CONTEXT - 8).astype(np.int32)
    made = await client.generate(prompt, Sampling(1.0, 8, 1), trajectory_id="t")
    ids = np.concatenate([prompt, made.token_ids])
    mask = np.arange(len(ids)) >= len(prompt)
    logprobs = np.concatenate([np.full(len(prompt), np.nan, np.float32), made.logprobs])
    assert largest_gap(versions[0], TokenStream(ids, mask, logprobs, (0,)), 1.0) < TOLERANCE
    with pytest.raises(ShapeError, match="Ask for at most 8 tokens"):
        await client.generate(prompt, Sampling(1.0, 9, 1), trajectory_id="t")


class CountedConnections(Connections):
    """Knows how many requests there were."""

    count = 0

    async def request(self, method: str, url: str, body: object = None) -> Answer:
        self.count += 1
        return await super().request(method, url, body)


@pytest.mark.parametrize("beyond", [0, 1, 54])
async def test_i4_a_server_that_is_asked_beyond_its_context_says_400_which_is_not_asked_again(
    server: ServerProcess, versions: Versions, beyond: int
) -> None:
    prompt = np.random.default_rng(1).integers(10, 2900, CONTEXT + beyond).astype(np.int32)
    async with CountedConnections({}) as http:
        with pytest.raises(ServerUnfitError, match=r"status 400, .*384"):
            await ServerApi(http, server.url, "main").generate(prompt, Sampling(1.0, 8, 1))
    assert http.count == 1
    assert server.exit_code is None
