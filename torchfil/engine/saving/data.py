r"""The run's data, read again: a checksum, the spread of private values, the prior of van Trees,
what is shown.

A report shows texts by token, with what drives their privacy loss. For token t, whose embedding has
w private coordinates:

    FIL   η_t = sqrt(Σ_{j∈t} I_jj / w), for the whole run;
    PLIS  ‖∂PL/∂z_t‖, at the current weights (:mod:`torchfil.attribution.plis`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Subset, TensorDataset

from torchfil.accounting.leakage import Leakage
from torchfil.attribution.plis import token_norms
from torchfil.bounds import Prior
from torchfil.engine.assembly import DatasetPasses, PrivateTraining
from torchfil.engine.saving.attributes import attributes_tracked
from torchfil.private import Examples
from torchfil.run.blind_guess import BlindGuess
from torchfil.run.saved_run import Texts
from torchfil.utils.given import Rows
from torchfil.utils.trees import tensors_of

_BYTES_AT_ONCE = 2**26
# bytes of a TensorDataset up to which a fingerprint is of all examples, a second's work
_READ_WHOLE = 2**30
_EXAMPLES_OF_OTHERS = 64
_MOST_ROWS = 2**16  # a deviation from so many is off by 0.3 %
_FEW_ROWS = 2**11  # by 1.6 %
_MOST_VALUES, _VALUES_AT_ONCE = 2**30, 2**22
_SMALLEST_IMAGE = 4
_MOST_TEXTS = 20
_TOKENS = "input_ids"


# ------------------------------------------------------------------ which data it is


def data_sha256(dataset: Rows) -> str:
    """SHA-256 over all examples in order: dtype, shape and bytes of every tensor, and the text of
    everything else.

    A ``TensorDataset`` is read tensor by tensor, any other data set example by example, with the
    same result. If examples change at random when read (augmentation), so does the checksum.
    """
    layouts: dict[int, hashlib._Hash] = {}
    contents: dict[int, hashlib._Hash] = {}
    last: dict[int, str] = {}
    for row, place, layout, content in _leaves(dataset):
        if last.get(place) != layout:
            layouts.setdefault(place, hashlib.sha256()).update(f"{row} {layout}\0".encode())
            last[place] = layout
        contents.setdefault(place, hashlib.sha256()).update(content)

    whole = hashlib.sha256(f"{len(dataset)}".encode())
    for place in sorted(layouts):
        whole.update(layouts[place].digest() + contents[place].digest())
    return whole.hexdigest()


def data_fingerprint(dataset: Rows) -> str | None:
    """A checksum to recognise a data set by; None if its examples change whenever they are read.

    A ``TensorDataset`` of up to 1 GiB is read whole, of others 64 examples: it recognises other
    data, but not one changed example in a million.
    """
    n = len(dataset)
    if (
        type(dataset) is TensorDataset
        and sum(t.numel() * t.element_size() for t in dataset.tensors) <= _READ_WHOLE
    ):
        return data_sha256(dataset)
    rows = sorted(
        {round(k * (n - 1) / _EXAMPLES_OF_OTHERS) for k in range(_EXAMPLES_OF_OTHERS + 1)}
    )
    found = {f"{n} {data_sha256(Subset(dataset, rows))}" for _ in range(2)}  # type: ignore[arg-type]
    return found.pop() if len(found) == 1 else None


def _leaves(dataset: Rows) -> Iterator[tuple[int, int, str, bytes | memoryview]]:
    """Row, place in the example, layout and bytes of everything in the data set."""
    # a subclass may return something else, so only the class itself is read by its tensors
    if type(dataset) is TensorDataset:
        for place, values in enumerate(dataset.tensors):
            rows = max(1, _BYTES_AT_ONCE // max(1, values[:1].numel() * values.element_size()))
            for part in values.split(rows):
                yield 0, place, f"{values.dtype} {list(values.shape[1:])}", _bytes(part)
        return
    for row in range(len(dataset)):
        for place, leaf in enumerate(pytree.tree_leaves(dataset[row])):
            if isinstance(leaf, Tensor):
                yield row, place, f"{leaf.dtype} {list(leaf.shape)}", _bytes(leaf)
            elif isinstance(leaf, np.ndarray):
                yield row, place, f"numpy {leaf.dtype} {list(leaf.shape)}", leaf.tobytes()
            else:
                text = str(leaf).encode()
                yield row, place, f"{type(leaf).__name__} {len(text)}", text


def _bytes(values: Tensor) -> memoryview:
    """The tensor's bytes in order, for hashing."""
    return values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


# ------------------------------------------------------------------ how its values are spread


