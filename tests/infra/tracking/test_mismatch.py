"""From stored metrics to a warning with advice."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.store import layout
from infra.store.files import StoreFiles
from infra.tracking.history import RunHistory
from infra.tracking.mismatch import growing_mismatch, mismatch_advice
from infra.tracking.summary import console_line, markdown_summary
from mgrpo_core.config import RunConfig
from mgrpo_core.update.mismatch_growth import MismatchGrowth
from tests.flows.small_team import config_of
from tests.infra.tracking.test_summary import SUMMARY

GROWTH = MismatchGrowth(0.01, 0.03)


class CountedFiles(StoreFiles):
    """Knows what was read."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.paths: list[str] = []

    def read(self, path: str) -> bytes:
        self.paths.append(path)
        return super().read(path)


def stored(folder: Path, rows: list[dict[str, float]]) -> CountedFiles:
    files = CountedFiles(str(folder))
    for number, row in enumerate(rows):
        files.write(layout.metrics_file("r", number), json.dumps(row).encode())
    return files


def figures(main: float, sub: float, sub_steps: int = 1) -> dict[str, float]:
    return {
        "update/main/mismatch_mean": main,
        "update/main/optimizer_steps": 1,
        "update/sub/mismatch_mean": sub,
        "update/sub/optimizer_steps": sub_steps,
    }


def test_growth_is_found_per_policy_in_the_last_small_files_only(tmp_path: Path) -> None:
    level = [0.01] * 17 + [0.03] * 3
    files = stored(tmp_path, [figures(main=value, sub=0.01) for value in level])
    history = RunHistory(files, "r")
    assert growing_mismatch(history, 19, ["main", "sub"]) == {"main": GROWTH}
    assert files.paths == [layout.metrics_file("r", number) for number in range(7, 20)]
    assert growing_mismatch(history, 16, ["main", "sub"]) == {}
    assert growing_mismatch(history, 19, ["main"]) == {"main": GROWTH}
    assert len(files.paths) == 13 + 3  # the first three of iteration 16's window; no file twice


def test_an_iteration_in_which_a_policy_took_no_step_has_no_figure_of_it(tmp_path: Path) -> None:
    # 0 would halve the earlier median: [.02 .02 .02 0 0 0 0] -> 0
    rows = [figures(0.01, 0.02)] * 3 + [figures(0.01, 0.0, sub_steps=0)] * 4 + [figures(0.01, 0.025)] * 3
    assert growing_mismatch(RunHistory(stored(tmp_path, rows), "r"), 9, ["sub"]) == {}


def config_with(**sections: dict[str, Any]) -> RunConfig:
    raw = config_of(Path("policies"), Path("queries.jsonl"))
    raw["policies"]["main"] |= sections.pop("main", {})
    return RunConfig.model_validate(raw | sections)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({}, "Nothing corrects for it: set loss.correction.mode: truncate (or mask)"),
        ({"loss": {"correction": {"mode": "mask"}}}, "loss.correction (mask, token) limits 12.5% of the tokens"),
        (
            {"update": {"old_logprobs": "sampler"}},
            "Set update.old_logprobs: trainer and loss.correction.mode: truncate.",
        ),
        ({"main": {"dtype": "bfloat16"}}, "Or compute in float32: policies.main.dtype."),
        ({"main": {"servers": ["http://gpu-1:8000"]}}, "look for a server with another dtype or quantisation"),
    ],
)
def test_the_advice_fits_the_config(sections: dict[str, Any], words: str) -> None:
    metrics = {
        "update/main/mismatch_max": 1.5,
        "update/main/effective_sample_share": 0.61,
        "update/main/corrected_share": 0.125,
    }
    advice = mismatch_advice("main", GROWTH, config_with(**sections), metrics)
    assert words in advice
    assert "differ by 0.03 nats a token (median of 3 iterations), before by 0.01; at most by 1.5 now" in advice
    assert "effective sample share 0.61." in advice
    assert "Lower policies.main.optimizer.lr." in advice
    assert "--accept-config-change" in advice


def test_people_see_it_on_the_line_and_on_the_page() -> None:
    summary = replace(SUMMARY, drifting={"main": GROWTH}, advice=("Lower | the rate.",))
    assert console_line(summary).endswith("  ! policy main: mismatch grows, 0.01 → 0.03")
    page = markdown_summary(summary)
    assert "- **policy main: mismatch grows, 0.01 → 0.03**\n- Lower ¦ the rate.\n" in page
