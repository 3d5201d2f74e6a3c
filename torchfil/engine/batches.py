"""Batches that remember which examples they hold; the batch that the loop reads becomes the current one.

A batch is returned as an object of the same kind and content that also knows its ids: a list, tuple or
dict, a named tuple, a dataclass, or a ``UserDict`` such as Hugging Face's ``BatchEncoding``. The ids stay with it when
it is copied, pickled in a worker, or pinned.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import threading
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from torchfil.utils.trees import map_tensors

__all__ = [
    "BatchTracker",
    "can_remember",
    "emptied",
    "make_current",
    "plain",
    "remembering",
    "tracker_of",
    "worker_options",
]

_TRACKERS: weakref.WeakValueDictionary[int, BatchTracker] = weakref.WeakValueDictionary()
_TOKENS = itertools.count()


def tracker_of(token: int) -> BatchTracker | None:
    """The tracker with that token, if it is still in use."""
    return _TRACKERS.get(token)


class BatchTracker:
    """Remembers the batch that the training loop read last: its ids and its content.

    Attributes:
        ids: The examples' numbers, or keys of a stream; None: no batch was read.
        earlier: The content of the two batches before.
        parts: How many batches each draw of the sampler is split into.
        draws: The examples of each such draw in the current pass over the data, if there are several parts.
    """

    def __init__(self) -> None:
        self.token = next(_TOKENS)
        self.ids: list[Any] | None = None
        self.earlier: deque[Any] = deque(maxlen=2)
        self.parts = 1
        self.draws: set[frozenset[int]] = set()
        self._read: Any = None
        self._as_it_came: Any = None
        self._thread: int | None = None
        _TRACKERS[self.token] = self

    def begin_pass(self) -> None:
        """From now on, only reads by the current thread count; other threads pin memory."""
        self._thread = threading.get_ident()
        self.draws.clear()

    def in_parts(self, drawn: list[int]) -> Iterator[list[int]]:
        """The batches into which a draw is split."""
        if self.parts > 1:
            self.draws.add(frozenset(drawn))
        return (drawn[part :: self.parts] for part in range(self.parts))

    def take(self, ids: list[Any], batch: Any) -> None:
        """Make this the current batch."""
        if self._thread is not None and self._thread != threading.get_ident():
            return
        if batch is not self._read or ids != self.ids:
            if self.ids is not None:
                self.earlier.append(self._as_it_came)
            self._as_it_came = _content(batch)
        self._read, self.ids = batch, ids

    @property
    def batch(self) -> Any:
        """The content of the current batch, including items that the loop has taken out of it."""
        now, before = _content(self._read), self._as_it_came
        if isinstance(now, UserDict):
            now.data = {**before.data, **now.data}
            return now
        if isinstance(now, dict):
            return {**before, **now}
        return before if isinstance(now, list) and len(now) < len(before) else now


def _content(batch: Any) -> Any:
    """The batch, as a new list, dict, tuple or object."""
    if isinstance(batch, _RememberingObject):
        return batch._without_ids()
    if isinstance(batch, dict):
        return dict(dict.items(batch))
    if isinstance(batch, RememberingTuple):
        return tuple(tuple.__iter__(batch))
    if isinstance(batch, UserDict):
        return copy.copy(batch)
    return list(list.__iter__(batch)) if isinstance(batch, list) else batch


def plain(tree: Any) -> Any:
    """The same, with plain tuples, lists and dicts instead of batches that remember their ids."""
    kind = type(tree)
    if isinstance(tree, _Remembering):
        return plain(_content(tree))
    if kind is tuple or kind is list:
        return kind([plain(part) for part in tree])
    return {key: plain(part) for key, part in tree.items()} if kind is dict else tree


class _Remembering:
    """A batch with its ids; reading it makes it the current batch of the tracker with that token.

    If other code copies it with ``type(batch)(content)``, for example to move it to a device, the copy has no ids; the
    batch that was read for the copy stays the current one.
    """

    _ids: Sequence[Any] = ()
    _token: int = -1  # no tracker

    def _touch(self) -> None:
        tracker = _TRACKERS.get(self._token)
        if tracker is not None:
            tracker.take(list(self._ids), self)

    def __reduce__(self) -> Any:
        return remembering, (_content(self), self._ids, self._token)

    def pin_memory(self) -> Any:
        """The same batch in pinned memory; torch calls this before it looks inside a batch."""
        return remembering(pin_memory(_content(self)), self._ids, self._token)


def make_current(tree: Any) -> None:
    """Make a batch that is passed on unread the current one of its tracker."""
    if isinstance(tree, _Remembering):
        tree._touch()
    elif type(tree) in (tuple, list, dict):
        for part in tree.values() if isinstance(tree, dict) else tree:
            make_current(part)


def _touching(method: Callable[..., Any]) -> Any:
    """A method of a plain list, tuple or dict that makes the batch the current one first."""

    @functools.wraps(method)
    def touched(self: _Remembering, *args: Any) -> Any:
        self._touch()
        return method(self, *args)

    return touched


class RememberingList(_Remembering, list[Any]):
    """A list batch that remembers its ids."""

    __getitem__ = _touching(list.__getitem__)
    __iter__ = _touching(list.__iter__)


class RememberingTuple(_Remembering, tuple[Any, ...]):
    """A tuple batch that remembers its ids."""

    __getitem__ = _touching(tuple.__getitem__)
    __iter__ = _touching(tuple.__iter__)


class RememberingDict(_Remembering, dict[Any, Any]):
    """A dict batch that remembers its ids."""

    __getitem__ = _touching(dict.__getitem__)
    __iter__ = _touching(dict.__iter__)
    get = _touching(dict.get)
    items = _touching(dict.items)
    values = _touching(dict.values)
    pop = _touching(dict.pop)


class _RememberingObject(_Remembering):
    """A batch of any other kind, read by its attributes; its original class is the next base class."""

    _plain_kind: type = object

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name != "pin_memory":
            object.__getattribute__(self, "_touch")()
        return object.__getattribute__(self, name)

    def _without_ids(self) -> Any:
        """An object of the plain kind with the same content."""
        kind: Any = self._plain_kind
        if isinstance(self, tuple):
            return tuple.__new__(kind, tuple.__iter__(self))
        made: Any = object.__new__(kind)
        for name, value in _attributes(self, kind).items():
            object.__setattr__(made, name, value)
        if isinstance(made, UserDict):
            made.data = dict(made.data)
        return made


_REMEMBERING: dict[type, type] = {list: RememberingList, tuple: RememberingTuple, dict: RememberingDict}


def can_remember(batch: Any) -> bool:
    """Whether a batch can carry ids."""
    named = isinstance(batch, tuple) and hasattr(batch, "_fields")
    holds = isinstance(batch, UserDict) or (dataclasses.is_dataclass(batch) and not isinstance(batch, type))
    return type(batch) in _REMEMBERING or named or holds


def remembering(batch: Any, ids: Sequence[Any], token: int) -> Any:
    """The batch with its ids; when read, it becomes the current batch of the tracker with that token."""
    kind = type(batch)
    if kind not in _REMEMBERING:
        _REMEMBERING[kind] = _kind_that_remembers(kind)
    made_kind: Any = _REMEMBERING[kind]
    made: Any
    if not issubclass(made_kind, _RememberingObject):
        made = made_kind(batch)
    elif isinstance(batch, tuple):
        made = tuple.__new__(made_kind, batch)
    else:
        made = object.__new__(made_kind)
        for name, value in _attributes(batch, kind).items():
            object.__setattr__(made, name, value)
    object.__setattr__(made, "_ids", ids)
    object.__setattr__(made, "_token", token)
    return made


def emptied(batch: Any) -> Any:
    """An empty batch of the same kind, for the same tracker.

    Example:
        >>> import torch
        >>> emptied(remembering([torch.ones(2, 3)], [4, 7], token=-1))
        [tensor([], size=(0, 3))]
    """
    return remembering(map_tensors(lambda part: part[:0], _content(batch)), [], batch._token)


def _kind_that_remembers(kind: type) -> type:
    """A class of the same name that also has the ids."""
    methods: dict[str, Any] = {"_plain_kind": kind, "__reduce__": _Remembering.__reduce__}
    if issubclass(kind, tuple):
        methods |= {"__getitem__": _touching(tuple.__getitem__), "__iter__": _touching(tuple.__iter__)}
    return type(kind.__name__, (_RememberingObject, kind), methods)


def _attributes(holder: Any, kind: type) -> dict[str, Any]:
    """Everything that an object holds, in its dict or in slots, except its ids."""
    held = dict(getattr(holder, "__dict__", {}))
    slots = [part.name for part in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    for name in slots:
        if name not in held:
            held[name] = object.__getattribute__(holder, name)
    return {name: value for name, value in held.items() if name not in ("_ids", "_token")}


def worker_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """A loader's settings for another loader over the same data: workers, their memory and random numbers.

    Example:
        >>> worker_options(DataLoader([1, 2], num_workers=0))["num_workers"]
        0
    """
    names = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator")
    return {name: getattr(loader, name) for name in (*names, "prefetch_factor", "persistent_workers")}
