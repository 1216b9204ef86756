"""Prefect imports the file of a flow also to deploy it, and for the hook of a run that is cancelled: in a hurry."""

import subprocess
import sys

FLOWS = ("iteration", "policy_update", "train", "evaluate", "replay")


def test_a_flows_file_imports_nothing_that_computes():
    code = (
        f"import sys, {', '.join(f'flows.{name}' for name in FLOWS)}\n"
        "print(sorted({'torch', 'transformers', 'pyarrow', 'mlflow', 'matplotlib'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
