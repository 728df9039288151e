"""The integer that the answer to a mathematical problem ends with."""

import re

# A number with its sign, unless the sign joins it to something; thousands may have commas.
_NUMBER = re.compile(r"(?:(?<![\w)\]}])[-−])?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\d)")
_WRAPPER = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox|boldsymbol)\s*")
_UNIT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^\d{}]*\}\s*$")
_ORNAMENT = re.compile(r"\\[,;:! ]|\\left|\\right|\\displaystyle|\^\\circ|\^\{\\circ\}|\\degree|[\s${}]")


def final_integer(text: str) -> str | None:
    r"""Return the integer that a solution gives as its answer.

    1. If there is a closed `\boxed{...}`, the last one decides: it must hold an integer, perhaps behind
       an equals sign, and besides only braces, dollar signs, spaces, `\text` and its like, a degree
       sign or a full stop, and words in `\text` at its end, as a unit.
    2. Else it is the last integer of the text; numbers with a fractional part are passed over.

    `7`, `007` and `7.0` are the same integer, and `1,234` is one. It is returned in its shortest form.
    """
    box = _last_box(text)
    if box is not None:
        plain = _ORNAMENT.sub("", _WRAPPER.sub("", _UNIT.sub("", box.replace("{,}", ",")))).rstrip(".")
        number = _NUMBER.fullmatch(plain.rpartition("=")[2])
        return _integer(number[0]) if number else None
    integers = (_integer(number) for number in _NUMBER.findall(text))
    return next((value for value in reversed(list(integers)) if value is not None), None)


def _integer(number: str) -> str | None:
    whole, _, fraction = number.replace(",", "").replace("−", "-").partition(".")
    if fraction.strip("0"):
        return None
    # Not an int: a model that goes round in circles writes more digits than Python reads.
    digits = whole.lstrip("-").lstrip("0") or "0"
    return f"-{digits}" if whole.startswith("-") and digits != "0" else digits


def _last_box(text: str) -> str | None:
    """Return what the last closed box holds."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if not depth:
                return text[start:place]
    return None
