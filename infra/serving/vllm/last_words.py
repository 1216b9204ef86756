"""The end of a process's log, for the message that says how it ended."""

from pathlib import Path


def last_words(log: Path, lines: int = 15) -> str:
    """Follows a sentence."""
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    return "\n".join([f" The end of {log}:", *said])
