"""A finished run as one file: what a report, a gate or another program reads, without the model and the data.

The file is a safetensors file (arrays and a JSON header, nothing that is executed); docs/run-file.md describes it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load as from_bytes
from safetensors.numpy import save as to_bytes

from torchfil.guessing import largest_true_positive_rate
from torchfil.utils.errors import RunFileError
from torchfil.utils.files import write_bytes

__all__ = [
    "FORMAT",
    "SUFFIX",
    "VERSION",
    "AttackRecord",
    "Attributes",
    "Pictures",
    "QuestionRecord",
    "SavedRun",
    "Texts",
    "load",
    "save",
]

FORMAT = "torchfil-run"
VERSION = 1
SUFFIX = ".fil"
_LARGEST_HEADER = 100_000_000  # the format's own limit, in bytes


@dataclass(frozen=True, eq=False)
class Attributes:
    """How well single attributes could be inferred.

    Attributes:
        names: k names.
        units: k units, "" where there is none.
        error: 1/sqrt(I_jj) in the attribute's own unit, [n, k]: an unbiased guess is off by at least this, on average.
            An estimate from one run; infinite where nothing leaked.
        error_low: The lower end of its 95 % interval, [n, k], or None where it is not known.
    """

    names: list[str]
    units: list[str]
    error: np.ndarray
    error_low: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name, count in Counter(self.names).most_common(1):
            if count > 1:
                raise ValueError(
                    f"attribute {name!r} is named {count} times; names must differ, such as '{name} = …' for each "
                    "level of a one-hot attribute"
                )

    @property
    def shown(self) -> np.ndarray:
        """What is shown, [n, k]: the lower end; the error itself, an estimate, where that end is not known."""
        return self.error if self.error_low is None else self.error_low


@dataclass(frozen=True, eq=False)
class QuestionRecord:
    """How well any attacker could tell the true answer of a question from others.

    Attributes:
        name: Of the question.
        answers: m names.
        complete: Whether the answers are all that are possible, the true one among them (with D = 0).
        divergence: D = KL(P ‖ P′), [n, m].
        divergence_high: The upper end of its 95 % interval, [n, m].
    """

    name: str
    answers: list[str]
    complete: bool
    divergence: np.ndarray
    divergence_high: np.ndarray

    def rate(self, false_positive_rate: float = 0.01) -> np.ndarray:
        """The largest true-positive rate of any attacker, over all answers, at the upper ends, [n]."""
        worst = np.asarray(self.divergence_high, dtype=np.float64).max(axis=1)
        return largest_true_positive_rate(torch.from_numpy(worst), false_positive_rate).numpy()


@dataclass(frozen=True, eq=False)
class Pictures:
    """Some examples as images.

    Attributes:
        rows: Places in ``ids``, [m].
        images: uint8, [m, H, W] or [m, H, W, 3].
        maps: PLIS, float32, [m, H, W], or None.
    """

    rows: np.ndarray
    images: np.ndarray
    maps: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Texts:
    """Some examples as words, with how much of each leaks.

    Attributes:
        rows: Places in ``ids``, [m].
        words: m lists of words.
        fil: η_t = sqrt(Σ_j I_jj / w) over the w coordinates of word t, [m, T]; NaN behind a text's end.
    """

    rows: np.ndarray
    words: list[list[str]]
    fil: np.ndarray


@dataclass(frozen=True, eq=False)
class AttackRecord:
    """What an attack achieved beside what the bound allows; made by ``BoundComparison.record``.

    Attributes:
        name: Of the attack.
        threat_model: What the attacker knows, in a sentence.
        rows: The attacked examples' places in ``ids``, [m].
        predicted: The bound, [m].
        achieved: The attack's error in the same unit, [m].
        violated: Whether ``achieved`` lies below the bound beyond chance, [m] booleans.
        testable: Whether the attack saw the model, in more than one trial, so that it could have violated a bound.
        untestable: Why not, in words; "" where it could, and in earlier files.
        blind: The error of a guess without the model, [m], or None where it is not known.
    """

    name: str
    threat_model: str
    rows: np.ndarray
    predicted: np.ndarray
    achieved: np.ndarray
    violated: np.ndarray
    testable: bool = True
    untestable: str = ""
    blind: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class SavedRun:
    """A finished run, as arrays and plain values. Confidential: it depends on private data.

    Attributes:
        about: JSON values: title, model, dataset, mechanism, epsilon, delta, accountant, versions, seed, created,
            exact; noise_choice where pilots chose σ, equalised where torchfil.equalise chose the clip weights.
        ids: The examples' names, [n], int64 or strings.
        columns: By name, [n] each: fil, fil_error, sampling_error, mse_bound, mse_bound_low, participations, missed,
            squared_norm, epsilon (individual) where it was computed, clip_weight where weights were given, and
            fil_before, the FIL of a run without them (NaN: not measured), where it was saved.
        attributes: Per-attribute errors, where they were tracked.
        groups: By grouping, [n] labels (strings) each.
        pictures: Some examples as images.
        texts: The most exposed examples as words.
        history: Over training time: step [t], fil_median, fil_q95, fil_max [t]; may be empty.
        bounds: JSON values: rdp_mse_bound, rero; may be empty.
        attacks: Results of attacks; may be empty.
        questions: What any attacker could tell; may be empty.
        rounds: What torchfil.equalise did, by name, [r] numbers each: worst, worst_end, spread, num_below, num_spared,
            smallest_weight, group_ratio, score, epsilon, seconds, fresh (NaN: not known); may be empty.
    """

    about: dict[str, Any]
    ids: np.ndarray
    columns: dict[str, np.ndarray]
    attributes: Attributes | None = None
    groups: dict[str, np.ndarray] = field(default_factory=dict)
    pictures: Pictures | None = None
    history: dict[str, np.ndarray] = field(default_factory=dict)
    bounds: dict[str, Any] = field(default_factory=dict)
    attacks: list[AttackRecord] = field(default_factory=list)
    questions: list[QuestionRecord] = field(default_factory=list)
    texts: Texts | None = None
    rounds: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.about, dict) or not isinstance(self.bounds, dict):
            raise ValueError("about and bounds must be dicts")
        _check_kinds(self.about)
        if self.ids.ndim != 1 or self.ids.dtype.kind not in "iU":
            raise ValueError(f"ids must be [n] integers or strings, got {self.ids.dtype} {list(self.ids.shape)}")
        self._check_tables()
        self._check_rows()

    def _check_tables(self) -> None:
        """Whatever has an entry for every example has n of them, and the history as many for every step."""
        n = len(self)
        for kind, arrays in (("column", self.columns), ("grouping", self.groups)):
            for name, values in arrays.items():
                if values.shape != (n,):
                    raise ValueError(f"{kind} {name!r} has shape {list(values.shape)} for {n} examples")
        text = [name for name, values in self.columns.items() if values.dtype.kind not in "biuf"]
        if text:
            raise ValueError(f"columns {text} hold no numbers; put labels into groups")

        if self.attributes is not None:
            names, units, shape = self.attributes.names, self.attributes.units, self.attributes.error.shape
            low = shape if self.attributes.error_low is None else self.attributes.error_low.shape
            if shape != (n, len(names)) or low != shape or len(units) != len(names):
                raise ValueError(
                    f"attributes: {len(names)} names, {len(units)} units and errors of shape {list(shape)} for {n} "
                    "examples; they must agree"
                )
        for question in self.questions:
            shapes = {question.divergence.shape, question.divergence_high.shape}
            if shapes != {(n, len(question.answers))}:
                raise ValueError(
                    f"question {question.name!r} has divergences of shapes {sorted(shapes)} for {n} examples and "
                    f"{len(question.answers)} answers"
                )
        for name, series in (("history", self.history), ("rounds", self.rounds)):
            lengths = {column: list(values.shape) for column, values in series.items()}
            if any(len(shape) != 1 for shape in lengths.values()) or len({shape[0] for shape in lengths.values()}) > 1:
                raise ValueError(f"{name}'s columns must have one length, got shapes {lengths}")

    def _check_rows(self) -> None:
        """What has entries for some examples names them by their place, and has one entry each."""
        n = len(self)
        parts: list[tuple[str, np.ndarray, list[Sized]]] = []
        if self.pictures is not None:
            maps = [] if self.pictures.maps is None else [self.pictures.maps]
            parts.append(("pictures", self.pictures.rows, [self.pictures.images, *maps]))
        if self.texts is not None:
            parts.append(("texts", self.texts.rows, [self.texts.words, self.texts.fil]))
        for a in self.attacks:
            blind = [] if a.blind is None else [a.blind]
            parts.append((f"attack {a.name!r}", a.rows, [a.predicted, a.achieved, a.violated, *blind]))
        for what, rows, others in parts:
            if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < n:
                raise ValueError(f"{what}: rows must lie in 0 … {n - 1}, got {int(rows.min())} … {int(rows.max())}")
            if any(len(other) != len(rows) for other in others):
                raise ValueError(f"{what}: {len(rows)} rows, but arrays of {[len(other) for other in others]}")

    def __len__(self) -> int:
        return len(self.ids)

    def column(self, name: str) -> np.ndarray:
        """A column, [n].

        Raises:
            RunFileError: The run was saved without it.
        """
        if name not in self.columns:
            raise RunFileError(f"the run has no column {name!r}; it has {', '.join(self.columns) or 'none'}")
        return self.columns[name]

    @property
    def clip_weights(self) -> np.ndarray:
        """ω that each example's clipped gradient was multiplied by, [n]; 1 where none were given."""
        return self.columns.get("clip_weight", np.ones(len(self)))


