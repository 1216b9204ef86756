from pathlib import Path

import pytest
import torch

from infra.training.rank_reports import RankReports
from mgrpo_core.errors import InfrastructureError, NonFiniteError
from mgrpo_core.update.ranks import OtherRankError


@pytest.fixture
def reports(tmp_path: Path) -> RankReports:
    return RankReports(tmp_path)


def test_tokens_are_those_of_all_ranks(reports):
    assert reports.tokens() == (0, 0)
    reports.tell_progress(0, 10, 50)
    reports.tell_progress(1, 5, 40)
    reports.tell_progress(1, 8, 40)
    assert reports.tokens() == (18, 90)


def test_an_error_of_ours_is_raised_again_as_it_was(reports):
    reports.tell_error(1, "main", NonFiniteError("trajectory x: no number"))
    with pytest.raises(NonFiniteError, match=r"^trajectory x: no number$"):
        raise reports.error().raised_again()


def test_an_error_that_the_starter_does_not_know_is_raised_as_what_it_refines(reports):
    reports.tell_error(1, "main", OtherRankError("another"))
    assert type(reports.error().raised_again()) is NonFiniteError


def test_out_of_memory_says_what_to_lower(reports):
    reports.tell_error(
        1, "main", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nLong story")
    )
    error = reports.error().raised_again()
    assert isinstance(error, InfrastructureError)
    assert "rank 1 is out of memory (CUDA out of memory. Tried to allocate 20.00 GiB.). Lower update.micro" in str(
        error
    )


def test_a_rank_that_knows_comes_before_one_that_lost_it(reports):
    reports.tell_error(0, "main", RuntimeError("Connection closed by peer"))
    reports.tell_error(1, "main", MemoryError())
    assert "rank 1 is out of memory (MemoryError)" in str(reports.error().raised_again())


def test_of_errors_that_nobody_expected_the_first_is_shown(reports):
    reports.tell_error(1, "main", KeyError("x"))
    reports.tell_error(0, "main", RuntimeError("Connection closed by peer"))
    assert str(reports.error().raised_again()) == "update of policy 'main': rank 1 failed with KeyError: 'x'"


def test_figures_are_there_when_they_are_told(reports):
    assert reports.figures() is None
    reports.tell_figures({"loss": 0.1})
    assert reports.figures() == {"loss": 0.1}
