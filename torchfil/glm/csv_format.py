"""The text format of a table: its encoding, the separator of its columns, and its decimal sign.

The format is detected from the content if possible. An ambiguous table is refused, because a decimal comma read as a
thousands separator changes every number by a factor of 1,000.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

__all__ = ["Format", "detect_format", "lines_of", "read_content"]

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_NAMES = {"utf-8": "UTF-8", "utf-8-sig": "UTF-8", "utf-16": "UTF-16", "cp1252": "Windows-1252"}
_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_SAMPLE = 1000  # rows from which separator and decimal sign are detected
_STEP = 2**20  # bytes that are decoded at a time
_CONTROLS = bytes(code for code in range(32) if code not in b"\t\n\r\f")  # no text has these
_DECIMAL_COMMA = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:\.\d{3})+),\d+(?:[eE][+-]?\d+)?")
_DECIMAL_POINT = re.compile(r"[+-]?\d*\.\d+(?:[eE][+-]?\d+)?")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(?:([,.])\d{3})(?:\1\d{3})*")  # 1,234 or 1.234: may be a decimal as well


@dataclass(frozen=True)
class Format:
    """How a table is written.

    Attributes:
        encoding: Python's name of the encoding.
        separator: The separator between columns, one character.
        decimal: "." or ",".

    Example:
        >>> str(Format("cp1252", ";", ","))
        'Windows-1252, columns separated by semicolons, decimal commas'
    """

    encoding: str
    separator: str
    decimal: str

    def __str__(self) -> str:
        between = SEPARATORS.get(self.separator, repr(self.separator))
        sign = "commas" if self.decimal == "," else "points"
        return f"{_NAMES.get(self.encoding, self.encoding)}, columns separated by {between}, decimal {sign}"


def read_content(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a file, unpacked if it is gzipped.

    Raises:
        ValueError: It is a damaged gzip file.
    """
    content = Path(path).read_bytes()
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is a gzip file that is truncated or damaged ({error}); copy it again") from error


def detect_format(
    content: bytes,
    where: str | os.PathLike[str] = "the table",
    *,
    encoding: str | None = None,
    separator: str | None = None,
    decimal: str | None = None,
) -> Format:
    r"""The format of a table; given parts are used as they are, the rest is detected from the content.

    Raises:
        ValueError: It is not text, or is ambiguous.

    Example:
        >>> detect_format("größe;dosis\n1,82;3\n1,7;2,5\n".encode("cp1252"))
        Format(encoding='cp1252', separator=';', decimal=',')
    """
    encoding = _encoding_of(content, where) if encoding is None else _checked_encoding(encoding, content, where)
    separator = "\t" if separator in ("\\t", "tab") else separator
    if separator is None:
        separator = _separator_of(content, encoding, where)
    elif len(separator) != 1 or separator in '"\r\n':
        raise ValueError(f"--separator {separator!r} must be one character, or 'tab'")

    if decimal is None:
        decimal = _decimal_of(_sample(content, encoding, separator), where)
    elif decimal not in (".", ","):
        raise ValueError(f"--decimal {decimal!r} must be '.' or ','")
    return Format(encoding, separator, decimal)


def lines_of(content: bytes, encoding: str, separator: str) -> Iterator[tuple[int, list[str]]]:
    """The lines that are not empty, as (line number in the file, from 1; its fields)."""
    stream = io.TextIOWrapper(io.BytesIO(content), encoding=encoding, newline="")
    reader = csv.reader(stream, delimiter=separator, skipinitialspace=separator != " ", strict=True)
    for fields in reader:
        if fields and (len(fields) > 1 or fields[0].strip()):
            yield reader.line_num, fields


def _encoding_of(content: bytes, where: str | os.PathLike[str]) -> str:
    """The encoding by its byte-order mark; else UTF-8 if that fits; else Windows-1252, which accepts most bytes."""
    for mark, name in (
        (codecs.BOM_UTF8, "utf-8-sig"),
        (codecs.BOM_UTF16_LE, "utf-16"),
        (codecs.BOM_UTF16_BE, "utf-16"),
    ):
        if content.startswith(mark):
            return _checked_encoding(name, content, where)

    is_text = not any(code in content for code in _CONTROLS)
    for name in ("utf-8", "cp1252"):
        if is_text and _decodes(content, name) is None:
            return name
    raise ValueError(
        f"{where} is not text in UTF-8, UTF-16 (with its mark) or Windows-1252; if it is a table in another encoding, "
        "name that: --encoding"
    )


def _checked_encoding(name: str, content: bytes, where: str | os.PathLike[str]) -> str:
    try:
        " ".encode(name)
        codecs.getincrementaldecoder(name)
    except (LookupError, ValueError) as error:
        raise ValueError(f"--encoding {name!r} is no encoding that Python knows, such as utf-8 or cp1252") from error
    problem = _decodes(content, name)
    if problem is not None:
        raise ValueError(f"{where} is not in {_NAMES.get(name, name)}: {problem}; name another encoding: --encoding")
    return name


def _decodes(content: bytes, encoding: str) -> UnicodeError | None:
    """What is wrong with content in an encoding, decoded piece by piece."""
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        for start in range(0, len(content), _STEP):
            decoder.decode(content[start : start + _STEP])
        decoder.decode(b"", True)
    except UnicodeError as error:
        return error
    return None


def _sample(content: bytes, encoding: str, separator: str) -> list[list[str]]:
    """The first rows, including the line of names; empty if the separator does not fit the quotes."""
    try:
        return [fields for _, fields in islice(lines_of(content, encoding, separator), _SAMPLE)]
    except csv.Error:
        return []


def _separator_of(content: bytes, encoding: str, where: str | os.PathLike[str]) -> str:
    """The separator that gives the most columns, equally many in all rows; if none fits all rows, the most names."""
    widths, steady = dict[str, int](), dict[str, int]()
    for separator in SEPARATORS:
        rows = _sample(content, encoding, separator)
        widths[separator] = len(rows[0]) if rows else 0
        if widths[separator] > 1 and {len(fields) for fields in rows} == {widths[separator]}:
            steady[separator] = widths[separator]

    fitting = steady or widths
    most = max(fitting.values())
    best = [separator for separator, width in fitting.items() if width == most]
    if len(best) > 1 and most > 1:
        named = " or ".join(SEPARATORS[separator] for separator in best)
        raise ValueError(f"the columns of {where} could be separated by {named}; say by which: --separator {best[0]!r}")
    return best[0]


def _decimal_of(rows: Sequence[Sequence[str]], where: str | os.PathLike[str]) -> str:
    """The decimal sign of most entries, without those that could contain a thousands separator."""
    seen: Counter[str] = Counter()
    unclear = ""
    for fields in rows[1:]:
        for field in fields:
            text = field.strip()
            if _THOUSANDS.fullmatch(text):
                unclear = unclear or (text if "," in text else "")
            elif _DECIMAL_COMMA.fullmatch(text):
                seen[","] += 1
            elif _DECIMAL_POINT.fullmatch(text):
                seen["."] += 1

    if unclear and not seen:
        raise ValueError(
            f"{unclear!r} in {where} can be {unclear.replace(',', '')} or {unclear.replace(',', '.', 1)}; say that the "
            "comma is a decimal sign (--decimal ,), or write the numbers without thousands separators"
        )
    return "," if seen[","] > seen["."] else "."