_NUMBERS = (
    "epsilon",
    "delta",
    "model.num_parameters",
    "mechanism.noise_multiplier",
    "mechanism.max_grad_norm",
    "mechanism.sample_rate",
    "mechanism.steps",
    "mechanism.num_probes",
    "mechanism.fil_rate",
    "mechanism.rel_error",
    "mechanism.min_mse_bound",
    "noise_choice.confidence",
    "noise_choice.num_pilots",
    "noise_choice.headroom",
    "equalised.target",
)
_KINDS: dict[str, tuple[str, type | tuple[type, ...]]] = {
    **dict.fromkeys(("model", "dataset", "mechanism", "versions", "noise_choice", "equalised"), ("a dict", dict)),
    **dict.fromkeys(("title", "accountant", "created", "mechanism.probe_precision"), ("a text", str)),
    **dict.fromkeys(("noise_choice.target", "equalised.question", "equalised.stopped"), ("a text", str)),
    **dict.fromkeys(("exact", "equalised.met"), ("true or false", bool)),
    **dict.fromkeys(_NUMBERS, ("a number", (int, float))),
    "dataset.input_range": ("two numbers", list),
}


def _check_kinds(about: Mapping[str, Any]) -> None:
    """Raise for entries of another kind than whoever reads them expects; what is missing or None is fine."""
    for name, (expected, kinds) in _KINDS.items():
        value: Any = about
        for key in name.split("."):
            value = None if value is None else value.get(key)
        fits = value is None or (isinstance(value, kinds) and (kinds is bool or not isinstance(value, bool)))
        if fits and isinstance(value, list):
            fits = len(value) == 2 and all(isinstance(end, int | float) and not isinstance(end, bool) for end in value)
        if not fits:
            raise ValueError(f"about: {name!r} is {value!r}, which is not {expected}")


