"""A saved run as named arrays and texts, and back: the content of a run file, which docs/run-file.md lists."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice, pairwise
from typing import Any

import numpy as np

from torchfil.run.parted import ByExample, PartedArray, PartedColumns, checked_offsets
from torchfil.run.saved_run import (
    AttackRecord,
    Attributes,
    Pictures,
    QuestionRecord,
    SavedRun,
    Spread,
    Texts,
    Yardsticks,
)

__all__ = ["FORMAT", "VERSION", "contiguous", "pack", "pack_rest", "pack_rows", "unpack"]

FORMAT = "torchfil-run"
VERSION = 1


def pack(run: SavedRun) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """A run in one file: arrays by name and the header's texts, without its checksum; docs/run-file.md lists them."""
    coded_groups = {name: run.coded_group(name) for name in run.groups}
    rows = pack_rows(run, {name: codes for name, (_, codes) in coded_groups.items()})
    rest, header = pack_rest(run, {name: levels for name, (levels, _) in coded_groups.items()})
    return contiguous({**rows, **rest}), header


def contiguous(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays as safetensors can write them."""
    return {name: np.ascontiguousarray(values) for name, values in arrays.items()}


def pack_rows(run: SavedRun, group_codes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
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


def pack_rest(run: SavedRun, levels: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
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
        if run.attributes.pixels is not None:
            arrays["attributes/pixels"] = run.attributes.pixels.astype(np.int64)
    if run.yardsticks is not None:
        arrays |= {f"yardsticks/{name}": values for name, values in vars(run.yardsticks.attributes).items()}

    # labels repeat: one text a group and a number an example
    for name, labels in levels.items():
        _pack_strings(arrays, f"group/{name}/levels", labels.tolist())

    arrays |= _pack_some_examples(run)

    # safetensors does not keep the order of arrays, so the header does
    attacks = [
        {name: getattr(each, name) for name in ("name", "threat_model", "testable", "untestable")}
        for each in run.attacks
    ]
    order = {kind: list(getattr(run, kind)) for kind in ("columns", "groups", "history", "rounds")}
    questions = [{name: getattr(q, name) for name in ("name", "answers", "complete", "law")} for q in run.questions]
    values = {"about": run.about, "bounds": run.bounds, "attacks": attacks, "order": order, "questions": questions}
    if run.yardsticks is not None:
        inputs = {name: float(value) for name, value in vars(run.yardsticks.inputs).items()}
        levels_of = run.yardsticks.levels
        values["yardsticks"] = {"examples": run.yardsticks.examples, "inputs": inputs, "levels": levels_of}
    header = {key: json.dumps(value) for key, value in values.items()}
    return arrays, {"format": FORMAT, "version": str(VERSION), **header}


def _pack_some_examples(run: SavedRun) -> dict[str, np.ndarray]:
    """What belongs to some examples only, by their places."""
    arrays: dict[str, np.ndarray] = {}
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
    return arrays


def unpack(arrays: Mapping[str, Any], header: Mapping[str, str]) -> SavedRun:
    """The inverse of :func:`pack`; arrays by example may lie in parts."""
    order = json.loads(header["order"])
    columns, groups = _unpacked_tables(arrays, order["columns"], order["groups"])

    # by name and not by place: earlier files lack some parts
    return SavedRun(
        about=json.loads(header["about"]),
        ids=arrays["ids"] if "ids" in arrays else np.asarray(_unpack_strings(arrays, "ids"), dtype=str),
        columns=columns,
        attributes=_unpack_attributes(arrays),
        groups=groups,
        pictures=_unpack_pictures(arrays),
        texts=_unpack_texts(arrays),
        yardsticks=_unpack_yardsticks(arrays, header),
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


def _unpack_attributes(arrays: Mapping[str, Any]) -> Attributes | None:
    if "attributes/error" not in arrays:
        return None
    names, units = (_unpack_strings(arrays, f"attributes/{part}") for part in ("names", "units"))
    optional = (arrays.get(f"attributes/{part}") for part in ("error_low", "pixels"))
    return Attributes(names, units, arrays["attributes/error"], *optional)


def _unpack_yardsticks(arrays: Mapping[str, Any], header: Mapping[str, str]) -> Yardsticks | None:
    if "yardsticks" not in header:  # earlier files have none
        return None
    text = json.loads(header["yardsticks"])
    inputs = Spread(**{name: np.asarray(value, dtype=np.float64) for name, value in text["inputs"].items()})
    by_attribute = Spread(**{name: arrays[f"yardsticks/{name}"] for name in ("mean", "std", "low", "high")})
    return Yardsticks(text["examples"], inputs, by_attribute, text["levels"])


def _unpack_pictures(arrays: Mapping[str, Any]) -> Pictures | None:
    if "pictures/rows" not in arrays:
        return None
    return Pictures(arrays["pictures/rows"], arrays["pictures/images"], arrays.get("pictures/maps"))


def _unpack_texts(arrays: Mapping[str, Any]) -> Texts | None:
    if "texts/rows" not in arrays:
        return None
    words = iter(_unpack_strings(arrays, "texts/words"))
    by_text = [list(islice(words, length)) for length in arrays["texts/lengths"].tolist()]
    return Texts(arrays["texts/rows"], by_text, arrays["texts/fil"], arrays.get("texts/plis"))


def _unpacked_tables(
    arrays: Mapping[str, Any], columns: list[str], groups: list[str]
) -> tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]:
    """Columns and labels by name: in memory, or, of a run in parts, read when they are asked for."""
    numbers: dict[str, ByExample] = {name: arrays[f"column/{name}"] for name in columns}
    codes: dict[str, ByExample] = {name: arrays[f"group/{name}/codes"] for name in groups}
    levels = {name: np.asarray(_unpack_strings(arrays, f"group/{name}/levels"), dtype=str) for name in groups}
    for name, values in codes.items():
        used = np.asarray(values)
        if used.size and not 0 <= used.min() <= used.max() < len(levels[name]):
            raise ValueError(
                f"grouping {name!r} has codes from {used.min()} to {used.max()} for {len(levels[name])} labels"
            )
    if any(isinstance(values, PartedArray) for values in (*numbers.values(), *codes.values())):
        return PartedColumns(numbers), PartedColumns(codes, levels)  # type: ignore[arg-type]
    labels = {name: levels[name][values] for name, values in codes.items()}
    return {name: np.asarray(values) for name, values in numbers.items()}, labels


def _pack_strings(arrays: dict[str, np.ndarray], name: str, texts: list[str]) -> None:
    """UTF-8 bytes end to end, and where each text begins and the last one ends."""
    encoded = [text.encode() for text in texts]
    arrays[f"{name}/bytes"] = np.frombuffer(b"".join(encoded), np.uint8)
    arrays[f"{name}/offsets"] = np.cumsum([0, *map(len, encoded)], dtype=np.int64)


def _unpack_strings(arrays: Mapping[str, np.ndarray], name: str) -> list[str]:
    content = arrays[f"{name}/bytes"].tobytes()
    ends = checked_offsets(name, arrays[f"{name}/offsets"], len(content)).tolist()
    return [content[start:end].decode() for start, end in pairwise(ends)]
