"""Sizes for people."""


def show_bytes(count: float) -> str:
    """A number of bytes for people: 3 significant digits, decimal units."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
