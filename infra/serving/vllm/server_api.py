"""One vLLM server's routes, as functions. What they raise says whether asking again can help."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from infra.serving.vllm.answers import ModelCard, SampledTokens, card_of, completion_of, field_of
from infra.serving.vllm.connections import Answer, Connections
from infra.serving.vllm.failures import NotThereError, ServerFailedError, ServerUnfitError
from mgrpo_core.rollout.protocols import Sampling

# What a status says about how the server was started.
_ADVICE = {
    401: "It wants an API key: set VLLM_API_KEY in the environment of this process, as in the server's.",
    403: "Start it with `mgrpo serve`, or with --enable-scale-out.",
    404: "Start it with `mgrpo serve`, or with VLLM_SERVER_DEV_MODE=1 and the policy's name as --served-model-name.",
}


API_KEY_VARIABLE = "VLLM_API_KEY"


def key_header() -> dict[str, str]:
    """What a server that wants a key is shown; {} where this process has none."""
    key = os.environ.get(API_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


class ServerApi:
    """Speaks to the server at `url` through a shared connection pool.

    Every function raises ServerDownError for a broken connection or a time-out, ServerFailedError for a 5xx, and
    ServerUnfitError for a 4xx and for an answer that makes no sense.
    """

    def __init__(self, http: Connections, url: str, policy: str) -> None:
        self._http = http
        self._url = url.rstrip("/")
        self._policy = policy

    @property
    def url(self) -> str:
        return self._url

    async def model_card(self) -> ModelCard:
        return card_of(await self._ask("GET", "/v1/models"), self._url)

    async def tokenize(self, text: str) -> list[int]:
        """Ids of a text, special tokens in it included, none added."""
        body = {"model": self._policy, "prompt": text, "add_special_tokens": False}
        return field_of(await self._ask("POST", "/tokenize", body), "tokens", list, self._url)

    async def weight_label(self) -> str:
        """What its weights were called when they were loaded; `default` where nobody has said."""
        return field_of(await self._ask("GET", "/weight_info"), "weight_version", str, self._url)

    async def set_weight_label(self, label: str) -> None:
        await self._ask("POST", "/update_weight_version", {"new_version": label})

    async def load_weights(self, folder: Path) -> None:
        """Replace the weights by those of a folder, which the server reads from its own disk."""
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        try:
            await self._ask("POST", "/collective_rpc", call)
        except ServerFailedError as error:
            raise ServerFailedError(
                f"{error} It was asked to load {folder}: a path that the server itself must be able to read, with the "
                "weights of the architecture that it was started with. See `serving.folder` of the policy."
            ) from error

    async def transfer_backend(self) -> str | None:
        """By what it takes new weights from a trainer's GPU, None where it was started without."""
        info = await self._ask("GET", "/server_info?config_format=json")
        config = field_of(info, "vllm_config", dict, self._url).get("weight_transfer_config")
        return None if config is None else field_of(config, "backend", str, self._url)

    async def world_size(self) -> int:
        """How many workers hold its weights, each a part or a copy."""
        return field_of(await self._ask("GET", "/get_world_size"), "world_size", int, self._url)

    async def pause(self) -> None:
        """Give up every request, and begin none until `resume`."""
        await self._send("POST", "/pause")

    async def resume(self) -> None:
        await self._send("POST", "/resume")

    async def transfer_step(self, route: str, body: object = None) -> None:
        """One step of vLLM's weight transfer, as its trainer side words it.

        Raises: ServerUnfitError for a 5xx, too: a step that failed leaves nothing to repeat it from.
        """
        try:
            await self._send("POST", f"/{route}", body)
        except ServerFailedError as error:
            raise ServerUnfitError(
                f"{error} A transfer by NCCL wants a GPU for the sender, and others for every server. A server that "
                "has begun one may hold half of a version, and its label says so: restart it."
            ) from error

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Have a LoRA adapter answer to a name of its own; the server reads it from its own disk, and computes with it.

        The folder is one in which no other adapter has been or will be.
        """
        body = {"lora_name": name, "lora_path": str(folder)}
        try:
            await self._send("POST", "/v1/load_lora_adapter", body)
        except ServerFailedError as error:
            raise ServerFailedError(
                f"{error} It was asked to load {folder}: a path that the server itself must be able to read, with an "
                "adapter of no higher rank than --max-lora-rank. See `serving.folder` of the policy."
            ) from error
        except ServerUnfitError as error:
            raise ServerUnfitError(
                f"{error} For adapters it needs --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."
            ) from error

    async def unload_adapter(self, name: str) -> None:
        """Have the server forget an adapter's name."""
        await self._send("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def forget_prefixes(self) -> None:
        """Drop every cached key and value: they were computed with other weights."""
        if not field_of(await self._ask("POST", "/reset_prefix_cache"), "success", bool, self._url):
            raise ServerFailedError(f"{self._url}: did not drop its prefix cache, because requests still hold it.")

    async def generate(self, prompt_ids: np.ndarray, sampling: Sampling, adapter: str | None = None) -> SampledTokens:
        """Sample one completion, with an adapter that was loaded under this name."""
        body = {
            "model": adapter or self._policy,
            "token_ids": prompt_ids.tolist(),
            "sampling_params": {
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "seed": sampling.seed,
                "stop_token_ids": list(sampling.stop_token_ids),
                # the stop tokens above are the only ones
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
                # the whole vocabulary, as the trainer's density has it, whatever the server's defaults are
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
            },
        }
        return completion_of(await self._ask("POST", "/inference/v1/generate", body), self._url)

    async def _ask(self, method: str, route: str, body: object = None) -> Any:
        response = await self._send(method, route, body)
        try:
            return response.json()
        except ValueError:
            where = f"{self._url}{route}"
            raise ServerUnfitError(f"{where}: the answer is no JSON ({response.text[:80]!r}). Is it vLLM?") from None

    async def _send(self, method: str, route: str, body: object = None) -> Answer:
        where = f"{self._url}{route}"
        response = await self._http.request(method, where, body)
        status = response.status
        if status >= 500:
            raise ServerFailedError(f"{where}: status {status}, {_told(response)}.")
        if status != 200:
            advice = _ADVICE.get(status, "The request is wrong for this server; it is not sent again.")
            error = NotThereError if status == 404 else ServerUnfitError
            raise error(f"{where}: status {status}, {_told(response)}. {advice}")
        return response


def _told(response: Answer) -> str:
    """The server's own words, cut."""
    try:
        said = response.json()
        said = said.get("error", said) if isinstance(said, dict) else said
        said = said.get("message", said) if isinstance(said, dict) else said
    except ValueError:
        said = response.text
    return str(said).strip().rstrip(".")[:300] or "without a word"
