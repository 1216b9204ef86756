"""The played server with a model behind it: samples, reloads and says its log-probs as vLLM does, at small sizes."""

import threading
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from infra.serving.vllm.probe import TEXT, probe_of
from infra.training.load_policy import load_model, load_tokenizer
from tests.infra.serving.vllm.played_server import PlayedServer


class ModelServer(PlayedServer):
    """Policy `name` from the weights in `folder`.

    A thread of its own answers each request; it can be stopped and started again as a server that restarts: with the
    weights of the beginning and no label.
    """

    def __init__(self, folder: Path, name: str, context: int) -> None:
        self._folder = folder
        self._model: PreTrainedModel = load_model(folder, torch.float32)
        self._lock = threading.Lock()
        text_ids = load_tokenizer(folder).encode(TEXT, add_special_tokens=False)
        super().__init__(probe_of(folder, text_ids, context), text_ids)
        self.name = name
        self.context = context

    def restart(self) -> None:
        """Come back as a process that was killed does."""
        self.label = "default"
        self._model = load_model(self._folder, torch.float32)
        self.start()

    def _honest(self, route: str, body: Any) -> Any:
        if route == "/collective_rpc":
            self._model = load_model(Path(body["kwargs"]["weights_path"]), torch.float32)
        return super()._honest(route, body)

    def _completion(self, body: Any) -> Any:
        ids, wanted = list(body["token_ids"]), body["sampling_params"]
        model, label = self._model, self.label
        rng = torch.Generator().manual_seed(wanted["seed"] % 2**63)
        content: list[dict[str, Any]] = []
        reason = "length"
        for _ in range(wanted["max_tokens"]):
            with torch.inference_mode(), self._lock:
                logits_V = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            logprobs_V = torch.log_softmax(logits_V / (wanted["temperature"] or 1.0), dim=-1)
            greedy = wanted["temperature"] == 0
            drawn = logprobs_V.argmax() if greedy else torch.multinomial(logprobs_V.exp(), 1, generator=rng)[0]
            content.append({"token_id": int(drawn), "logprob": float(logprobs_V[drawn])})
            ids.append(int(drawn))
            if ids[-1] in wanted["stop_token_ids"]:
                reason = "stop"
                break
        choice = {
            "finish_reason": reason,
            "token_ids": [one["token_id"] for one in content],
            "logprobs": {"content": content},
            "weight_versions": [{"version": label, "start": 0, "end": len(content)}],
        }
        return {"choices": [choice]}
