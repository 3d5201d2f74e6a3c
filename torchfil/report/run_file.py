"""A saved run as a file: arrays and a JSON header, nothing that is executed; docs/run-file.md describes it.

A run of many examples has its rows in part files beside it (:mod:`torchfil.report.run_parts`), which are mapped into
memory and read when they are asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as from_bytes
from safetensors.numpy import save as to_bytes

from torchfil.report.parted import ByExample, PartedArray, PartedColumns
from torchfil.report.run_parts import PartWriter, open_parts, parts_named_in
from torchfil.report.saved_run import AttackRecord, Attributes, Pictures, QuestionRecord, SavedRun, Texts
from torchfil.utils.errors import RunFileError
from torchfil.utils.files import write_bytes

__all__ = ["FORMAT", "ROWS_PER_PART", "SUFFIX", "VERSION", "VERSION_IN_PARTS", "load", "pack", "save", "signed"]

FORMAT = "torchfil-run"
VERSION, VERSION_IN_PARTS = 1, 2
SUFFIX = ".fil"
ROWS_PER_PART = 2**20  # of a run with more examples than that
_LARGEST_HEADER = 100_000_000  # the format's own limit, in bytes


def save(run: SavedRun, path: str | os.PathLike[str], *, rows_per_part: int = ROWS_PER_PART) -> Path:
    """Write a run; the file is replaced only when complete, and only its owner may read it (mode 0600).

    Args:
        run: What to write.
        path: The file. Rows beyond ``rows_per_part`` go into a folder beside it, ``NAME.parts``.
        rows_per_part: A run of more examples is written in parts of so many.

    Returns:
        The path written.
    """
    target = Path(path)
    if len(run) <= rows_per_part:
        before = parts_named_in(target)
        write_bytes(target, _whole_file(*pack(run)))
        before.remove()
        return target

    coded_groups = {name: run.coded_group(name) for name in run.groups}
    arrays, header = _pack_rest(run, {name: levels for name, (levels, _) in coded_groups.items()})
    with PartWriter(target) as writer:
        for start in range(0, len(run), rows_per_part):
            rows = slice(start, start + rows_per_part)
            codes = {name: codes[rows] for name, (_, codes) in coded_groups.items()}
            writer.add(to_bytes(_contiguous(_pack_rows(run.take(rows), codes))))
        header |= {"version": str(VERSION_IN_PARTS), "parts": writer.listed}
        before = parts_named_in(target)  # the main file names its parts, and takes its place last
        write_bytes(target, _whole_file(_contiguous(arrays), header))
    before.remove()
    return target


def load(path: str | os.PathLike[str]) -> SavedRun:
    """Read a run. Safe on files from others: nothing in it is executed.

    Every byte is checked, of part files too; the rows of these stay on the disk until they are asked for.

    Raises:
        FileNotFoundError: There is no such file.
        RunFileError: It is no saved run, is cut short or damaged, lacks a part, or was written by another version.
    """
    where = Path(path)
    if not where.exists():
        raise FileNotFoundError(f"no file {where}; a run is saved by engine.save_run or `torchfil demo`")
    if where.is_dir():
        raise RunFileError(f"{where} is a folder, not a saved run; name the file in it (its suffix is {SUFFIX})")
    content = where.read_bytes()
    header = _checked_header(content, where)
    try:
        arrays: dict[str, Any] = from_bytes(content)
        del content
        if _digest(arrays, header) != header.get("sha256"):
            raise RunFileError(f"{where} is damaged: its checksum does not fit its content. Save the run again.")
        if "parts" in header:
            arrays |= open_parts(where, header["parts"])
        return _unpacked(arrays, header)
    except (SafetensorError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RunFileError(f"{where} is damaged ({type(error).__name__}: {error}). Save the run again.") from error
    except ValueError as error:
        if isinstance(error, RunFileError):
            raise
        raise RunFileError(f"{where} is damaged ({error}). Save the run again.") from error


def _checked_header(content: bytes, where: Path) -> dict[str, str]:
    """The header's strings, once the file is whole and ours."""
    foreign = RunFileError(f"{where} is not a saved run of torchfil; a run is saved by engine.save_run")
    short = RunFileError(f"{where} is cut short: it holds {len(content):,} bytes of a longer file. Copy it again.")
    if len(content) == 0:
        raise RunFileError(f"{where} is empty. Copy it again.")

    # safetensors: the header's length in 8 bytes, the header as JSON, the arrays
    size = int.from_bytes(content[:8], "little")
    if size > _LARGEST_HEADER or content[8:9] not in (b"{", b""):
        raise foreign
    if len(content) < 8 + size:
        raise short
    try:
        entries = json.loads(content[8 : 8 + size])
        header = entries.pop("__metadata__", {})
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise foreign from error

    # ours, of this version, and whole: in this order, so that the message names the first cause
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise foreign
    if header.get("version") not in (str(VERSION), str(VERSION_IN_PARTS)):
        raise RunFileError(
            f"{where} is of run format {header.get('version')}; this torchfil reads formats {VERSION} and "
            f"{VERSION_IN_PARTS}. Install the torchfil that wrote it, or save the run again with this one."
        )
    if len(content) < 8 + size + end:
        raise short
    return header


