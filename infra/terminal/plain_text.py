"""Text of a store in a terminal: data, of which no markup and no control code takes effect."""

from rich.text import Text

from infra.traces.visible import visible


def plain(text: str) -> Text:
    """Text as rich prints it, finding no markup in it; what would steer a terminal is shown as its escape."""
    return Text(visible(text))


def on_one_line(text: str) -> str:
    """The same as one line: any run of white space is one space."""
    return visible(" ".join(text.split()))
