"""Pickles as data: what plain ones hold is what pickle would give; nothing that any of them names is ever called."""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchfil.datasets import DataFormatError, load_plain_pickle

PROTOCOLS = range(2, pickle.HIGHEST_PROTOCOL + 1)


def like_python_2(rows: int = 2) -> bytes:
    """A batch of CIFAR-10 as Python 2 and numpy 1 wrote it: texts and entries are byte strings."""
    entries = bytes(range(256)) * (rows * 12)

    def text(value: str) -> bytes:
        return b"U" + bytes([len(value)]) + value.encode()

    order = text("|") + b"NNN" + 2 * b"J\xff\xff\xff\xff" + b"K\x00"
    kind = b"cnumpy\ndtype\n(" + text("u1") + b"K\x00K\x01tR(K\x03" + order + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text("b") + b"tR"
    shape = b"(K" + bytes([rows]) + b"M\x00\x0ct"  # (rows, 3072)
    state = b"(K\x01" + shape + kind + b"\x89" + b"T" + len(entries).to_bytes(4, "little") + entries + b"tb"
    labels = b"](" + b"".join(b"K" + bytes([i]) for i in range(rows)) + b"e"
    return b"\x80\x02}(" + text("data") + array + state + text("labels") + labels + b"u."


def test_python_2_wrote_what_pickle_reads() -> None:
    expected = pickle.loads(like_python_2(), encoding="latin1")
    read = load_plain_pickle(like_python_2())
    assert read["labels"] == expected["labels"] == [0, 1]
    np.testing.assert_array_equal(read["data"], expected["data"])
    assert read["data"].dtype == np.uint8
    assert read["data"].shape == (2, 3072)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dtype", ["u1", "<i8", ">i4", "<f4", "f8", "?"])
def test_arrays_of_numbers(protocol: int, dtype: str) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    for value in (array, np.asfortranarray(array), array[:, ::2], array[:0]):
        read = load_plain_pickle(pickle.dumps({"a": [value, (1, "x", b"y", None)]}, protocol=protocol))["a"]
        np.testing.assert_array_equal(read[0], value)
        assert read[0].dtype == value.dtype
        assert read[1] == (1, "x", b"y", None)
        read[0][...] = 0  # the array is its owner's


class Calls:
    """Pickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nothing_is_called(protocol: int, tmp_path: Path) -> None:
    marker = tmp_path / "called"
    evil = pickle.dumps({"data": [Calls(Path.touch, marker)]}, protocol=protocol)
    with pytest.raises(DataFormatError, match="batch asks for .* it was not called"):
        load_plain_pickle(evil, "batch")
    assert not marker.exists()
    pickle.loads(evil)
    assert marker.exists()  # so it would have been


@pytest.mark.parametrize("function", [eval, exec, open, getattr, np.load, np.frombuffer, __import__])
def test_other_names_are_refused(function: Any) -> None:
    with pytest.raises(DataFormatError, match="asks for"):
        load_plain_pickle(pickle.dumps(Calls(function, "1")))


def test_arrays_of_objects_and_of_made_up_types_are_refused() -> None:
    with pytest.raises(DataFormatError, match="array of type 'O8'; only numbers"):
        load_plain_pickle(pickle.dumps(np.array([{}, []], dtype=object), protocol=2))
    with pytest.raises(DataFormatError, match="only numbers can be read"):
        load_plain_pickle(pickle.dumps(np.zeros(2, dtype=[("a", "f4")]), protocol=2))
    with pytest.raises(DataFormatError, match="only numbers can be read"):
        load_plain_pickle(pickle.dumps(np.array(["a", "b"]), protocol=2))


def test_an_array_that_says_it_is_longer_than_its_bytes() -> None:
    longer = like_python_2().replace(b"(K\x02M\x00\x0ct", b"(K\x04M\x00\x0ct")
    with pytest.raises(DataFormatError, match=r"shape \(4, 3072\) and type uint8 in 6144 bytes"):
        load_plain_pickle(longer)


def test_extension_codes_and_persistent_names_are_refused() -> None:
    for opcodes in (b"\x80\x02\x82\x01.", b"\x80\x02P1\n.", b"\x80\x02K\x01Q."):
        with pytest.raises(DataFormatError, match="not a complete pickle of plain data"):
            load_plain_pickle(opcodes)


def test_methods_that_stand_for_names_cannot_be_changed() -> None:
    """BUILD with a state of slots sets attributes of what it is given."""
    program = b"\x80\x02cnumpy\ndtype\n(N}U\x08__call__K\x01stb."
    pickletools.dis(program, out=io.StringIO())  # a program that pickle takes
    with pytest.raises(DataFormatError):
        load_plain_pickle(program)


@pytest.mark.parametrize("length", [0, 1, 10, 100, 5000])
def test_damaged_ones_say_so(length: int) -> None:
    with pytest.raises(DataFormatError, match="not a complete pickle of plain data"):
        load_plain_pickle(like_python_2()[:length])


def test_a_list_within_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(DataFormatError, match="RecursionError"):
        load_plain_pickle(pickle.dumps(endless))
