"""The pages in a real browser: what people do with them, and what hostile text may not do."""

import hashlib
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli import app
from infra.store import layout
from infra.store.files import StoreFiles
from tests.infra.ui.spoken_run import HOSTILE, RUN, SCRIPT, write_spoken_run
from tests.servers.chromium import chromium

_ROOT = Path(__file__).parents[3]
_WAIT_MS = 30_000


@dataclass(frozen=True, slots=True)
class Site:
    """A running `mgrpo ui`."""

    url: str
    store: Path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The command itself, over a run of two iterations, the first of which is damaged."""
    folder = tmp_path_factory.mktemp("site")
    store = folder / "store"
    write_spoken_run(StoreFiles(str(store)), folder / "scratch", 2)
    damaged = store / layout.trajectories_file(RUN, 0, "searcher", 0)
    damaged.write_bytes(b"no Parquet")
    (store / layout.metrics_file(RUN, 0)).write_text("{", encoding="utf-8")
    before = _content(store)
    command = [sys.executable, "-m", "flows.cli", "ui", RUN, "--store", str(store), "--port", "0"]
    with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", said)
        assert found, said + process.stdout.read()
        yield Site(found[0], store)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 0, rest
    assert "Traceback" not in rest, rest
    assert _content(store) == before, "the pages wrote into the store"


def _content(store: Path) -> dict[str, str]:
    return {
        str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in store.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def window() -> Iterator[Any]:
    """Where pages are opened, one a test; what they share is a cache of scripts."""
    with chromium() as browser:
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        context.set_default_timeout(_WAIT_MS)
        yield context
        context.close()


@dataclass(slots=True)
class Reader:
    """A person with a browser; notes what the pages should not do."""

    page: Any
    site: Site
    faults: list[str] = field(default_factory=list)

    def open(self, path: str) -> None:
        self.page.goto(self.site.url + path)

    def text(self, selector: str) -> str:
        """What is seen there, once it is there."""
        return self.page.locator(selector).first.inner_text()

    def sees(self, selector: str, text: str) -> None:
        self.page.locator(selector).filter(has_text=text).first.wait_for()

    def column(self, name: str) -> list[str]:
        """A column of the table of trajectories, as far as it is drawn, from the top."""
        self.page.locator(f'.ag-row[row-index="0"] [col-id="{name}"]').first.wait_for()
        cells = self.page.locator(
            f'.ag-center-cols-container [col-id="{name}"], .ag-pinned-left-cols-container [col-id="{name}"]'
        )
        return cells.all_inner_texts()

    def choose(self, field: str, option: str) -> None:
        self.page.locator(f"#filter-{field}").click()
        self.page.get_by_role("option", name=option, exact=True).click()


@pytest.fixture
def reader(site: Site, window: Any) -> Iterator[Reader]:
    someone = Reader(window.new_page(), site)
    page = someone.page
    page.on("pageerror", lambda error: someone.faults.append(f"error: {error}"))
    page.on("console", lambda said: said.type == "error" and someone.faults.append(f"console: {said.text}"))
    page.on("dialog", lambda dialog: someone.faults.append(f"dialog: {dialog.message}"))
    page.on(
        "request",
        lambda asked: asked.url.startswith((site.url, "data:", "blob:")) or someone.faults.append(f"asked {asked.url}"),
    )
    yield someone
    stolen = page.evaluate("window.stolen")
    page.close()
    assert stolen is None
    assert someone.faults == []


def test_the_overview_shows_curves_and_leads_to_an_iteration(reader):
    reader.open("/")
    reader.sees("figcaption", "Groups without variance")
    reader.page.locator(".js-plotly-plot .scatterlayer .trace").first.wait_for()
    assert reader.page.locator("figure").count() >= 8
    reader.sees(".notice.wrong", "iteration 0")  # its metrics are damaged; the other is shown all the same
    reader.page.locator("#iterations .ag-row a", has_text="1").click()
    reader.sees("h1", "Iteration 1")
    assert reader.page.url.endswith("/iteration/1")


def test_text_is_searched_for_and_the_address_keeps_it(reader):
    reader.open("/iteration/1")
    reader.sees(".count", "21 trajectories")
    reader.page.locator("#filter-text").fill("PAGE 1:")
    reader.sees(".count", "3 trajectories")
    assert reader.column("agent_path") == ["main/1:searcher"] * 3
    assert reader.page.url.endswith("/iteration/1?text=PAGE+1%3A")
    reader.page.reload()
    reader.sees(".count", "3 trajectories")
    assert reader.page.locator("#filter-text").input_value() == "PAGE 1:"
    reader.page.locator("#filter-text").fill("nobody ever said that")
    reader.sees(".count", "No trajectory is like that")


def test_filters_and_sorting_work_together(reader):
    reader.open("/iteration/1?agent=main")
    reader.sees(".count", "12 trajectories")
    reader.choose("sign", "below 0")
    reader.sees(".count", "6 trajectories")
    assert "agent=main" in reader.page.url
    assert "sign=-" in reader.page.url
    reader.open("/iteration/1?low=0.15")
    reader.sees(".count", "11 trajectories")  # 9 of the searcher, 2 right answers
    reader.page.locator('.ag-header-cell[col-id="reward"]').click()
    reader.page.locator('.ag-row[row-index="0"] [col-id="reward"]', has_text="0.2").wait_for()
    reader.page.locator('.ag-header-cell[col-id="reward"]').click()
    reader.page.locator('.ag-row[row-index="0"] [col-id="reward"]', has_text=re.compile("^1$")).wait_for()
    reader.page.locator("#filter-status").click()
    reader.page.get_by_role("option", name="infra failed", exact=True).click()
    reader.sees(".count", "No trajectory is like that")  # it has no reward
    reader.page.go_back()
    reader.sees(".count", "11 trajectories")


def test_why_a_trajectory_is_out_is_said(reader):
    reader.open("/iteration/1?status=infra_failed")
    reader.sees(".count", "1 trajectory")
    reader.page.locator('.ag-row [col-id="agent_path"] a').click()
    reader.sees("#trajectory", "the search server is down")
    reader.sees("#trajectory .chip", "not in the loss")


def test_a_rollout_is_a_tree_whose_trajectories_are_looked_at_in_turn(reader):
    reader.open("/iteration/1/query/0/rollout/1")
    reader.sees("#trajectory h2", "main")
    leaves = reader.page.locator("#tree .leaf")
    assert [text.split("\n")[0] for text in leaves.all_inner_texts()] == ["main", "0 searcher", "1 searcher"]
    reader.sees("#trajectory table", "verifier")
    leaves.nth(2).click()
    reader.sees("#trajectory h2", "main/1:searcher")
    assert reader.page.url.endswith("/iteration/1/query/0/rollout/1?at=main%2F1%3Asearcher")
    reader.sees("#trajectory .message.tool", "Page 1:")
    reader.sees("#trajectory .message.assistant", "tool search, got")
    reader.page.locator("#tree .leaf").first.click()
    reader.page.locator("#trajectory .said-by a", has_text="main/0:searcher").click()
    reader.sees("#trajectory h2", "main/0:searcher")
    reader.page.locator(".choice", has_text=re.compile("^0")).first.click()
    reader.page.wait_for_url(re.compile("/rollout/0$"))
    reader.sees("#tree .leaf", "the sea")


def test_tokens_are_coloured_and_say_what_they_are(reader):
    reader.open("/iteration/1/query/0/rollout/1")
    reader.page.locator("#views a", has_text="log-prob").click()
    tokens = reader.page.locator("#tokens .token")
    tokens.first.wait_for()
    assert "".join(tokens.all_inner_texts()).strip().startswith("Where does the river end?")
    sampled = reader.page.locator("#tokens .token:not(.given)").first
    title = sampled.get_attribute("title")
    found = re.fullmatch(
        r"token (\d+), id \d+\nsampled, log-prob (-?\d\.\d{4}), probability \S+\nadvantage -0\.577", title
    )
    assert found, title
    assert float(found[2]) == -0.5 * (int(found[1]) % 5)  # as spoken_run gives them
    shades = {look.split()[-1] for look in tokens.evaluate_all("all => all.map(one => one.className)")}
    assert {"given", "rare-0", "rare-3"} <= shades  # log-probs 0 to -2 of 6 shades' worth
    reader.page.locator("#views a", has_text="advantage").click()
    reader.page.locator("#tokens .bad-3").first.wait_for()  # 0.577 of 2, in ninths
    reader.page.locator("#views a", has_text="mask").click()
    reader.page.locator("#tokens .sampled").first.wait_for()
    assert reader.page.url.endswith("?view=mask")


def test_two_rollouts_stand_side_by_side(reader):
    reader.open("/iteration/1/query/0/rollout/0")
    reader.page.locator(".choices", has_text="side by side").locator("a", has_text=re.compile("^1")).click()
    reader.page.wait_for_url(re.compile(r"/iteration/1/query/0/compare/0/1$"))
    reader.sees("#figures tr.differs", "the sea")
    reader.sees("#figures tr.differs", "wrong 1")
    assert "differs" not in (reader.page.locator("#figures tr", has_text="stop").get_attribute("class") or "")
    sides = reader.page.locator(".side-by-side section")
    assert sides.count() == 2
    assert sides.nth(1).locator("details").count() == 3
    sides.nth(1).locator("summary").nth(1).click()
    sides.nth(1).locator(".message.tool", has_text="Page 0:").wait_for()
    reader.page.locator(".choices", has_text="right").locator("a", has_text=re.compile("^2")).click()
    reader.page.wait_for_url(re.compile("/compare/0/2$"))
    reader.sees("#figures", "wrong 2")


@pytest.mark.parametrize(
    "path",
    [
        "/iteration/1?query=1",
        "/iteration/1/query/1/rollout/1",
        "/iteration/1/query/1/rollout/1?at=main/0:searcher",
        "/iteration/1/query/1/rollout/1?view=logprob",
        "/iteration/1/query/1/compare/1/2",
        f"/iteration/1?text={SCRIPT}",
        f"/iteration/1/query/1/rollout/1?at={SCRIPT}",
        f"/{SCRIPT}",
    ],
)
def test_hostile_text_is_text(reader, path):
    reader.open(path)
    reader.page.locator("main >> text=/onerror/").first.wait_for()
    page = reader.page
    assert page.locator("main script").count() == 0
    assert page.locator("main img").count() == 0
    assert page.locator("a[href^=javascript]").count() == 0
    shown = page.locator("#page").inner_text()
    assert not set(shown) & set("\x00\x1b\u202e\u202c")
    if "rollout/1" in path and "at=<" not in path:
        reader.sees("#page", "\\x1b[31mred")
        reader.sees("#page", "\\x00end")
    titles = page.locator("[title]").evaluate_all("all => all.map(one => one.title).join('')")
    assert not set(titles) & set("\x00\x1b\u202e")


def test_hostile_text_is_shown_whole(reader):
    reader.open("/iteration/1/query/1/rollout/1")
    reader.sees("#trajectory pre", SCRIPT)
    said = reader.page.locator("#trajectory .message.tool pre").first.text_content()
    assert said == HOSTILE.replace("\x1b", r"\x1b").replace("\u202e", r"\u202e").replace("\u202c", r"\u202c").replace(
        "\x00", r"\x00"
    )


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/iteration/7", "iteration 7 of run 'spoken' is not committed. Committed: 0 to 1."),
        ("/iteration/0", "not a whole Parquet file"),
        ("/iteration/1/query/9/rollout/0", "has no query 'at position 9'"),
        ("/iteration/1/query/0/rollout/9", "has no rollout 9. Rollouts there: 0, 1, 2, 3"),
        ("/iteration/0/query/0/rollout/1", "not a whole Parquet file"),
        ("/iteration/1/query/0/compare/0/9", "has no rollout 9"),
        ("/iteration/1?low=much", "reward from 'much' is no number"),
        ("/iteration/1?query=9", "the iteration has queries 0 to 2"),
        ("/no/such/page", "There is no page /no/such/page"),
    ],
)
def test_what_cannot_be_shown_says_why(reader, path, words):
    reader.open(path)
    reader.sees("[role=alert]", words)


def test_strangers_are_refused_and_every_answer_carries_its_policy(site):
    with urllib.request.urlopen(site.url) as answer:
        policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.split("style-src")[0]
    assert "unsafe-eval" not in policy
    assert "frame-ancestors 'none'" in policy
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(site.url, headers={"Host": "evil.example:80"}))
    assert refused.value.code == 403
    assert "not to 'evil.example'" in refused.value.read().decode()
    refused.value.close()
    with urllib.request.urlopen(urllib.request.Request(site.url, headers={"Host": "localhost:1"})) as answer:
        assert answer.status == 200


def test_a_run_that_is_not_there_is_answered_with_those_that_are(site):
    ended = CliRunner().invoke(app, ["ui", "other", "--store", str(site.store)])
    assert ended.exit_code == 2
    assert "no run 'other'. Runs there: spoken" in ended.stderr


def test_a_missing_extra_is_named(site, monkeypatch):
    for name in [one for one in sys.modules if one.startswith("infra.ui")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "dash", None)
    ended = CliRunner().invoke(app, ["ui", RUN, "--store", str(site.store)])
    assert ended.exit_code == 2
    assert "pip install 'mgrpo[ui]'" in ended.stderr
