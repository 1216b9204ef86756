"""Different LLMs, tokenizers included, in one team: a whole iteration with delegations, in one process."""

import pytest

from tests.flows.small_team import save_config
from tests.flows.two_families import (
    check_that_each_kept_to_its_own_family,
    config_of_two_families,
    save_two_families,
)


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    return save_two_families(tmp_path_factory.mktemp("families"))


def test_a_qwen_and_a_llama_with_a_tokenizer_each_are_rolled_out_and_trained_together(program, families, tmp_path):
    store = tmp_path / "store"
    config = save_config(tmp_path / "run.yaml", config_of_two_families(families))
    ended = program.run("train", config, "--run", "r", "--store", store)
    assert ended.code == 0, ended.err
    check_that_each_kept_to_its_own_family(store)
