"""Words that messages, titles and tables share."""


def counted(count: int, noun: str) -> str:
    """Return a number and what it counts: `1 request`, `1,200 requests`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
