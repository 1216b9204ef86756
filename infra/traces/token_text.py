"""What each token id says, by the tokenizer of the policy version that sampled it."""

import threading
from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer

from infra.store.policies import require_version
from infra.store.runs import StoredRun
from infra.store.stored_iteration import StoredIteration
from mgrpo_core.errors import MGRPOError

_TOKENIZER = "tokenizer.json"
_WORD_START = "▁"  # SentencePiece's; its decoders drop it at the start of a text


class TokenTexts:
    """Tokenizers of a run's policy versions, each read once."""

    def __init__(self, run: StoredRun) -> None:
        self._run = run
        self._read = lru_cache(maxsize=16)(self._tokenizer)
        self._lock = threading.Lock()

    def texts(self, stored: StoredIteration, policy: str, ids: Sequence[int]) -> list[str] | None:
        """The text of each id alone; None where the policy's version has no tokenizer that can be read.

        A character of several tokens shows as U+FFFD in each.
        """
        step = stored.manifest.policies.get(policy)
        if step is None:
            return None
        with self._lock:
            tokenizer = self._read(policy, step.folder, step.from_version)
        if tokenizer is None:
            return None
        texts = tokenizer.decode_batch([[one] for one in ids], skip_special_tokens=False)
        return [_with_space(text, tokenizer.id_to_token(one)) for one, text in zip(ids, texts, strict=True)]

    def _tokenizer(self, policy: str, folder: str, version: int) -> Tokenizer | None:
        files = self._run.files
        try:
            found = require_version(files, self._run.name, policy, folder, version)
            if _TOKENIZER not in found.files and found.base is not None:
                found = require_version(files, self._run.name, policy, folder, found.base.version)
            if _TOKENIZER not in found.files:
                return None
            return Tokenizer.from_buffer(files.read(found.files[_TOKENIZER].path))
        except (MGRPOError, ValueError):
            return None


def _with_space(text: str, token: str | None) -> str:
    return f" {text}" if token and token.startswith(_WORD_START) and not text.startswith(" ") else text
