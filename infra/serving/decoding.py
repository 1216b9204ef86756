"""Continuous batching of one policy: rows join and leave between steps, and a step is one forward pass for all.

A row is a stream of known tokens (prompt, then what was sampled) of which the first `filled` have their keys and values
in the cache. A step feeds each row what is known but not filled: one token where it decodes, the rest of the prompt
where it starts. A row that is fed its last known token samples the next one. Prefill and decoding are thus the same
operation, packed without padding into one sequence; only attention knows rows apart (`slot_cache.py`).

A row that ends leaves its keys behind. The next request takes them over from any row that begins with the same
tokens: its own trajectory's former turn (in place), another rollout of the query, or at least the common system prompt
(copied). Equal prompts that arrive together wait one step for the first of them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from infra.serving.sampling import draw_tokens, uniforms_of
from infra.serving.slot_cache import ATTENTION, SlotCache
from mgrpo_core.rollout.protocols import Sampling
from mgrpo_core.trajectories import FinishReason

# Most tokens of one forward pass: bounds its memory and how long a decoding row waits for another's prompt.
TOKENS_PER_STEP = 4096
# A copy of fewer shared tokens than this is not worth waiting a step for.
_WORTH_WAITING = 16


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One completion to sample; compared by identity."""

    prompt_ids: np.ndarray
    sampling: Sampling
    trajectory_id: str


@dataclass(frozen=True, slots=True)
class Completion:
    """What a row sampled; `finish_reason` None where its logits were not finite and nothing may be used."""

    request: Request
    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason | None


def probe(model: PreTrainedModel) -> None:
    """Run two tokens through a model with slots for attention: what cannot run here fails before it serves."""
    model.set_attn_implementation(ATTENTION)
    cache = SlotCache(model.config.get_text_config(), slots=1, positions=2, dtype=model.dtype)
    position = torch.arange(2)[None]
    model(
        input_ids=torch.zeros_like(position),
        position_ids=position,
        use_cache=False,
        logits_to_keep=torch.tensor([1]),
        slot_pass=cache.plan(np.array([0]), np.array([0]), np.array([2])),
    )


