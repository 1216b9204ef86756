"""A policy's own chat template, split into what the template says and what others say."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from mgrpo_core.errors import TemplateError

# Letters and digits only: a template that trims, tests or escapes a content must leave the stand-in as it is.
_PROBE = "mgrpoprobe"


class AddedToken(Protocol):
    """An entry of a tokenizer's `added_tokens_decoder`."""

    @property
    def content(self) -> str: ...

    @property
    def special(self) -> bool: ...


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that a dialogue uses (`transformers.PreTrainedTokenizerFast` has it)."""

    @property
    def name_or_path(self) -> str: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        tools: list[dict[str, object]] | None,
        add_generation_prompt: bool,
        tokenize: bool,
    ) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool, split_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class ToolSignature:
    """What a template tells the policy about something it may call. `parameters`: JSON schema of the arguments."""

    name: str
    description: str
    parameters: Mapping[str, object]


class ChatTemplate:
    """Renders and encodes messages for one agent: its policy's template, with the agent's tools.

    Text of the template is encoded with control tokens parsed and none added, so a template's BOS is the only one.
    Content is encoded so that no control token can come out of it, whatever it spells. Not for use from two threads
    at once: a tokenizer switches its parsing of special tokens in place.

    Attributes:
        end_of_turn_id: the control token that closes an assistant's message in this template.
        stop_token_ids: ids that end a turn when sampled: `end_of_turn_id`, and the tokenizer's EOS if it is another.
    """

    def __init__(self, tokenizer: ChatTokenizer, tools: Sequence[ToolSignature] = ()) -> None:
        """Probe the template once.

        Raises: TemplateError if there is no template, if it refuses or drops a role that rollouts use (system, user,
            assistant, tool), or if nothing marks the end of an assistant's turn.
        """
        self._tokenizer = tokenizer
        self._tools = [_json_tool(tool) for tool in tools]
        added = dict(tokenizer.added_tokens_decoder)
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._special = _alternatives([token.content for token in added.values() if token.special])
        after_assistant, whole = self._probe()
        # A template's own marks that are no special tokens (Qwen's <tool_response>): nobody may forge those either.
        marks = [token.content for token in added.values() if token.special or token.content in whole]
        self._control = _alternatives(marks)
        self.end_of_turn_id = self._end_of_turn(after_assistant, frozenset(added))
        eos = tokenizer.eos_token_id
        self.stop_token_ids = (
            (self.end_of_turn_id,) if eos is None or eos == self.end_of_turn_id else (self.end_of_turn_id, eos)
        )
        self._cached_markup = lru_cache(maxsize=512)(self._encode_markup)

    @property
    def model_name(self) -> str:
        """How to call the tokenizer in a message."""
        return self._tokenizer.name_or_path or "the policy's tokenizer"

    def render(self, messages: Sequence[Mapping[str, str]], *, generation_prompt: bool = True) -> str:
        """The template's text for these messages (keys `role`, `content` and, for a tool, `name`)."""
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=self._tools or None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
            )
        except Exception as error:  # jinja's own errors and whatever a template's code raises
            roles = ", ".join(message["role"] for message in messages)
            raise TemplateError(
                f"{self.model_name}: the chat template cannot render the roles [{roles}]: {error} "
                "Give the tokenizer a chat_template that takes system, user, assistant and tool messages with text "
                "contents (ChatML does): set tokenizer.chat_template and save the tokenizer into the policy's folder."
            ) from error

    def encode_markup(self, text: str) -> tuple[int, ...]:
        """Ids of the template's own text, control tokens parsed, no BOS or EOS added."""
        return self._cached_markup(text)

    def encode_content(self, text: str, *, trusted: bool = False) -> list[int]:
        """Ids of a message's content: never a control token, whatever it spells.

        Args:
            text: lone surrogates are replaced by "?", which no tokenizer could encode.
            trusted: a system prompt of ours may use the template's non-special marks (`<tool_call>`) as tokens.
        """
        control = self._special if trusted else self._control
        text = text.encode("utf-8", "replace").decode("utf-8")
        ids: list[int] = []
        for part in split_inside(control, text):
            # Both guards are needed: some vocabularies hold the control string as an ordinary word as well.
            ids.extend(self._tokenizer.encode(part, add_special_tokens=False, split_special_tokens=True))
        return ids

    def encode_turn(self, text: str) -> np.ndarray:
        """Ids that a policy would sample to say `text` and end its turn, int32 [T]: for demonstrations."""
        return np.asarray([*self._encode_markup(text), self.end_of_turn_id], dtype=np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, control tokens spelled out: a reader must see that the policy sampled one."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def spelled_out(self, ids: Sequence[int]) -> list[str]:
        """The decoded text, cut inside each control string that was spelled by ordinary tokens.

        Whoever encodes the parts one by one turns no spelling into a control token; those that were sampled as
        such stay whole.
        """
        text = self.decode(ids)
        sampled = sum(token_id in self._special_ids for token_id in ids)
        if self._special is None or len(self._special.findall(text)) == sampled:
            return [text]
        parts = [""]
        run: list[int] = []
        for token_id in [*ids, None]:
            if token_id is not None and token_id not in self._special_ids:
                run.append(token_id)
                continue
            first, *rest = split_inside(self._special, self.decode(run))
            parts[-1] += first
            parts.extend(rest)
            run = []
            if token_id is not None:
                parts[-1] += self.decode([token_id])
        return parts

    def check_one_bos(self, prompt_ids: Sequence[int]) -> None:
        """Raise TemplateError if a prompt opens with two BOS tokens."""
        bos = self._tokenizer.bos_token_id
        if bos is not None and list(prompt_ids[:2]) == [bos, bos]:
            raise TemplateError(
                f"{self.model_name}: the rendered prompt begins with two BOS tokens ({bos}), expected at most one. "
                "Remove one from the chat template."
            )

    def _encode_markup(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=False))

    def _probe(self) -> tuple[str, str]:
        """Text between an assistant's message and the reply to it, and the whole rendering."""
        roles = ("system", "user", "assistant", "tool")
        messages = [{"role": role, "content": f"{_PROBE}{role}"} for role in roles]
        whole = self.render(messages)
        for message in messages:
            if message["content"] not in whole:
                raise TemplateError(
                    f"{self.model_name}: the chat template drops messages of role {message['role']!r}, which the "
                    "policy must see. Give the tokenizer a chat_template that renders system, user, assistant and "
                    "tool messages (ChatML does)."
                )
        rest = whole.split(f"{_PROBE}assistant", 1)[1]
        return rest.split(f"{_PROBE}tool", 1)[0], whole

    def _end_of_turn(self, after_assistant: str, added_ids: frozenset[int]) -> int:
        ids = self._encode_markup(after_assistant)
        for place, token_id in enumerate(ids):
            if token_id in added_ids and not self.decode(ids[:place]).strip():
                return token_id
        if self._tokenizer.eos_token_id is not None:
            return self._tokenizer.eos_token_id
        raise TemplateError(
            f"{self.model_name}: the chat template closes an assistant's message with {after_assistant!r}, which holds "
            "no control token, and the tokenizer has no EOS, so nothing could end a turn. Add an end-of-turn token to "
            "the template, or set tokenizer.eos_token."
        )


def split_inside(control: re.Pattern[str] | None, text: str) -> list[str]:
    """`text` cut after the first character of every control string: no part holds a whole one."""
    if control is None or not text:
        return [text]
    parts: list[str] = []
    start = 0
    searched = 0
    # One search after another, not finditer: what follows a cut may begin another control string.
    while match := control.search(text, searched):
        searched = match.start() + 1
        if len(match.group()) > 1:  # of one character there is no inside; it is left to the tokenizer
            parts.append(text[start:searched])
            start = searched
    parts.append(text[start:])
    return parts


def _alternatives(strings: Sequence[str]) -> re.Pattern[str] | None:
    # Longest first, so that of two control strings with one beginning the whole is found.
    found = sorted({string for string in strings if string}, key=lambda string: (-len(string), string))
    return re.compile("|".join(re.escape(string) for string in found)) if found else None


def _json_tool(tool: ToolSignature) -> dict[str, object]:
    function: dict[str, object] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }
    return {"type": "function", "function": function}
