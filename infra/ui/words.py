"""Numbers as the pages write them."""

import math

NONE = "–"


def number(value: float | None, digits: int = 3) -> str:
    """So many significant digits; – where there is none."""
    if value is None or not math.isfinite(value):
        return NONE if value is None or math.isnan(value) else str(value)
    if value == 0:
        return "0"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.{digits}g}" if abs(value) < 1e4 else f"{value:,.0f}"


def signed(value: float | None) -> str:
    """With its sign, so that a glance tells."""
    text = number(value)
    return text if value is None or value <= 0 else f"+{text}"


def share(value: float | None) -> str:
    """In percent."""
    return NONE if value is None else f"{100 * value:.3g} %"


def counted(count: int, one: str, many: str) -> str:
    return f"1 {one}" if count == 1 else f"{count:,} {many}"
