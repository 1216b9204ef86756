import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.store import layout
from mgrpo_core.errors import ConfigError


@pytest.mark.parametrize("run", ["007", "7", "1e5", "true", "2025-01-01", "a.b_c-d", "A" * 64])
def test_a_run_name_is_its_folder_letter_for_letter(run):  # case E8
    assert layout.run_folder(run) == run


@pytest.mark.parametrize(
    "run", ["", ".", "..", "../x", "a/b", "a\\b", "é", "a b", "a%2Fb", ".hidden", "a.", "-x", "a\n", "A" * 65, "s3://x"]
)
def test_a_run_name_that_could_leave_or_change_its_folder_is_refused(run):  # case E10
    with pytest.raises(ConfigError, match="--run"):
        layout.run_folder(run)


def test_awkward_agent_names_stay_distinct_and_inside_their_folder():  # case E10
    names = [
        "sub/search",
        "sub%2Fsearch",
        "sub=a b%2F",
        "é",
        "e\u0301",
        "a:b",
        "",
        "%",
        "..",
        ".",
        "../x",
        "~",
        "A",
        "a",
    ]
    segments = [layout.encoded(name) for name in names]
    assert len(set(segments)) == len(names)
    assert [layout.decoded(segment) for segment in segments] == names
    assert segments[0] == "sub%2Fsearch"
    assert segments[8] == "%2E%2E"


@given(st.text(), st.text())
def test_encoding_is_reversible_and_stays_one_segment(left, right):
    left, right = (text.encode("utf-8", "replace").decode() for text in (left, right))
    segment = layout.encoded(left)
    assert layout.decoded(segment) == left
    assert (segment == layout.encoded(right)) == (left == right)
    assert segment.isascii()
    assert segment not in ("", ".", "..")
    assert posixpath.normpath(f"folder/{segment}") == f"folder/{segment}"
    assert "/" not in segment


def test_iterations_sort_as_numbers():
    assert layout.iteration_folder("r", 12) == "r/iterations/00000012"
    assert layout.trajectories_file("r", 12, "a:b", 3) == "r/iterations/00000012/trajectories/a%3Ab-0003.parquet"


def test_the_manifest_of_a_file_is_found_from_its_path():
    for path in (
        layout.table_file("r", 3, "rewards"),
        layout.staged_group("r", 3, 5),
        layout.trajectories_file("r", 3, "main", 0),
        layout.update_file("r", 3, "sub"),
    ):
        assert layout.manifest_beside(path) == layout.manifest_file("r", 3)
    assert layout.manifest_beside(layout.version_file("r", "sub", 3)) is None
    assert layout.manifest_beside(f"{layout.aside_folder('r')}/0000-r_iterations_00000003/rewards.parquet") is None
