"""From the user's arrays to canonical ones and back: layouts, sizes, libraries and dtypes, by an operation's record.

Glossary: a *layout* is a tuple of axis names; None in it is an axis that this layout lacks and that gets size 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy

from scanfield import advice
from scanfield.arrays import (
    COMPLEX,
    COMPLEX_OF,
    HALF,
    Array,
    Namespace,
    cast,
    check_floating,
    check_same_library,
    dtype_of,
    is_complex,
    library_of,
    widest,
)
from scanfield.dispatch import Input
from scanfield.errors import ArgumentError, ShapeError

Layout = tuple[str | None, ...]


class Checked(NamedTuple):
    """Canonical arrays by name (absent ones None), and what was learnt of them."""

    arrays: dict[str, Any]
    dims: dict[str, int]
    xp: Namespace
    library: str
    compute: str
    main_dtype: Any
    given: dict[str, Array]
    """The user's arrays, for the shapes and dtypes of their gradients."""


class _Entry(NamedTuple):
    name: str
    shown: str
    """What the caller calls it: a step's state is no initial one."""
    role: str
    optional: bool
    complex_allowed: bool
    layouts: dict[int, Layout]
    tied: frozenset[str]


class Canonical:
    """The checks of one operation's inputs, made ready once from its record."""

    def __init__(
        self,
        inputs: Sequence[Input],
        main: str,
        then: tuple[str, Callable[[Mapping[str, int]], None]] | None = None,
    ) -> None:
        self.main = main
        # (input, check): run on the sizes once that input is read, before others are compared with them.
        self._then = then or ("", _nothing)
        arrays = [entry for entry in inputs if entry.role != "index"]
        self._whole = tuple(_entry(entry, step=False) for entry in arrays)
        self._step = tuple(_entry(entry, step=True) for entry in arrays)

    def __call__(
        self,
        arrays: Mapping[str, Any],
        *,
        sequences: int | None = None,
        step: bool = False,
        known: Mapping[str, int] | None = None,
    ) -> Checked:
        """Check all arrays against each other and bring them to canonical layout and dtype.

        ``sequences`` is the number of packed sequences (None: states have the batch's size); ``known`` are sizes that
        no array has to show.
        """
        entries = self._step if step else self._whole
        given = {}
        for entry in entries:
            array = arrays[entry.name]
            if array is not None:
                given[entry.name] = array
            elif not entry.optional:
                raise ArgumentError(f"{entry.shown}: an array is needed, came None")
        present = [entry for entry in entries if entry.name in given]
        library = check_same_library(
            [(entry.shown, given[entry.name]) for entry in present],
            peers=True,
            shape_of=lambda name: _constant(name, entries, given, {**(known or {}), "sequence": sequences}),
        )
        names = {
            entry.name: check_floating(
                given[entry.name], entry.shown, complex_allowed=entry.complex_allowed, beside=given.values()
            )
            for entry in present
        }
        xp = library.namespace
        dims: dict[str, int] = dict(known or ())
        if sequences is not None:
            dims["sequence"] = sequences
        canonical: dict[str, Any] = {}
        compute = widest(names.values())
        uniform = len(set(names.values())) == 1 and names[self.main] == compute
        for entry in entries:
            array = given.get(entry.name)
            if array is None:
                canonical[entry.name] = None
                continue
            array = _match(xp, entry, array, dims, given, entries)
            if not uniform:
                name = names[entry.name]
                if name not in HALF or entry.role != "sequence":
                    array = cast(xp, array, dtype_of(xp, COMPLEX_OF[compute] if name in COMPLEX else compute))
            canonical[entry.name] = array
            if entry.name == self._then[0]:
                self._then[1](dims)
        if step:
            dims["time"] = 1
        return Checked(canonical, dims, xp, library.name, compute, given[self.main].dtype, given)


def _nothing(dims: Mapping[str, int]) -> None:
    """No check."""


