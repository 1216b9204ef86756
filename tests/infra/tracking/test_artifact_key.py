import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect.client.schemas.actions import ArtifactCreate

from infra.tracking.artifact_key import artifact_key


def test_plain_names_stay_readable() -> None:
    assert artifact_key("mgrpo", "iteration-summary", "run7") == "mgrpo-iteration-summary-run7"


@given(st.lists(st.text(min_size=1), min_size=1, max_size=3))
def test_prefect_accepts_every_key(parts: list[str]) -> None:
    key = artifact_key("mgrpo", *parts)
    assert ArtifactCreate(key=key, type="markdown", data="").key == key


@pytest.mark.parametrize("other", ["run-1", "Run_1", "run 1", "run_1 ", "run__1"])
def test_names_that_look_alike_keep_their_own_artifacts(other: str) -> None:
    assert artifact_key("mgrpo", other) != artifact_key("mgrpo", "run_1")


def test_prefect_refuses_what_the_key_is_made_from() -> None:
    with pytest.raises(ValueError, match="lowercase letters"):
        ArtifactCreate(key="Bad_Key", type="markdown", data="")
