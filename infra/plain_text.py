"""Text of a store in a terminal: data, of which no markup and no control code takes effect."""

from rich.text import Text


def visible(text: str) -> str:
    """Text as it stands; what would steer a terminal, or could not be seen, is shown as its escape. Lines stay."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def plain(text: str) -> Text:
    """The same for rich, which finds no markup in it."""
    return Text(visible(text))


def on_one_line(text: str) -> str:
    """The same as one line: any run of white space is one space."""
    return visible(" ".join(text.split()))
