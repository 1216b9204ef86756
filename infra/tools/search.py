"""Full-text search over short documents, ranked by BM25: SQLite's FTS5."""

import re
import sqlite3
from collections.abc import Mapping, Sequence

from mgrpo_core.errors import ToolError

_WORD = re.compile(r"\w+")


class SearchTool:
    """The `search` tool over a corpus held in memory.

    The best documents by BM25 are shown in the corpus's own order: the right one is not always the first.
    """

    name = "search"
    description = "Finds documents by their words."
    parameters: Mapping[str, object] = {
        "type": "object",
        "properties": {"query": {"type": "string", "pattern": "\\w", "description": "Words to look for."}},
        "required": ["query"],
        "additionalProperties": False,
    }

    def __init__(self, documents: Sequence[str], *, results: int = 3) -> None:
        self._results = results
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute("CREATE VIRTUAL TABLE corpus USING fts5(text, tokenize = 'unicode61 remove_diacritics 2')")
        self._index.executemany("INSERT INTO corpus (rowid, text) VALUES (?, ?)", enumerate(documents, start=1))

    async def call(self, arguments: Mapping[str, object]) -> str:
        """The documents that match best, one a line. Raises: ToolError if the query holds no word."""
        return self.find(str(arguments["query"]))

    def find(self, query: str) -> str:
        """The same, for whoever does not wait."""
        words = _WORD.findall(query)
        if not words:
            raise ToolError("query: holds no word to look for.")
        # Quoted, so that no word is read as an operator of the query language; the whole phrase counts as a rare word.
        match = " OR ".join(f'"{term}"' for term in (" ".join(words), *words))
        rows = self._index.execute(
            "SELECT rowid, text FROM corpus WHERE corpus MATCH ? ORDER BY bm25(corpus), rowid LIMIT ?",
            (match, self._results),
        ).fetchall()
        return "\n".join(f"- {text}" for _, text in sorted(rows)) or "Nothing found."
