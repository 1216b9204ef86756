from pathlib import Path

import numpy as np
import pytest
import torch

from infra.serving import decoding
from infra.serving.decoding import Completion, Decoder, Request
from infra.training.load_policy import load_model
from mgrpo_core.rollout.protocols import Sampling

CONTEXT = 160


@pytest.fixture
def decoder(folder: Path) -> Decoder:
    return Decoder(load_model(folder, torch.float32), CONTEXT, slots=6)


def request_of(prompt: list[int], trajectory: str = "t", max_tokens: int = 4, seed: int = 0) -> Request:
    return Request(np.array(prompt, dtype=np.int32), Sampling(1.0, max_tokens, seed), trajectory)


def run(decoder: Decoder) -> tuple[list[Completion], list[int]]:
    """Step until nothing is active; also how many tokens each step fed."""
    done, fed = [], []
    with torch.inference_mode():
        while decoder.active:
            before = decoder._filled.sum()
            done += decoder.step()
            fed.append(int(decoder._filled.sum() - before))
    return done, fed


def test_a_later_turn_feeds_only_what_is_new(decoder: Decoder) -> None:
    first = list(range(30))
    decoder.join(request_of(first))
    (made,), fed = run(decoder)
    # the prompt, then three of the four sampled tokens: the last one is nobody's context yet
    assert fed == [30, 1, 1, 1]
    decoder.join(request_of([*first, *made.token_ids.tolist(), 5, 6, 7]))
    _, fed = run(decoder)
    # the last sampled token and the three observed ones
    assert fed == [4, 1, 1, 1]
    assert decoder._top == 1  # in place, no second slot


def test_equal_prompts_that_arrive_together_are_computed_once(decoder: Decoder) -> None:
    prompt = list(range(40))
    first = decoder.join(request_of(prompt, "a", seed=1))
    second = decoder.join(request_of(prompt, "b", seed=2))
    assert (first, second) == (True, False)
    with torch.inference_mode():
        decoder.step()
    assert decoder.join(request_of(prompt, "b", seed=2))
    done, fed = run(decoder)
    assert fed[0] == 2  # one token of each row, not the 40 again
    assert len(done) == 2


def test_a_common_beginning_is_taken_from_another_query(decoder: Decoder) -> None:
    decoder.join(request_of([*range(25), 70, 71], "a"))
    run(decoder)
    decoder.join(request_of([*range(25), 80, 81, 82], "b"))
    _, fed = run(decoder)
    assert fed[0] == 3


def test_a_long_prompt_is_fed_in_parts_and_decoding_goes_on_meanwhile(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "TOKENS_PER_STEP", 32)
    decoder.join(request_of([1, 2, 3], "short", max_tokens=6))
    with torch.inference_mode():
        decoder.step()
    decoder.join(request_of([(7 * i) % 97 for i in range(100)], "long", max_tokens=2))
    parts, fed = run(decoder)
    # 1 decoding token beside 31, 31, 31 of the prompt, then its last 7
    assert fed[:4] == [32, 32, 32, 8]
    monkeypatch.undo()
    whole = Decoder(decoder._model, CONTEXT, slots=2)
    whole.join(request_of([(7 * i) % 97 for i in range(100)], "long", max_tokens=2))
    (expected,), _ = run(whole)
    made = next(c for c in parts if c.request.trajectory_id == "long")
    assert made.token_ids.tolist() == expected.token_ids.tolist()
    np.testing.assert_allclose(made.logprobs, expected.logprobs, atol=1e-5, rtol=0)


def test_the_idle_row_left_longest_ago_makes_room(decoder: Decoder) -> None:
    for i in range(6):
        assert decoder.join(request_of([i, 50, 60], f"t{i}"))
        run(decoder)
    assert decoder.join(request_of([90, 91], "new"))
    assert "t0" not in decoder._slot_of
    assert {"t1", "t5", "new"} <= set(decoder._slot_of)


def test_a_full_house_refuses_until_a_row_ends(decoder: Decoder) -> None:
    for i in range(6):
        assert decoder.join(request_of([i, 50], f"t{i}"))
    assert not decoder.join(request_of([8, 50], "late"))
    run(decoder)
    assert decoder.join(request_of([8, 50], "late"))


def test_memory_that_held_nan_is_clean_for_the_next_version(
    decoder: Decoder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = load_model(folder, torch.float32)
    with torch.no_grad():
        broken.model.layers[0].self_attn.v_proj.weight.fill_(float("nan"))
    sick = decoder.successor(broken)
    stays, goes = request_of(list(range(60)), "a"), request_of(list(range(20, 90)), "b")
    sick.join(stays)
    run(sick)
    sick.join(goes)
    monkeypatch.setattr(decoding, "TOKENS_PER_STEP", 30)
    with torch.inference_mode():
        assert sick.step() == []  # part of the prompt only: nobody has seen a logit of it
    sick.leave(goes)
    monkeypatch.undo()
    healthy = sick.successor(load_model(folder, torch.float32))
    # The same two slots, beside a longer row, so that what lies past their own ends is read (and masked) too.
    for name, length in (("a", 3), ("b", 4), ("c", 20)):
        healthy.join(request_of(list(range(ord(name) - 90, ord(name) - 90 + length)), name))
    done, _ = run(healthy)
    assert [c.finish_reason for c in done] == ["length"] * 3
