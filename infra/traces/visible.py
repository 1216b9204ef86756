"""Text of a store as people may see it: what a policy or a tool wrote is data, and steers no terminal and no page."""

_KEPT = "\n\t"


def visible(text: str) -> str:
    r"""The text with control codes, direction overrides and other unprintable characters as their escapes, `\x1b`.

    Line breaks and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in _KEPT else repr(char)[1:-1] for char in text)


def shortened(text: str, most: int) -> str:
    """One visible line of at most so many characters, … at its end where it goes on."""
    line = visible(" ".join(text[: 4 * most].split()))
    return line if len(line) <= most and len(text) <= 4 * most else f"{line[: most - 1]}…"
