"""A real browser for tests: Debian's Chromium, headless, with a profile of its own."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
_APT_S = 240


def chromium_path() -> str:
    """The browser's program; installed by apt where it is missing. Without apt, the test is skipped, but not in CI."""
    if (found := shutil.which("chromium")) is None:
        said = _install()
        found = shutil.which("chromium")
        if found is None and not os.environ.get("CI"):
            pytest.skip(f"no chromium, and apt does not install it: {said}. Install Chromium to run this test.")
        assert found is not None, f"no chromium, and apt does not install it: {said}"
    return found


@contextmanager
def chromium() -> Iterator["Browser"]:
    """A browser; each page of it belongs to a context, which is a fresh profile."""
    from playwright.sync_api import sync_playwright

    path = chromium_path()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_FLAGS), headless=True)
        yield browser
        browser.close()


def _install() -> str:
    apt = shutil.which("apt-get")
    if apt is None:
        return "there is no apt-get"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    said = ""
    for command in (["update"], ["install", "--no-install-recommends", "-y", "chromium"]):
        try:
            done = subprocess.run([apt, *command], capture_output=True, text=True, env=environment, timeout=_APT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode:
            said = done.stderr.strip()[-300:]
    return said
