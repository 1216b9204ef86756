"""Chance is derived from the keys of what it draws, so that a retry, a resume and a replay draw the same."""

import hashlib
import json

import numpy as np

Key = str | int


def entropy_of(*keys: Key) -> int:
    """128 bits that depend on every key and its place: sha256 over the keys as a JSON list.

    JSON keeps apart what string concatenation would merge: ("a", "b|c") and ("a|b", "c"), 1 and "1".
    """
    digest = hashlib.sha256(json.dumps(keys, ensure_ascii=True, separators=(",", ":")).encode()).digest()
    return int.from_bytes(digest[:16], "big")


def rng_of(*keys: Key) -> np.random.Generator:
    """A generator whose stream is a function of the keys alone."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy_of(*keys))))


def seed_of(*keys: Key) -> int:
    """A seed in [0, 2**63) for an engine that takes one integer (63 bits: Prefect and vLLM refuse more)."""
    return int(np.random.SeedSequence(entropy_of(*keys)).generate_state(1, np.uint64)[0] >> np.uint64(1))