def _entry(entry: Input, *, step: bool) -> _Entry:
    return _Entry(
        entry.name,
        "state" if step and entry.role == "state" else entry.name,
        entry.role,
        entry.optional,
        entry.complex_allowed,
        step_layouts(entry) if step else _by_rank(entry.layouts),
        entry.tied,
    )


def _by_rank(texts: Sequence[str]) -> dict[int, Layout]:
    layouts = {}
    for text in texts:
        axes = tuple(None if axis == "1" else axis for axis in text.split())
        layouts[sum(axis is not None for axis in axes)] = axes
    return layouts


def step_layouts(entry: Input) -> dict[int, Layout]:
    """The layouts of one token's array, by rank: those of a sequence without their time axis.

    A layout that never had one stays, unless one with the same rank has lost its own: ranks alone tell layouts apart.
    """
    whole = _by_rank(entry.layouts)
    if entry.role != "sequence":
        return whole
    layouts: dict[int, Layout] = {
        rank - 1: tuple(None if axis == "time" else axis for axis in axes)
        for rank, axes in whole.items()
        if "time" in axes
    }
    for rank, axes in whole.items():
        if "time" not in axes:
            layouts.setdefault(rank, axes)
    return layouts


def layout_text(layout: Layout) -> str:
    """(batch, heads, key)"""
    return f"({_names(layout)})"


def _match(
    xp: Namespace,
    entry: _Entry,
    array: Array,
    dims: dict[str, int],
    given: Mapping[str, Array],
    entries: Sequence[_Entry],
) -> Array:
    shape = array.shape
    layout = entry.layouts.get(len(shape))
    if layout is None:
        raise ShapeError(
            f"{entry.shown}: shape {tuple(shape)} has {axes_text(len(shape))}; expected {_allowed(entry.layouts)}"
            f"{_mended(entry, shape, dims)}"
        )
    if entry.role == "state" and "sequence" not in dims:
        dims["sequence"] = dims["batch"]
    position = 0
    for axis in layout:
        if axis is None:
            continue
        size = shape[position]
        position += 1
        if dims.setdefault(axis, size) != size and not (size == 1 and axis in entry.tied):
            raise _disagreement(entry, layout, shape, axis, dims, given, entries)
    if position == len(layout):
        return array
    whole = []
    position = 0
    for axis in layout:
        whole.append(1 if axis is None else shape[position])
        position += axis is not None
    return xp.reshape(array, tuple(whole))


def _constant(
    name: str, entries: Sequence[_Entry], given: Mapping[str, Any], known: Mapping[str, int | None]
) -> tuple[int, ...] | None:
    """The smallest shape of an argument that is one number everywhere, by the sizes that the other arrays show."""
    sizes = {axis: size for axis, size in known.items() if size is not None}
    for entry in entries:
        shape = advice.shape_of(given.get(entry.name)) or ()
        axes = [axis for axis in entry.layouts.get(len(shape), ()) if axis is not None]
        for axis, size in zip(axes, shape, strict=False):
            if size != 1 or axis not in entry.tied:
                sizes.setdefault(axis, size)
    if "batch" in sizes:
        sizes.setdefault("sequence", sizes["batch"])
    wanted = next(entry for entry in entries if entry.shown == name)
    for _, layout in sorted(wanted.layouts.items()):
        axes = [axis for axis in layout if axis is not None]
        if all(axis in wanted.tied or axis in sizes for axis in axes):
            return tuple(1 if axis in wanted.tied else sizes[axis] for axis in axes)
    return None


def _allowed(layouts: Mapping[int, Layout]) -> str:
    return " or ".join(f"({_names(layout)})" for layout in layouts.values())


def _mended(entry: _Entry, shape: Sequence[int], dims: Mapping[str, int]) -> str:
    """The line that adds what one sequence alone, or a series of numbers, lacks."""
    least = min(entry.layouts)
    if entry.role != "sequence" or "time" not in entry.layouts[least]:
        return ""
    axes = [axis for axis in entry.layouts[least] if axis is not None]
    # Without its batch axis the array must fit the arrays before it: it may lack another one.
    if len(shape) == least - 1 and any(
        dims.get(axis, size) != size for axis, size in zip(axes[1:], shape, strict=False)
    ):
        return ""
    return add_axes(entry.shown, len(shape), least)


