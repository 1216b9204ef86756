"""ChatML that opens with worked examples: a model of 135 M parameters follows turns that it sees, not descriptions.

Told in words to answer between tags, SmolLM2-135M-Instruct never did in 8 tries; after three example turns always.
"""

from collections.abc import Sequence

Turn = tuple[str, str]
"""Role and content."""

_SUMS = ((3, 4), (9, 2), (1, 7))


def _call(a: int, b: int) -> str:
    return f'<tool_call>{{"name": "solver", "arguments": {{"task": "{a} + {b}"}}}}</tool_call>'


MAIN_EXAMPLES: tuple[Turn, ...] = tuple(
    turn
    for a, b in _SUMS
    for turn in (
        ("user", f"What is {a} + {b}?"),
        ("assistant", _call(a, b)),
        ("tool", str(a + b)),
        ("assistant", f"<answer>{a + b}</answer>"),
    )
)
SUB_EXAMPLES: tuple[Turn, ...] = tuple(
    turn for a, b in _SUMS for turn in (("user", f"{a} + {b}"), ("assistant", f"<answer>{a + b}</answer>"))
)


def chat_template(examples: Sequence[Turn]) -> str:
    """A Jinja template: the first message, which is the system's, then the examples, then the dialogue."""
    shown = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in examples)
    quoted = shown.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
        f"{{% if loop.first %}}{{{{ '{quoted}' }}}}{{% endif %}}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
