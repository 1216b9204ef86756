"""Token bookkeeping of one trajectory: the context that was sent, and who produced which token of it."""

import hashlib
import re
from dataclasses import dataclass

import numpy as np

from mgrpo_core.dialogue.template import ChatTemplate
from mgrpo_core.errors import ShapeError, TemplateError
from mgrpo_core.trajectories import FinishReason, Message


@dataclass(frozen=True, slots=True)
class Observation:
    """What of a reply the policy saw.

    Attributes:
        tokens: ids of the content in the context, the cut marker included.
        chars: size of the reply before it was cut.
        cut: True if less than the whole reply went in.
    """

    tokens: int
    chars: int
    cut: bool


@dataclass(frozen=True, slots=True)
class TokenStream:
    """The token part of a `Trajectory`: equal lengths [T], same meaning as there."""

    token_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    segment_starts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a rendering: the template's text, or the content of message number `content_of`."""

    text: str
    content_of: int | None = None


class Transcript:
    """One agent's dialogue with its policy, from the first prompt token on.

    The template is rendered with stand-ins for all contents and cut at them. While each rendering continues the one
    before, only what is new is encoded and appended; sampled ids are never encoded again. Where the template rewrites
    what came before (drops earlier reasoning, say), a new segment begins with the whole context as it is now sent, of
    which nothing is trained but what is then sampled. A difference in white space around a policy's own text is no
    rewriting: the sampled ids stay.
    """

    def __init__(self, template: ChatTemplate, *, system: str, user: str) -> None:
        """Begin with a system prompt ("" for none) and what the agent is asked.

        Raises: TemplateError if the template drops either, or doubles BOS.
        """
        self._template = template
        # The stand-ins must not occur in what a policy says; it never sees this hash.
        self._nonce = "q" + hashlib.sha256(f"{len(system)}:{system}{user}".encode("utf-8", "replace")).hexdigest()[:20]
        self._mark = re.compile(rf"{self._nonce}(?:m(\d+)|cut)q")
        self._rows: list[dict[str, str]] = []
        self._messages: list[Message] = []
        self._content_ids: dict[int, list[int]] = {}
        self._pending: tuple[list[int], str, FinishReason] | None = None
        self._stream_ids: list[int] = []
        self._stream_mask: list[bool] = []
        self._stream_logprobs: list[float] = []
        self._segment_starts = [0]
        if system:
            self._add_content("system", system, template.encode_content(system, trusted=True))
        self._add_content("user", user, template.encode_content(user))
        self._rendered = template.render(self._rows)
        pieces = self._pieces(self._rendered)
        for index, row in enumerate(self._rows):
            self._require_content(pieces, index, row["role"])
        ids = self._encode(pieces)
        template.check_one_bos(ids)
        self._append_context(ids)

    @property
    def context_ids(self) -> np.ndarray:
        """What to send to the policy next, int32 [T]: the newest segment."""
        return np.asarray(self._stream_ids[self._segment_starts[-1] :], dtype=np.int32)

    @property
    def context_tokens(self) -> int:
        return len(self._stream_ids) - self._segment_starts[-1]

    @property
    def length(self) -> int:
        """Tokens of the whole stream, all segments."""
        return len(self._stream_ids)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The dialogue as text; replies as they were cut."""
        return tuple(self._messages)

    @property
    def opening(self) -> str:
        """The markup that the template already opened in the policy's name: "<think>" or nothing."""
        return "<think>" if self._rendered.rstrip().endswith("<think>") else ""

    def stream(self) -> TokenStream:
        """The tokens so far."""
        return TokenStream(
            np.asarray(self._stream_ids, dtype=np.int32),
            np.asarray(self._stream_mask, dtype=np.bool_),
            np.asarray(self._stream_logprobs, dtype=np.float32),
            tuple(self._segment_starts),
        )

    def sampled(self, token_ids: np.ndarray, logprobs: np.ndarray | None, finish_reason: FinishReason) -> str:
        """Append what the policy sampled, exactly as it did, and return its text without the final stop token.

        Args:
            token_ids: [T], T >= 1, the sampled stop token included where there is one.
            logprobs: [T]; None where nobody sampled (a demonstration): stored as NaN.
            finish_reason: "length" if the turn was cut: no end mark is then made up; where the dialogue goes on all the
                same, the template's own is context, with mask 0.
        Raises: ShapeError on unequal lengths or no token.
        """
        ids = [int(token_id) for token_id in token_ids]
        values = [float("nan")] * len(ids) if logprobs is None else [float(value) for value in logprobs]
        if not ids or len(values) != len(ids):
            raise ShapeError(
                f"sampled: {len(ids)} token ids and {len(values)} logprobs, expected one each, at least 1."
            )
        assert self._pending is None, "two turns in a row: observe() goes between them"
        said = ids[:-1] if finish_reason == "stop" and ids[-1] in self._template.stop_token_ids else ids
        text = self._template.decode(said)
        self._stream_ids += ids
        self._stream_mask += [True] * len(ids)
        self._stream_logprobs += values
        shown = f"{self._nonce}cutq".join(self._template.spelled_out(said))
        self._rows.append({"role": "assistant", "content": shown})
        self._messages.append(Message("assistant", text))
        self._pending = (ids, shown, finish_reason)
        return text

    def observe(
        self, text: str, *, name: str | None = None, max_tokens: int, context_length: int, reply_tokens: int
    ) -> Observation | None:
        """Append a tool's or sub-agent's reply and open the policy's next turn.

        Args:
            text: the reply, untrusted.
            name: who speaks.
            max_tokens: the reply is cut, with a marker, to this or to what the context holds beside the policy's next
                turn, whichever is less.
            context_length: most tokens of prompt plus completion.
            reply_tokens: wish for the next turn; it gets at least half of what is free, so some of this is kept.
        Returns: what went in, or None, with the transcript unchanged, if the context has no room for a reply and an
            answer to it.
        Raises: TemplateError if the template drops the reply.
        """
        assert self._pending is not None, "a reply to nothing: sampled() goes before it"
        ids, shown, finish_reason = self._pending
        index = len(self._rows)
        row = {"role": "tool", "content": self._stand_in(index)}
        if name is not None:
            row["name"] = name
        rendered = self._template.render([*self._rows, row])
        rest = _continuation(self._rendered, shown, rendered)
        pieces = self._pieces(rendered if rest is None else rest)
        self._require_content(pieces, index, "tool")
        fixed = self._encode(pieces)
        used = 0 if rest is None else self.context_tokens
        continues = rest is not None and finish_reason == "stop"
        fixed_head = self._already_sampled(fixed, ids[-1]) if continues else 0
        free = context_length - used - (len(fixed) - fixed_head)
        kept = min(reply_tokens, (free + 1) // 2)
        content = self._template.encode_content(text)
        seen = self._cut(content, len(text), min(max_tokens, free - kept))
        if seen is None:
            return None

        self._content_ids[index] = seen
        cut = len(seen) != len(content) or seen != content
        new = self._encode(pieces)[fixed_head:]
        self._rows.append(row)
        self._messages.append(Message("tool", self._template.decode(seen) if cut else _encodable(text), name))
        if rest is None:
            self._segment_starts.append(len(self._stream_ids))
        self._append_context(new)
        self._rendered = rendered
        self._pending = None
        return Observation(len(seen), len(text), cut)

    def _add_content(self, role: str, text: str, ids: list[int]) -> None:
        index = len(self._rows)
        self._rows.append({"role": role, "content": self._stand_in(index)})
        self._messages.append(Message("system" if role == "system" else "user", _encodable(text)))
        self._content_ids[index] = ids

    def _stand_in(self, index: int) -> str:
        return f"{self._nonce}m{index}q"

    def _pieces(self, rendered: str) -> list[Piece]:
        pieces: list[Piece] = []
        start = 0
        for match in self._mark.finditer(rendered):
            pieces.append(Piece(rendered[start : match.start()]))
            if match.group(1) is not None:
                pieces.append(Piece("", int(match.group(1))))
            start = match.end()
        pieces.append(Piece(rendered[start:]))
        return [piece for piece in pieces if piece.text or piece.content_of is not None]

    def _encode(self, pieces: list[Piece]) -> list[int]:
        """Ids of the pieces; a content that has none yet counts as empty."""
        ids: list[int] = []
        for piece in pieces:
            if piece.content_of is None:
                ids.extend(self._template.encode_markup(piece.text))
            else:
                ids.extend(self._content_ids.get(piece.content_of, ()))
        return ids

    def _require_content(self, pieces: list[Piece], index: int, role: str) -> None:
        if not any(piece.content_of == index for piece in pieces):
            raise TemplateError(
                f"{self._template.model_name}: the chat template drops the content of message {index} (role {role}), "
                "so the policy would not see it. Give the tokenizer a chat_template that renders every new message."
            )

    def _already_sampled(self, ids: list[int], stop_id: int) -> int:
        """How many leading ids say the end of turn that the policy sampled itself: white space, then `stop_id`."""
        if stop_id not in ids:
            return 0
        place = ids.index(stop_id)
        return 0 if self._template.decode(ids[:place]).strip() else place + 1

    def _cut(self, content: list[int], chars: int, budget: int) -> list[int] | None:
        if len(content) <= budget:
            return content
        for marker in (f"\n[cut: {chars} characters in all]", "…"):
            ids = self._template.encode_content(marker)
            if budget >= 2 * len(ids):
                return [*content[: budget - len(ids)], *ids]
        return None

    def _append_context(self, ids: list[int]) -> None:
        self._stream_ids += ids
        self._stream_mask += [False] * len(ids)
        self._stream_logprobs += [float("nan")] * len(ids)


def _continuation(before: str, said: str, after: str) -> str | None:
    """What `after` adds to `before` + `said`, white space of `said` aside; None if it does not continue them."""
    if not after.startswith(before):
        return None
    at = len(before)
    for char in said:
        if char.isspace():
            continue
        while at < len(after) and after[at].isspace():
            at += 1
        if at == len(after) or after[at] != char:
            return None
        at += 1
    # Of the white space that ends `said`, what the template kept is already in the sampled ids.
    for char in said[len(said.rstrip()) :]:
        if at < len(after) and after[at] == char:
            at += 1
    return after[at:]


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