def read_blind_guess(
    passes: DatasetPasses, num_coordinates: int, *, thorough: bool
) -> BlindGuess | None:
    """Blind guesses of the run's data; None for streams, and if no coordinate has a fixed value.

    If there are more than 65,536 examples (2,048 unless ``thorough``), that many are drawn without
    repetition, always the same ones.

    Args:
        passes: Reads the data set.
        num_coordinates: d.
        thorough: Whether many examples may be read.
    """
    d = max(1, num_coordinates)
    rows, guess = _some_rows(passes, d, thorough=thorough), BlindGuess()
    if passes.dataset is None or not len(rows):
        return None
    for part in _pieces(passes, rows, max(1, min(1024, _VALUES_AT_ONCE // d))):
        # outputs of submodules have no values; texts may be laid out differently from batch to
        # batch
        if part.values.shape[1] != num_coordinates or part.values.isnan().all():
            return None
        public = ([leaf.cpu().double() for leaf in leaves] for leaves in _public(part))
        guess.add(part.values.detach().to("cpu", torch.float64).numpy(), *public)

    return guess.judged(np.ones(num_coordinates), rows, passes.run.ids.num_examples)


def fitted_prior(passes: DatasetPasses) -> tuple[np.ndarray, Prior]:
    """The rows of the examples that were read, and a normal law of their private values given
    everything else in them.

    Everything else is public: their targets and inputs, with the private coordinates taken out.

    Raises:
        ValueError: It cannot be fitted: a stream, or coordinates without values that could be
            compared.
    """
    d = passes.run.leakage.num_coordinates
    remedy = "pass prior=, a law given what is public"
    if passes.dataset is None:
        raise ValueError(f"the examples of a stream cannot be read again; {remedy}")
    rows = _some_rows(passes, d, thorough=True)
    parts = list(_pieces(passes, rows, 1024))
    values = [part.values for part in parts]
    alike = all(part.shape[1] == d and not part.isnan().any() for part in values)
    if not (alike and len({part.form for part in parts}) <= 1):
        raise ValueError(
            "a prior needs private values of one shape, not outputs of a submodule or texts of "
            f"different lengths; {remedy}"
        )
    public = [
        [leaf.nan_to_num(0.0) for leaves in _public(part) for leaf in leaves] for part in parts
    ]
    return rows, Prior.gaussian(
        torch.cat(values).cpu(), [torch.cat(same).cpu() for same in zip(*public, strict=True)]
    )


def _public(part: Examples) -> tuple[list[Tensor], list[Tensor]]:
    """Targets and inputs, with NaN at private coordinates."""
    args, kwargs, targets, _ = part.restore(torch.full_like(part.z, math.nan), part.public)
    return tensors_of(targets), tensors_of([args, kwargs])


def _some_rows(passes: DatasetPasses, d: int, *, thorough: bool) -> np.ndarray:
    """All examples, or as many of them as are read, always the same ones."""
    count = passes.run.ids.num_examples
    most = min(_MOST_ROWS if thorough else _FEW_ROWS, max(_FEW_ROWS, _MOST_VALUES // d))
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).choice(count, most, replace=False))


def _pieces(passes: DatasetPasses, rows: np.ndarray, size: int) -> Iterator[Examples]:
    """These examples with their private coordinates, ``size`` of them at a time."""
    for start in range(0, len(rows), size):
        yield passes.examples(rows[start : start + size].tolist())


# ----------------------------------------------------------------- the examples that a report shows


def are_pixels(passes: DatasetPasses, num_coordinates: int) -> bool:
    """Whether the private coordinates are those of one image."""
    if passes.dataset is None or passes.run.ids.num_examples == 0:
        return False
    examples = passes.examples([0])
    if examples.num_coordinates != num_coordinates or examples.values.isnan().any():
        return False
    maps = list(examples.maps(torch.arange(num_coordinates, dtype=torch.float64)[None]).values())
    return len(maps) == 1 and _is_image(maps[0])


def _is_image(value: object) -> bool:
    """Whether these are images, [rows, H, W], [rows, 1, H, W] or [rows, 3, H, W]."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim not in (3, 4):
        return False
    channels = value.shape[1] if value.ndim == 4 else 1
    return channels in (1, 3) and min(value.shape[-2:]) >= _SMALLEST_IMAGE


def _diagonal(leakage: Leakage, rows: np.ndarray) -> Tensor:
    """I_jj of these examples, [m, d]."""
    ids = leakage.ids.all()
    return (
        leakage.get_attribute_fil([ids[row] for row in rows])
        .value.double()
        .square()
        .nan_to_num(nan=0.0, posinf=math.inf)
        .cpu()
    )


def exposed_words(
    training: PrivateTraining, leakage: Leakage, texts: object, fil: np.ndarray
) -> Texts | None:
    """FIL and PLIS by token of the 20 most exposed examples, with the tokens.

    None if nothing leaked.

    Args:
        training: The run.
        leakage: Its results; the diagonal was tracked.
        texts: Every example's tokens as strings, in the order of the data set, one for each
            position of its private tensor; or a decoder of token ids: a tokenizer with ``decode``,
            or a function that maps a list with one id to its string. The ids are then read from the
            data set.
        fil: η̄, [n].

    Raises:
        ValueError: The diagonal was not tracked, or texts and coordinates do not fit.
    """
    if not attributes_tracked(leakage):
        raise ValueError(
            "texts= shows leakage by word, which needs make_private(track=('diagonal',))"
        )
    decode = getattr(texts, "decode", texts if callable(texts) else None)
    rows = np.argsort(-fil, kind="stable")[:_MOST_TEXTS]
    rows = rows[fil[rows] > 0]  # an example that leaked nothing is not among the most exposed

    # one token for each position of the private embedding
    tokens: Any = texts
    if decode is None:
        if len(tokens) != len(fil):
            raise ValueError(
                f"texts has {len(tokens)} entries for {len(fil)} examples; give one for each"
            )
    elif len(rows):
        tokens = token_ids(training.passes, rows.tolist())
    if not len(rows):
        return None
    positions = _positions(training, leakage, max(map(len, tokens)))

    # [m, positions]
    by_token = _diagonal(leakage, rows).unflatten(1, (positions, -1)).mean(dim=2).sqrt()
    plis = _plis(training, rows.tolist(), positions)
    if decode is None:
        words = [[str(word) for word in tokens[row]] for row in rows]
        own = torch.arange(positions) < torch.tensor([len(each) for each in words])[:, None]
    else:
        # padding has neither: its coordinates belong to nobody
        own = by_token > 0 if plis is None else ~plis.isnan()
        words = [
            [str(decode([token])) for token in part[mask[: len(part)]].tolist()]
            for part, mask in zip(tokens, own, strict=True)
        ]
    return Texts(
        rows.astype(np.int64),
        words,
        _compact(by_token, own),
        None if plis is None else _compact(plis, own),
    )


def token_ids(passes: DatasetPasses, rows: list[int]) -> Tensor:
    """The token ids that the model receives for these texts, [rows, T].

    Raises:
        ValueError: A stream, or it is not known which of the inputs they are.
    """
    remedy = "give texts= as strings, one list an example"
    if passes.dataset is None:
        raise ValueError(f"the examples of a stream cannot be read again: {remedy}")
    leaves = {
        key: value
        for key, value in passes.inputs(rows).items()
        if isinstance(value, Tensor) and value.ndim == 2
    }
    inputs = {
        key: value for key, value in leaves.items() if value.dtype in (torch.int64, torch.int32)
    }
    if _TOKENS not in inputs and len(inputs) != 1:
        raise ValueError(
            f"{len(inputs)} inputs of the model hold integers by position ({list(inputs)}); "
            f"{remedy}"
        )
    return inputs.get(_TOKENS, next(iter(inputs.values()))).cpu()


def _positions(training: PrivateTraining, leakage: Leakage, longest: int) -> int:
    """The number of positions for every text."""
    private, coordinates = training.run.options.private, leakage.num_coordinates
    positions = (private.max_length if private is not None else None) or longest
    if not (longest <= positions and coordinates % max(1, positions) == 0):
        raise ValueError(
            f"texts of up to {longest} words do not fit {coordinates} private coordinates in "
            f"{positions} positions; give one word for each position of the embedding, special "
            "tokens included"
        )
    return positions


def _plis(training: PrivateTraining, rows: list[int], positions: int) -> Tensor | None:
    """‖PLIS‖ by token, [rows, positions], NaN at padding; None if it cannot be computed."""
    if training.run.loss is None or training.passes.dataset is None:
        return None
    maps = training.passes.plis(rows, training.optimizer, private=True)
    fitting = [each for each in maps.values() if each.ndim == 3 and each.shape[1] <= positions]
    if len(fitting) != 1:
        return None
    norms = token_norms(fitting[0]).double().cpu()
    return torch.nn.functional.pad(norms, (0, positions - norms.shape[1]), value=float("nan"))


def _compact(values: Tensor, own: Tensor) -> np.ndarray:
    """Each row's own entries first, then NaN, float32 [rows, positions]."""
    result = torch.full_like(values, float("nan"))
    for target, row, mask in zip(result, values, own, strict=True):
        target[: int(mask.sum())] = row[mask]
    return result.float().numpy()
