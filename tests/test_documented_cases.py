"""docs/cases.md names, for every known case, tests that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NUMBERS = {
    "A": (1, 2, 4, 5, 7, 8, 9, 12, 14),
    "B": (1, 2, 3, 4, 6, 7, 9, 11, 13, 15, 18),
    "C": (1, 2, 4, 5, 7, 8),
    "D": (1, 2, 3, 5, 6, 8, 10, 11, 12),
    "E": (1, 2, 3, 5, 6, 8, 10, 11, 13, 14, 16, 18, 19),
    "F": (1, 2, 3, 6, 7, 9, 11),
    "G": (1, 2, 3, 4, 6),
    "H": (1, 3, 4, 5, 6, 10),
    "I": (1, 2, 3, 4, 5),
}
CASES = [f"{kind}{number}" for kind, numbers in NUMBERS.items() for number in numbers]


def _rows() -> dict[str, str]:
    text = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| ([A-I]\d+) \| (.*) \|$", text, re.MULTILINE))


def test_no_case_is_missing_and_none_comes_twice():
    text = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| ([A-I]\d+) \|", text, re.MULTILINE) == CASES


@pytest.mark.parametrize("case", CASES)
def test_every_test_that_a_case_names_exists(case):
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", _rows()[case])
    assert named, "a case names at least one test"
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in functions, f"{path} has no test {name}; rename it in docs/cases.md, or write it"