def pack(run: SavedRun) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """A run in one file: arrays by name and the header's texts, without its checksum; docs/run-file.md lists them."""
    coded_groups = {name: run.coded_group(name) for name in run.groups}
    rows = _pack_rows(run, {name: codes for name, (_, codes) in coded_groups.items()})
    rest, header = _pack_rest(run, {name: levels for name, (levels, _) in coded_groups.items()})
    return _contiguous({**rows, **rest}), header


def signed(arrays: Mapping[str, np.ndarray], header: Mapping[str, str]) -> dict[str, str]:
    """The header with its checksum."""
    return {**header, "sha256": _digest(arrays, header)}


def _whole_file(arrays: dict[str, np.ndarray], header: dict[str, str]) -> bytes:
    return to_bytes(arrays, signed(arrays, header))


def _contiguous(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.ascontiguousarray(values) for name, values in arrays.items()}


def _pack_rows(run: SavedRun, group_codes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What has an entry for every example, by name.

    Args:
        run: A run, or a part of one.
        group_codes: By grouping, each example's place among the labels of the whole run.
    """
    arrays: dict[str, Any] = {}
    if run.ids.dtype.kind == "U":
        _pack_strings(arrays, "ids", np.asarray(run.ids).tolist())
    else:
        arrays["ids"] = np.asarray(run.ids, dtype=np.int64)
    arrays |= {f"column/{name}": values for name, values in run.columns.items()}
    if run.attributes is not None:
        arrays["attributes/error"] = run.attributes.error
        if run.attributes.error_low is not None:
            arrays["attributes/error_low"] = run.attributes.error_low
    arrays |= {f"group/{name}/codes": codes.astype(np.int32) for name, codes in group_codes.items()}
    for number, question in enumerate(run.questions):
        arrays[f"question/{number}/divergence"] = question.divergence
        arrays[f"question/{number}/divergence_high"] = question.divergence_high
    return arrays


def _pack_rest(run: SavedRun, levels: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """What has no entry for every example: arrays by name, and the header's texts.

    Args:
        run: The whole run.
        levels: By grouping, its different labels.
    """
    arrays: dict[str, np.ndarray] = {}
    arrays |= {f"history/{name}": values for name, values in run.history.items()}
    arrays |= {f"rounds/{name}": values for name, values in run.rounds.items()}
    if run.attributes is not None:
        _pack_strings(arrays, "attributes/names", run.attributes.names)
        _pack_strings(arrays, "attributes/units", run.attributes.units)

    # labels repeat: one text a group and a number an example
    for name, labels in levels.items():
        _pack_strings(arrays, f"group/{name}/levels", labels.tolist())

    # what belongs to some examples only, by their places
    if run.pictures is not None:
        arrays["pictures/rows"] = run.pictures.rows.astype(np.int64)
        arrays["pictures/images"] = run.pictures.images
        if run.pictures.maps is not None:
            arrays["pictures/maps"] = run.pictures.maps
    if run.texts is not None:
        arrays["texts/rows"] = run.texts.rows.astype(np.int64)
        arrays["texts/fil"] = run.texts.fil
        if run.texts.plis is not None:
            arrays["texts/plis"] = run.texts.plis
        arrays["texts/lengths"] = np.asarray([len(words) for words in run.texts.words], dtype=np.int64)
        _pack_strings(arrays, "texts/words", [word for words in run.texts.words for word in words])
    for number, attack in enumerate(run.attacks):
        arrays[f"attack/{number}/rows"] = attack.rows.astype(np.int64)
        arrays[f"attack/{number}/predicted"] = attack.predicted
        arrays[f"attack/{number}/achieved"] = attack.achieved
        arrays[f"attack/{number}/violated"] = attack.violated.astype(bool)
        if attack.blind is not None:
            arrays[f"attack/{number}/blind"] = attack.blind

    # safetensors does not keep the order of arrays, so the header does
    attacks = [
        {name: getattr(each, name) for name in ("name", "threat_model", "testable", "untestable")}
        for each in run.attacks
    ]
    order = {kind: list(getattr(run, kind)) for kind in ("columns", "groups", "history", "rounds")}
    questions = [{name: getattr(q, name) for name in ("name", "answers", "complete", "law")} for q in run.questions]
    values = {"about": run.about, "bounds": run.bounds, "attacks": attacks, "order": order, "questions": questions}
    header = {key: json.dumps(value) for key, value in values.items()}
    return arrays, {"format": FORMAT, "version": str(VERSION), **header}


def _unpacked(arrays: Mapping[str, Any], header: Mapping[str, str]) -> SavedRun:
    """The inverse of :func:`pack`; arrays by example may lie in parts."""
    attributes = None
    if "attributes/error" in arrays:
        names, units = (_unpack_strings(arrays, f"attributes/{part}") for part in ("names", "units"))
        attributes = Attributes(names, units, arrays["attributes/error"], arrays.get("attributes/error_low"))
    pictures = None
    if "pictures/rows" in arrays:
        pictures = Pictures(arrays["pictures/rows"], arrays["pictures/images"], arrays.get("pictures/maps"))
    texts = None
    if "texts/rows" in arrays:
        words = iter(_unpack_strings(arrays, "texts/words"))
        by_text = [list(islice(words, length)) for length in arrays["texts/lengths"].tolist()]
        texts = Texts(arrays["texts/rows"], by_text, arrays["texts/fil"], arrays.get("texts/plis"))

    order = json.loads(header["order"])
    columns, groups = _unpacked_tables(arrays, order["columns"], order["groups"])
    return SavedRun(
        about=json.loads(header["about"]),
        ids=arrays["ids"] if "ids" in arrays else np.asarray(_unpack_strings(arrays, "ids"), dtype=str),
        columns=columns,
        attributes=attributes,
        groups=groups,
        pictures=pictures,
        texts=texts,
        history={name: arrays[f"history/{name}"] for name in order["history"]},
        rounds={name: arrays[f"rounds/{name}"] for name in order.get("rounds", [])},  # earlier files have none
        bounds=json.loads(header["bounds"]),
        attacks=[
            AttackRecord(
                text["name"],
                text["threat_model"],
                **{part: arrays[f"attack/{number}/{part}"] for part in ("rows", "predicted", "achieved", "violated")},
                testable=text.get("testable", True),  # earlier files do not say this and the next two
                untestable=text.get("untestable", ""),
                blind=arrays.get(f"attack/{number}/blind"),
            )
            for number, text in enumerate(json.loads(header["attacks"]))
        ],
        questions=[
            QuestionRecord(
                text["name"],
                text["answers"],
                text["complete"],
                arrays[f"question/{number}/divergence"],
                arrays[f"question/{number}/divergence_high"],
                text.get("law", "any"),
            )
            for number, text in enumerate(json.loads(header.get("questions", "[]")))  # earlier files have none
        ],
    )


def _unpacked_tables(
    arrays: Mapping[str, Any], columns: list[str], groups: list[str]
) -> tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]:
    """Columns and labels by name: in memory, or, of a run in parts, read when they are asked for."""
    numbers: dict[str, ByExample] = {name: arrays[f"column/{name}"] for name in columns}
    codes: dict[str, ByExample] = {name: arrays[f"group/{name}/codes"] for name in groups}
    levels = {name: np.asarray(_unpack_strings(arrays, f"group/{name}/levels"), dtype=str) for name in groups}
    if any(isinstance(values, PartedArray) for values in (*numbers.values(), *codes.values())):
        return PartedColumns(numbers), PartedColumns(codes, levels)  # type: ignore[arg-type]
    labels = {name: levels[name][np.asarray(values)] for name, values in codes.items()}
    return {name: np.asarray(values) for name, values in numbers.items()}, labels


def _pack_strings(arrays: dict[str, np.ndarray], name: str, texts: list[str]) -> None:
    """UTF-8 bytes end to end, and where each text begins and the last one ends."""
    encoded = [text.encode() for text in texts]
    arrays[f"{name}/bytes"] = np.frombuffer(b"".join(encoded), np.uint8)
    arrays[f"{name}/offsets"] = np.cumsum([0, *map(len, encoded)], dtype=np.int64)


def _unpack_strings(arrays: Mapping[str, np.ndarray], name: str) -> list[str]:
    content = arrays[f"{name}/bytes"].tobytes()
    ends = arrays[f"{name}/offsets"].tolist()
    return [content[start:end].decode() for start, end in pairwise(ends)]


def _digest(arrays: Mapping[str, np.ndarray], header: Mapping[str, str]) -> str:
    """SHA-256 over the header's strings and every array, in the order of their names."""
    digest = hashlib.sha256()
    for key in sorted(header.keys() - {"sha256"}):
        digest.update(f"{key}\0{header[key]}\0".encode())
    for name in sorted(arrays):
        values = arrays[name]
        digest.update(f"{name}\0{values.dtype}\0{values.shape}\0".encode())
        digest.update(np.ascontiguousarray(values).data if values.size else b"")
    return digest.hexdigest()
