import math
import struct
import threading

import numpy as np
import pytest
from matplotlib.axes import Axes

from infra.tracking import curves
from infra.tracking.curves import curves_png
from mgrpo_core.errors import ShapeError


def row(iteration: int, **more: float) -> dict[str, float]:
    """What an iteration measures, for two agents and two policies."""
    values = {"iteration": float(iteration), "success": 0.1 + 0.01 * iteration, "epoch": 0.0}
    for agent in ("main", "sub"):
        values |= {f"{agent}/reward": 0.3, f"{agent}/format": 0.9, f"{agent}/zero_variance_groups": 0.25}
        values[f"{agent}/sampled_tokens_mean"] = 20.0
        values |= {f"update/{agent}/{name}": 0.5 for name in ("approx_kl", "ref_kl", "entropy", "grad_norm")}
        values |= {f"update/{agent}/clip_fraction_{side}": 0.01 for side in ("low", "high")}
    values |= {"sub/invocations_mean": 1.5, "sub/invocations_max": 3.0, "seconds/roll_out": 2.0}
    return values | more


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, np.ndarray]]:
    """What is really drawn: panel -> label of a line -> its values."""
    seen: dict[str, dict[str, np.ndarray]] = {}
    plot = Axes.plot

    def spy(self: Axes, *args: object, **kwargs: object) -> object:
        panel = seen.setdefault(self.get_title(loc="left"), {})
        panel[str(kwargs.get("label", "faint"))] = np.asarray(args[1])
        return plot(self, *args, **kwargs)

    monkeypatch.setattr(Axes, "plot", spy)
    return seen


def size(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])  # type: ignore[return-value]


def test_every_kind_of_number_has_its_panel(drawn: dict[str, dict[str, np.ndarray]]) -> None:
    assert size(curves_png([row(i) for i in range(4)], "run"))[0] == 1500
    assert list(drawn) == [
        "Success",
        "Reward of main",
        "Reward of sub",
        "Calls in a rollout, d_k",
        "Groups without variance",
        "Sampled tokens a trajectory",
        "KL, nats a token",
        "Clipped tokens",
        "Entropy, nats a token",
        "Gradient norm before clipping",
    ]
    assert set(drawn["Clipped tokens"]) == {"main, above", "main, below", "sub, above", "sub, below"}
    np.testing.assert_allclose(drawn["Success"]["training"], [0.1, 0.11, 0.12, 0.13])


def test_names_with_slashes_have_their_panels_too(drawn: dict[str, dict[str, np.ndarray]]) -> None:
    measured = {"sub/search/reward": 0.3, "sub/search/format": 0.9, "update/sub/search/entropy": 0.5}
    curves_png([{"iteration": float(i), **measured} for i in range(3)], "run")
    assert {name: set(lines) for name, lines in drawn.items()} == {
        "Reward of sub/search": {"reward", "format"},
        "Entropy, nats a token": {"sub/search"},
    }


def test_panels_without_numbers_are_left_out(drawn: dict[str, dict[str, np.ndarray]]) -> None:
    rows = [{"iteration": float(i), "success": 0.5, "update/main/approx_kl": math.nan} for i in range(3)]
    few = size(curves_png(rows, "run"))
    assert list(drawn) == ["Success"]
    assert few[1] < size(curves_png([row(0), row(1)], "run"))[1]


def test_rows_in_any_order_with_gaps_and_infinities_are_drawn_by_iteration(
    drawn: dict[str, dict[str, np.ndarray]],
) -> None:
    rows = [row(3, success=0.4), row(0, success=0.1), {"iteration": 1.0}, row(2, success=math.inf)]
    curves_png(rows, "run")
    np.testing.assert_array_equal(drawn["Success"]["training"], [0.1, math.nan, math.nan, 0.4])


def test_held_out_success_is_drawn_where_it_was_measured(drawn: dict[str, dict[str, np.ndarray]]) -> None:
    measured = {"held_out/success": 0.3, "held_out/success_low": 0.2, "held_out/success_high": 0.4}
    curves_png([row(0, **measured), row(1), row(2, **{"held_out/success": 0.5, "held_out/greedy": 0.6})], "run")
    np.testing.assert_array_equal(drawn["Success"]["held out"], [0.3, 0.5])
    np.testing.assert_array_equal(drawn["Success"]["held out, greedy"], [0.6])


def test_a_reference_kl_that_is_zero_throughout_is_no_line(drawn: dict[str, dict[str, np.ndarray]]) -> None:
    curves_png([row(i, **{"update/sub/ref_kl": 0.0}) for i in range(3)], "run")
    assert set(drawn["KL, nats a token"]) == {"main, update", "sub, update", "main, reference"}


def test_long_runs_are_smoothed_over_their_single_values(drawn: dict[str, dict[str, np.ndarray]]) -> None:
    curves_png([row(i, success=float(i % 2)) for i in range(100)], "run")
    # reach 100 // 20 = 5: eleven neighbours, five or six of them 1
    assert set(np.round(drawn["Success"]["training"][10:-10] * 11)) == {5.0, 6.0}
    np.testing.assert_array_equal(drawn["Success"]["faint"][:4], [0, 1, 0, 1])


def test_a_running_mean_skips_what_is_missing() -> None:
    mean = curves._running_mean(np.array([1.0, math.nan, 3.0, math.nan, math.nan, math.nan]), 1)
    # windows of three: [1], [1, 3], [3], [3], none, none
    np.testing.assert_array_equal(mean, [1, 2, 3, 3, math.nan, math.nan])


def test_a_first_iteration_alone_can_be_drawn() -> None:
    assert size(curves_png([row(0, **{"seconds/commit": 0.0})], "run"))[0] == 1500


def test_nothing_to_draw_says_what_is_missing() -> None:
    for rows in ([], [{"success": 0.5}], [{"iteration": 0.0, "epoch": 0.0}]):
        with pytest.raises(ShapeError, match="none with a metric to draw"):
            curves_png(rows, "run")


def test_can_be_drawn_beside_the_main_thread() -> None:
    made: list[bytes] = []
    threads = [threading.Thread(target=lambda: made.append(curves_png([row(0), row(1)], "run"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2
    assert made[0] == made[1]
