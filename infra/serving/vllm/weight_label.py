"""What weights are called at a server: different weights, different names."""

from infra.store.policies import PolicyVersion

_ON = "+"


def weight_label(version: PolicyVersion) -> str:
    """Policy, number, and the beginning of the hash that stands for every file; an adapter's follow those of its base.

    `main/3/0123456789ab`, and `main/0/0123456789ab+4/ba9876543210`.
    """
    base = version.base
    if base is None:
        return f"{version.policy}/{version.version}/{version.sha256[:12]}"
    under = f"{version.policy}/{base.version}/{base.sha256[:12]}"
    return f"{under}{_ON}{version.version}/{version.sha256[:12]}"


def base_label(label: str) -> str:
    """Of the weights below an adapter; the label itself where there is none."""
    return label.split(_ON, 1)[0]
