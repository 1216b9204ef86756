"""What weights are called at a server: different weights, different names."""

from infra.store.policies import PolicyVersion


def weight_label(version: PolicyVersion) -> str:
    """Policy, number, and the beginning of the hash that stands for every file of the version."""
    return f"{version.policy}/{version.version}/{version.sha256[:12]}"
