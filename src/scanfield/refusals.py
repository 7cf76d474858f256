"""The errors for what is no array, and for arrays of two libraries or devices, each with the line that mends it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from scanfield import advice
from scanfield.advice import HOST, Like, class_of, shown
from scanfield.errors import BackendError, DeviceError

# What a caller can write: a name, with an index behind it.
_CODE = re.compile(r"[A-Za-z_]\w*(\[[^\[\]]*\])?")

# Names that a message lists one by one: what a scan takes; a model has hundreds.
_MOST_NAMES = 16


class Beside(NamedTuple):
    """The call of which a refused argument is one; made and read for the message alone."""

    arrays: Sequence[tuple[str, Any]]
    peers: bool
    held: tuple[str, Mapping[str, Any]] | None
    tokens: bool
    shape_of: Callable[[str], tuple[int, ...] | None] | None
    describe: Callable[[str, Any], Like | None]
    """None for what is no array."""

    def described(self, name: str, array: Any) -> Like | None:
        """An array under what a caller can write for it: its name, if that is code, or where its layer keeps it."""
        like = self.describe(name, array)
        if like is None:
            return None
        if self.held is not None and self.is_held(name, array):
            return like._replace(name=f"{self.held[0]}.named_parameters()[{name!r}]")
        return like._replace(name=name if _CODE.fullmatch(name) else "")

    def is_held(self, name: str, array: Any) -> bool:
        """Whether an array is one of the parameters."""
        return self.held is not None and self.held[1].get(name) is array

    def like(self) -> Like:
        """What the others are brought to: the first array, or one of another library than NumPy where any may be."""
        found = [
            (self.is_held(name, array), like)
            for name, array in self.arrays
            if (like := self.described(name, array)) is not None
        ]
        if not found:
            return HOST
        order = [like for held, like in found if held] or [like for _, like in found]
        if self.peers and order[0].library == "numpy":
            order = [like for _, like in found if like.library != "numpy"] or order
        same = [like for like in order if like.library == order[0].library]
        # The first with a floating dtype says one, and is as good for the rest.
        return next((like for like in same if like.dtype), same[0])


def no_array(array: Any, argument: str, beside: Beside | None) -> BackendError | None:
    """The error for a number, a list, a matrix or a masked array; None for anything else."""
    if isinstance(array, numpy.matrix | numpy.ma.MaskedArray):
        filled = isinstance(array, numpy.ma.MaskedArray)
        line = f"{argument}.filled(0.0)" if filled else f"numpy.asarray({argument})"
        return BackendError(
            f"{argument}: {class_of(array)} is not taken, as its arithmetic differs from an array's; {argument} = {line}"
        )
    if not isinstance(array, bool | int | float | complex | numpy.generic | list | tuple | str):
        return None
    said = f"{argument}: expected an array, came {class_of(array)} ({shown(array)})"
    if isinstance(array, str):
        return BackendError(said)
    like = HOST if beside is None else beside.like()
    if beside is not None and not isinstance(array, list | tuple):
        shape = None if beside.shape_of is None else beside.shape_of(argument)
        if shape is None:  # an array of no axes would be refused next
            return BackendError(said)
        return BackendError(
            f"{said}; the same everywhere: {argument} = {advice.of_number(argument, array, shape, like)}"
        )
    tokens = beside is not None and beside.tokens
    line = advice.of_list(argument, like, tokens=tokens)
    more = " makes one, dtype=int one of tokens (or your library's asarray)"
    return BackendError(
        f"{said}; {argument} = {line}{more if beside is None and _holds_integers(array) else ''}"
    )


def _holds_integers(values: Any) -> bool:
    """Whether the first number of a nested list is an integer, as tokens are."""
    while isinstance(values, list | tuple) and values:
        values = values[0]
    return type(values) is int


def no_library(array: Any, argument: str, beside: Beside | None) -> BackendError:
    """The error for an object of no array library: a table, a sparse matrix, a dictionary."""
    line = advice.of_object(argument, array, HOST if beside is None else beside.like())
    return BackendError(
        f"{argument}: expected an array of a library that follows the array API standard, came {class_of(array)}"
        f"{'' if line is None else f'; {argument} = {line}'}"
    )


def mixed(beside: Beside) -> BackendError:
    """The error for arrays of several libraries: which is which, and what is converted."""
    kinds = {
        name: like.library
        for name, array in beside.arrays
        if (like := beside.describe(name, array)) is not None
    }
    by_kind: dict[str, list[str]] = {}
    for name, array in beside.arrays:
        said = "the parameters" if beside.is_held(name, array) else name
        if said not in by_kind.setdefault(kinds[name], []):
            by_kind[kinds[name]].append(said)
    listed = ", ".join(_counted(names, kind) for kind, names in by_kind.items())
    goal = beside.like()
    lines, moving = [], False
    for name, array in beside.arrays:
        if kinds[name] == goal.library:
            continue
        if not beside.is_held(name, array):
            lines.append(f"{name} = {advice.converted(name, kinds[name], goal)}")
        elif not moving and beside.held is not None:
            moving, keeper = True, beside.held[0]
            each = advice.converted("p", kinds[name], goal)
            whole = f"{{n: {each} for n, p in {keeper}.named_parameters().items()}}"
            lines.append(f"{keeper} = {keeper}.bare().adopt({whole})")
    return BackendError(
        f"arrays of several libraries: {listed}; nothing is converted silently: {'; '.join(lines)}"
    )


def _counted(names: list[str], kind: str) -> str:
    if len(names) > _MOST_NAMES:
        return f"{names[0]} and {len(names) - 1} more are {kind}"
    return ", ".join(f"{name} {'are' if name.endswith('parameters') else 'is'} {kind}" for name in names)


def apart(beside: Beside, name: str, array: Any) -> DeviceError:
    """The error for an array on another device than the first one; what a layer holds stays where it is."""
    first_name, first = beside.arrays[0]
    here, there = beside.described(first_name, first) or HOST, beside.described(name, array) or HOST
    stays = beside.is_held(name, array)
    line = (
        f"{first_name} = {advice.moved(first_name, there)}"
        if stays
        else f"{name} = {advice.moved(name, here)}"
    )
    return DeviceError(
        f"{name} is on device {there.device}, but {first_name} is on device {here.device}; nothing is copied between "
        f"devices silently: {line}"
    )