def axes_text(count: int) -> str:
    """1 axis, 2 axes"""
    return "1 axis" if count == 1 else f"{count} axes"


def add_axes(name: str, axes: int, wanted: int) -> str:
    """The line that makes an array (batch, time, ...) of one that is a series of numbers or lacks its batch axis."""
    if axes == 1:
        return f"; one series: {name} = {name}[None, :{', None' * (wanted - 2)}]"
    return f"; one sequence: {name} = {name}[None, ...]" if axes == wanted - 1 else ""


def _names(layout: Layout) -> str:
    # "groups_B" and "groups_C" are sizes of their own under one name.
    return ", ".join(axis.split("_")[0] for axis in layout if axis is not None)


def _disagreement(
    entry: _Entry,
    layout: Layout,
    shape: Sequence[int],
    axis: str,
    dims: Mapping[str, int],
    given: Mapping[str, Array],
    entries: Sequence[_Entry],
) -> ShapeError:
    owner = next(
        (e for e in entries if e.name in given and axis in (e.layouts.get(len(given[e.name].shape)) or ())),
        entry,
    )
    if owner.name != entry.name:
        source = f"{owner.shown} {tuple(given[owner.name].shape)}"
    elif axis == "sequence":
        source = "cu_seqlens" if dims.get("batch") != dims["sequence"] else "the batch"
    else:
        source = "the other arrays"
    got = shape[[a for a in layout if a is not None].index(axis)]
    wanted = tuple(dims.get(a, "?") for a in layout if a is not None)
    text = str(wanted).replace("'", "")
    return ShapeError(
        f"{entry.shown}: shape {tuple(shape)}, but ({_names(layout)}) = {text} is expected: "
        f"axis {axis} is {got}, and {dims[axis]} by {source}"
    )


def restore(checked: Checked, gradients: Mapping[str, Array]) -> dict[str, Array]:
    """Gradients of canonical arrays as the user's: their shapes and dtypes, the real part for real ones."""
    xp = checked.xp
    back = {}
    with quiet(checked.library):
        for name, gradient in gradients.items():
            array = checked.given.get(name)
            if array is None:
                continue
            if not is_complex(array) and is_complex(gradient):
                gradient = xp.real(gradient)
            if gradient.shape != array.shape:
                gradient = xp.reshape(gradient, tuple(array.shape))
            back[name] = cast(xp, gradient, array.dtype)
    return back


def quiet(library: str, like: Array | None = None) -> AbstractContextManager[Any]:
    """No floating-point warnings from NumPy: overflow and NaN come out as IEEE says, as in every other library.

    On the device of ``like``, torch's autocast is off: numbers are carried in the dtype that the call says.
    """
    if library == "numpy":
        return numpy.errstate(all="ignore")
    if library == "torch" and like is not None:
        xp, device = library_of(like, "array").namespace, like.device.type
        if device != "meta" and xp.is_autocast_enabled(device):
            return xp.autocast(device, enabled=False)  # type: ignore[no-any-return]  # a namespace is Any
    return nullcontext()


def cotangent(
    checked: Checked, array: Array | None, name: str, shape: Sequence[int], complex_result: bool
) -> Array | None:
    """A cotangent in the carry's dtype, its shape and library checked; None stays None."""
    if array is None:
        return None
    first = next(iter(checked.given.items()))
    check_same_library([first, (name, array)], shape_of=lambda _: tuple(shape))
    check_floating(array, name, complex_allowed=complex_result)
    if tuple(array.shape) != tuple(shape):
        raise ShapeError(f"{name}: shape {tuple(array.shape)}, but the result has shape {tuple(shape)}")
    with quiet(checked.library):
        return cast(
            checked.xp,
            array,
            dtype_of(checked.xp, COMPLEX_OF[checked.compute] if complex_result else checked.compute),
        )
