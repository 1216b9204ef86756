"""The project as somebody finds it who checks it out: pins, commands, contracts, documents."""

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

# In pieces, so that this file does not find itself.
MACHINE_PATH = re.compile(r"(?<![\w.~/{}-])/(?:root|home|Users|work|opt|mnt)/\w")
INDEX = re.compile(
    "|".join([r"pypi\.o" + "rg", r"pythonhos" + "ted", r"registry\.n" + "pmjs", r"download\.py" + "torch"])
)
INDEX_OPTION = re.compile("--(?:extra-)?index" + "-url|--find" + "-links")


def tracked_texts() -> dict[str, str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    texts = {}
    for name in filter(None, listed.split("\0")):
        data = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b""
        if b"\0" not in data:
            texts[name] = data.decode("utf-8")
    return texts


@pytest.mark.parametrize("pattern", [MACHINE_PATH, INDEX, INDEX_OPTION], ids=["machine path", "index", "index option"])
def test_nothing_in_the_tree_names_one_machine_or_registry(pattern: re.Pattern[str]) -> None:
    texts = tracked_texts()
    assert "pyproject.toml" in texts
    found = [
        f"{name}:{number}: {line.strip()[:80]}"
        for name, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_the_patterns_find_what_they_look_for() -> None:
    assert MACHINE_PATH.search("cd /" + "root/project")
    assert MACHINE_PATH.search('"/' + 'home/me/x"')
    assert not MACHINE_PATH.search("mgrpo_core/home/page, https://example.org/work/x")
    assert INDEX.search("https://py" + "pi.org/simple")


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in pins)
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in pins)}


def required() -> list[Requirement]:
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    asked = [Requirement(text) for text in (*project["dependencies"], *extras["dev"])]
    own = [
        Requirement(text)
        for one in asked
        if one.name == project["name"]
        for name in sorted(one.extras)
        for text in extras[name]
    ]
    return [*(one for one in asked if one.name != project["name"]), *own]


@pytest.mark.parametrize("requirement", required(), ids=str)
def test_the_lock_satisfies_what_the_project_asks_for(requirement: Requirement) -> None:
    pinned = locked().get(canonicalize_name(requirement.name))
    assert pinned is not None, f"{requirement} is not in requirements.lock: run `make lock`"
    assert requirement.specifier.contains(pinned), f"requirements.lock has {pinned}: run `make lock`"


def test_the_lock_leaves_the_build_of_torch_to_the_machine() -> None:
    pins = locked()
    assert "torch" in pins
    assert [name for name in pins if name.startswith(("nvidia-", "cuda-", "triton"))] == []


# What each import contract is for: one import that must break it.
BREACHES = [
    ("mgrpo_core", "import infra.part", "imports point down"),
    ("infra", "import tasks.part", "imports point down"),
    ("tasks", "import flows.part", "imports point down"),
    ("mgrpo_core", "import prefect", "the algorithm knows no Prefect"),
    ("mgrpo_core", "import pyarrow", "the algorithm knows no Prefect"),
    ("mgrpo_core", "import fsspec", "the algorithm knows no Prefect"),
    ("infra", "import prefect", "infra knows no Prefect"),
]


def lint_imports(folder: Path, package: str = "mgrpo_core", line: str = "") -> subprocess.CompletedProcess[str]:
    """Run the project's own contracts on four packages of one module each, one of which has `line`."""
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8"), encoding="utf-8")
    for name in PROJECT["tool"]["importlinter"]["root_packages"]:
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
        (folder / name / "part.py").write_text(line if name == package else "", encoding="utf-8")
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_packages_that_import_nothing_break_no_contract(tmp_path: Path) -> None:
    result = lint_imports(tmp_path)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(("package", "line", "contract"), BREACHES)
def test_an_import_that_points_up_is_found(tmp_path: Path, package: str, line: str, contract: str) -> None:
    result = lint_imports(tmp_path, package, line)
    assert result.returncode == 1
    assert re.search(rf"{re.escape(contract)}.* BROKEN", result.stdout)


def targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return {name for line in re.findall(r"^([a-z]+):", makefile, re.MULTILINE) for name in [line]}


def test_every_make_command_of_the_documents_exists() -> None:
    texts = [path.read_text(encoding="utf-8") for path in DOCUMENTS]
    used = {name for text in texts for name in re.findall(r"(?:`|^)make ([a-z]+)", text, re.MULTILINE)}
    assert "test" in used
    assert used <= targets()


def test_help_lists_every_command_that_a_person_runs() -> None:
    printed = subprocess.run(["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    listed = set(re.findall(r"^make ([a-z]+)", printed, re.MULTILINE))
    assert listed == targets() - {"lint", "types", "imports"}  # the pieces of `make check`


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_that_a_document_links_to_exists(path: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose)
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (path.parent / link).exists()] == []


def test_every_number_that_an_update_reports_is_described() -> None:
    from mgrpo_core.update.update_metrics import UpdateMetrics

    described = set(re.findall(r"`([a-z_]+)`", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")))
    assert [field.name for field in fields(UpdateMetrics) if field.name not in described] == []


def test_tests_keep_prefect_out_of_the_users_home() -> None:
    from prefect.settings import get_current_settings

    home = get_current_settings().home
    assert not home.is_relative_to(Path.home())
    assert home == Path(os.environ["PREFECT_HOME"])