class Decoder:
    """The rows of one policy at one version. Not thread-safe; the owner serialises calls.

    Args:
        model: from `load_model`; its attention is switched to the slots of this decoder.
        context_length: most tokens of prompt plus completion.
        slots: most rows at once, idle ones that keep a prefix included.
        memory: a cache of the same shape to write over; None = a new one.
    """

    def __init__(
        self, model: PreTrainedModel, context_length: int, slots: int, memory: SlotCache | None = None
    ) -> None:
        model.set_attn_implementation(ATTENTION)
        self._model = model
        self._context = context_length
        self._cache = memory or SlotCache(model.config.get_text_config(), slots, context_length, model.dtype)
        self._requests: list[Request | None] = [None] * slots
        self._slot_of: dict[str, int] = {}
        self._owner: list[str | None] = [None] * slots
        self._active = np.zeros(slots, dtype=bool)
        self._ids = np.zeros((slots, context_length), dtype=np.int32)
        self._logprobs = np.zeros((slots, context_length), dtype=np.float32)
        self._uniforms = np.zeros((slots, context_length), dtype=np.float64)
        self._known = np.zeros(slots, dtype=np.int64)
        self._filled = np.zeros(slots, dtype=np.int64)
        self._limit = np.zeros(slots, dtype=np.int64)
        self._temperature = np.zeros(slots, dtype=np.float32)
        self._stops = np.full((slots, 1), -1, dtype=np.int64)
        self._left_at = np.zeros(slots, dtype=np.int64)
        self._clock = 0
        self._top = 0  # slots from here on have never been used

    @property
    def active(self) -> int:
        """Rows that still sample."""
        return int(self._active.sum())

    @property
    def slots(self) -> int:
        return len(self._requests)

    def emptied(self) -> "Decoder":
        """A decoder over the same weights that has seen nothing."""
        return Decoder(self._model, self._context, self.slots)

    def successor(self, model: PreTrainedModel) -> "Decoder":
        """A decoder over other weights that has seen nothing, in this one's memory; this one is not to be used again.

        Memory that was written before needs no page from the system: a tenth of a short iteration's time.
        """
        fits = self._cache.fits(model.config.get_text_config(), model.dtype)
        return Decoder(model, self._context, self.slots, self._cache if fits else None)

    def join(self, request: Request) -> bool:
        """Give a request a row, with as much of its prompt as the cache holds; False if it has to wait a step."""
        prompt, usable = request.prompt_ids, len(request.prompt_ids) - 1
        own = self._slot_of.get(request.trajectory_id)
        if own is not None and self._active[own]:
            own = None
        donor, shared = self._longest_prefix(prompt, usable, own)
        if donor is None:
            return False
        slot = own if own is not None else self._free_slot(donor)
        if slot is None:
            return False
        if shared and donor != slot:
            self._cache.copy_prefix(donor, slot, shared)
        self._occupy(slot, request, shared)
        return True

    def leave(self, request: Request) -> None:
        """Take a row out before it ends. Does nothing if it has ended."""
        for slot in np.flatnonzero(self._active):
            if self._requests[slot] is request:
                self._vacate(int(slot))
                # Nobody has looked at its logits: they may be NaN.
                self._forget(int(slot))

    def step(self) -> list[Completion]:
        """Feed every row once; return those that ended."""
        row_P, feed_P = self._feed()
        if len(row_P) == 0:
            return []
        start_P = self._filled[row_P]
        plan = self._cache.plan(row_P, start_P, feed_P)
        last_P = np.cumsum(feed_P) - 1
        position_N = np.arange(int(last_P[-1]) + 1) + np.repeat(start_P - (last_P + 1 - feed_P), feed_P)
        token_N = self._ids[np.repeat(row_P, feed_P), position_N]
        samples_P = start_P + feed_P == self._known[row_P]
        self._filled[row_P] += feed_P
        logits_BV = self._model(
            input_ids=torch.from_numpy(token_N).long()[None],
            position_ids=torch.from_numpy(position_N)[None],
            use_cache=False,
            # At least one: a pass without logits is not a shape every architecture accepts.
            logits_to_keep=torch.from_numpy(last_P[samples_P] if samples_P.any() else last_P[-1:]),
            slot_pass=plan,
        ).logits[0]
        return self._sample(row_P[samples_P], logits_BV) if samples_P.any() else []

    def _feed(self) -> tuple[np.ndarray, np.ndarray]:
        """Which rows are fed how many tokens, by rising number, at most TOKENS_PER_STEP together."""
        row_P = np.flatnonzero(self._active)
        due_P = self._known[row_P] - self._filled[row_P]
        order = np.argsort(due_P, kind="stable")
        row_P, due_P = row_P[order], due_P[order]
        before_P = np.cumsum(due_P) - due_P
        feed_P = np.minimum(due_P, np.maximum(TOKENS_PER_STEP - before_P, 0))
        fed = feed_P > 0
        row_P, feed_P = row_P[fed], feed_P[fed]
        # A prompt cut by the budget may have become shorter than its neighbours.
        order = np.argsort(feed_P, kind="stable")
        return row_P[order], feed_P[order]

    def _sample(self, row_B: np.ndarray, logits_BV: torch.Tensor) -> list[Completion]:
        known_B = self._known[row_B]
        token, logprob = draw_tokens(
            logits_BV.float(),
            torch.from_numpy(self._temperature[row_B]),
            torch.from_numpy(self._uniforms[row_B, known_B]),
        )
        token_B, logprob_B = token.numpy(), logprob.numpy()
        self._ids[row_B, known_B] = token_B
        self._logprobs[row_B, known_B] = logprob_B
        self._known[row_B] += 1
        stopped_B = (self._stops[row_B] == token_B[:, None]).any(axis=1)
        broken_B = ~np.isfinite(logprob_B)
        ended_B = stopped_B | broken_B | (known_B + 1 >= self._limit[row_B])
        return [
            self._complete(int(row_B[i]), None if broken_B[i] else "stop" if stopped_B[i] else "length")
            for i in np.flatnonzero(ended_B)
        ]

    def _complete(self, slot: int, reason: FinishReason | None) -> Completion:
        request = self._requests[slot]
        assert request is not None
        sampled = slice(len(request.prompt_ids), int(self._known[slot]))
        completion = Completion(request, self._ids[slot, sampled].copy(), self._logprobs[slot, sampled].copy(), reason)
        self._vacate(slot)
        if reason is None:
            self._forget(slot)
        return completion

    def _longest_prefix(self, prompt: np.ndarray, usable: int, own: int | None) -> tuple[int | None, int]:
        """The slot that holds most of the prompt, and how much; None where one that is being filled will hold more.

        -1 and 0 where no slot holds its first token.
        """
        if own is not None:
            filled = min(int(self._filled[own]), usable)
            if filled and np.array_equal(self._ids[own, :filled], prompt[:filled]):
                return own, filled
        if self._top == 0 or usable == 0:
            return -1, 0
        differs = self._ids[: self._top, :usable] != prompt[:usable]
        equal = np.where(differs.any(axis=1), differs.argmax(axis=1), usable)
        held = np.minimum(equal, self._filled[: self._top])
        coming = np.minimum(equal, np.where(self._active, self._known, 0)[: self._top])
        donor = int(held.argmax())
        if coming.max() - held[donor] >= _WORTH_WAITING:
            return None, 0
        return (donor, int(held[donor])) if held[donor] else (-1, 0)

    def _free_slot(self, donor: int) -> int | None:
        """A slot never used, else the idle one left longest ago; the donor itself only if there is no other."""
        if self._top < self.slots:
            self._top += 1
            return self._top - 1
        idle = np.flatnonzero(~self._active)
        if len(idle) == 0:
            return None
        others = idle[idle != donor]
        return int(others[self._left_at[others].argmin()]) if len(others) else donor

    def _occupy(self, slot: int, request: Request, filled: int) -> None:
        prompt, sampling, n = request.prompt_ids, request.sampling, len(request.prompt_ids)
        former = self._owner[slot]
        if former is not None and self._slot_of.get(former) == slot:
            del self._slot_of[former]
        self._owner[slot] = request.trajectory_id
        self._slot_of[request.trajectory_id] = slot
        self._requests[slot] = request
        self._active[slot] = True
        self._ids[slot, :n] = prompt
        self._known[slot], self._filled[slot], self._limit[slot] = n, filled, n + sampling.max_tokens
        self._temperature[slot] = sampling.temperature
        if sampling.temperature:
            self._uniforms[slot, n : n + sampling.max_tokens] = uniforms_of(sampling.seed, sampling.max_tokens)
        stops = sampling.stop_token_ids
        if len(stops) > self._stops.shape[1]:
            wider = ((0, 0), (0, len(stops) - self._stops.shape[1]))
            self._stops = np.pad(self._stops, wider, constant_values=-1)
        self._stops[slot] = -1
        self._stops[slot, : len(stops)] = stops

    def _forget(self, slot: int) -> None:
        self._filled[slot] = 0
        self._cache.clear(slot)

    def _vacate(self, slot: int) -> None:
        self._clock += 1
        self._left_at[slot] = self._clock
        self._active[slot] = False
        self._requests[slot] = None