def save(run: SavedRun, path: str | os.PathLike[str]) -> Path:
    """Write a run; the file is replaced only when complete, and only its owner may read it (mode 0600).

    Returns:
        The path written.
    """
    arrays, header = _packed(run)
    header["sha256"] = _digest(arrays, header)
    write_bytes(path, to_bytes(arrays, header))
    return Path(path)


def load(path: str | os.PathLike[str]) -> SavedRun:
    """Read a run. Safe on files from others: nothing in it is executed.

    Raises:
        FileNotFoundError: There is no such file.
        RunFileError: It is no saved run, is cut short or damaged, or was written by another version.
    """
    where = Path(path)
    if not where.exists():
        raise FileNotFoundError(f"no file {where}; a run is saved by engine.save_run or `torchfil demo`")
    if where.is_dir():
        raise RunFileError(f"{where} is a folder, not a saved run; name the file in it (its suffix is {SUFFIX})")
    content = where.read_bytes()
    header = _checked_header(content, where)
    try:
        arrays = from_bytes(content)
        del content
        if _digest(arrays, header) != header.get("sha256"):
            raise RunFileError(f"{where} is damaged: its checksum does not fit its content. Save the run again.")
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
    if header.get("version") != str(VERSION):
        raise RunFileError(
            f"{where} is of run format {header.get('version')}; this torchfil reads format {VERSION}. Install the "
            "torchfil that wrote it, or save the run again with this one."
        )
    if len(content) < 8 + size + end:
        raise short
    return header


def _packed(run: SavedRun) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays by name and the header's texts; docs/run-file.md lists them."""
    arrays: dict[str, np.ndarray] = {}
    if run.ids.dtype.kind == "U":
        _pack_strings(arrays, "ids", run.ids.tolist())
    else:
        arrays["ids"] = run.ids.astype(np.int64)
    arrays |= {f"column/{name}": values for name, values in run.columns.items()}
    arrays |= {f"history/{name}": values for name, values in run.history.items()}
    arrays |= {f"rounds/{name}": values for name, values in run.rounds.items()}
    if run.attributes is not None:
        arrays["attributes/error"] = run.attributes.error
        if run.attributes.error_low is not None:
            arrays["attributes/error_low"] = run.attributes.error_low
        _pack_strings(arrays, "attributes/names", run.attributes.names)
        _pack_strings(arrays, "attributes/units", run.attributes.units)

    # labels repeat: one text a group and a number an example
    for name, labels in run.groups.items():
        levels, codes = np.unique(labels.astype(str), return_inverse=True)
        arrays[f"group/{name}/codes"] = codes.astype(np.int32)
        _pack_strings(arrays, f"group/{name}/levels", levels.tolist())

    # what belongs to some examples only, by their places
    if run.pictures is not None:
        arrays["pictures/rows"] = run.pictures.rows.astype(np.int64)
        arrays["pictures/images"] = run.pictures.images
        if run.pictures.maps is not None:
            arrays["pictures/maps"] = run.pictures.maps
    if run.texts is not None:
        arrays["texts/rows"] = run.texts.rows.astype(np.int64)
        arrays["texts/fil"] = run.texts.fil
        arrays["texts/lengths"] = np.asarray([len(words) for words in run.texts.words], dtype=np.int64)
        _pack_strings(arrays, "texts/words", [word for words in run.texts.words for word in words])
    for number, attack in enumerate(run.attacks):
        arrays[f"attack/{number}/rows"] = attack.rows.astype(np.int64)
        arrays[f"attack/{number}/predicted"] = attack.predicted
        arrays[f"attack/{number}/achieved"] = attack.achieved
        arrays[f"attack/{number}/violated"] = attack.violated.astype(bool)
        if attack.blind is not None:
            arrays[f"attack/{number}/blind"] = attack.blind

    for number, question in enumerate(run.questions):
        arrays[f"question/{number}/divergence"] = question.divergence
        arrays[f"question/{number}/divergence_high"] = question.divergence_high

    # safetensors does not keep the order of arrays, so the header does
    attacks = [
        {name: getattr(each, name) for name in ("name", "threat_model", "testable", "untestable")}
        for each in run.attacks
    ]
    order = {kind: list(getattr(run, kind)) for kind in ("columns", "groups", "history", "rounds")}
    questions = [{"name": q.name, "answers": q.answers, "complete": q.complete} for q in run.questions]
    values = {"about": run.about, "bounds": run.bounds, "attacks": attacks, "order": order, "questions": questions}
    header = {key: json.dumps(value) for key, value in values.items()}
    arrays = {name: np.ascontiguousarray(values) for name, values in arrays.items()}
    return arrays, {"format": FORMAT, "version": str(VERSION), **header}


def _unpacked(arrays: Mapping[str, np.ndarray], header: Mapping[str, str]) -> SavedRun:
    """The inverse of :func:`_packed`."""
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
        texts = Texts(arrays["texts/rows"], by_text, arrays["texts/fil"])

    order = json.loads(header["order"])
    return SavedRun(
        about=json.loads(header["about"]),
        ids=arrays["ids"] if "ids" in arrays else np.asarray(_unpack_strings(arrays, "ids"), dtype=str),
        columns={name: arrays[f"column/{name}"] for name in order["columns"]},
        attributes=attributes,
        groups={
            name: np.asarray(_unpack_strings(arrays, f"group/{name}/levels"), dtype=str)[arrays[f"group/{name}/codes"]]
            for name in order["groups"]
        },
        pictures=pictures,
        texts=texts,
        history={name: arrays[f"history/{name}"] for name in order["history"]},
        rounds={name: arrays[f"rounds/{name}"] for name in order.get("rounds", [])},  # earlier files have none
        bounds=json.loads(header["bounds"]),
        attacks=[
            AttackRecord(
                text["name"],
                text["threat_model"],
                arrays[f"attack/{number}/rows"],
                arrays[f"attack/{number}/predicted"],
                arrays[f"attack/{number}/achieved"],
                arrays[f"attack/{number}/violated"],
                text.get("testable", True),  # earlier files do not say this and the next two
                text.get("untestable", ""),
                arrays.get(f"attack/{number}/blind"),
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
            )
            for number, text in enumerate(json.loads(header.get("questions", "[]")))  # earlier files have none
        ],
    )


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
