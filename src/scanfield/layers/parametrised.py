"""Parameters in a tree of layers: by dotted name, drawn by seed, replaced when they fit, frozen by prefix."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Self

import numpy

from scanfield import dispatch
from scanfield.advice import shown
from scanfield.arrays import Array, Namespace, check_floating, check_same_library, dtype_name, library_of
from scanfield.errors import ArgumentError, BackendError, DtypeError, ShapeError, StateError
from scanfield.keywords import advised_class
from scanfield.layers import parameters as drawing
from scanfield.layers.parameters import SCHEMES, Parameter
from scanfield.layers.tape import joined


@advised_class
class Parametrised:
    """What has parameters of its own (name -> ``Parameter``), and children that have theirs."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Constructors, also of a caller's own layers, answer a misspelt keyword with the right one."""
        super().__init_subclass__(**options)
        if "__init__" in cls.__dict__:
            advised_class(cls)

    def __init__(
        self,
        parameters: Mapping[str, Parameter] | None = None,
        children: Mapping[str, Any] | None = None,
        carries: tuple[str, ...] = (),
    ) -> None:
        self.parameters = dict(parameters or {})
        self.children: dict[str, Any] = dict(children or {})
        self.carries = carries
        self.training = True
        self.depth: int | None = None
        """The number of blocks, for a layer that is a row of blocks."""
        self._values: dict[str, Array] = {}
        self._frozen: set[str] = set()
        # Children may have arrays already; each of them has told of the classes inside it.
        held = next((o._values[name] for _, o, name in self.owners() if name in o._values), None)
        if held is not None:
            with suppress(BackendError):  # JAX's trees hold placeholders too
                dispatch.tell(library_of(held, "parameter").name, {type(self)})

    def __repr__(self) -> str:
        own = [f"{name} {tuple(x.shape)}" for name, x in self.parameters.items()]
        inner = [f"{name}: {child!r}".replace("\n", "\n  ") for name, child in self.children.items()]
        if not inner:
            return f"{type(self).__name__}({', '.join(own)})"
        return "\n  ".join([f"{type(self).__name__}(", *own, *inner]) + "\n)"

    # -- parameters ------------------------------------------------------------------------------------------

    def init(
        self,
        seed: Any = 0,
        xp: Namespace = numpy,
        device: Any = None,
        dtype: Any = "float32",
        scheme: str = "uniform",
    ) -> Self:
        """Draw all parameters; the layer itself is returned.

        Parameters
        ----------
        seed : int
            One seed gives the same numbers on every library; each parameter has a stream of its own, by its name.
        xp : namespace
            ``numpy``, ``torch``, ``jax.numpy``, ``cupy``, ...
        device, dtype
            Of the parameters; dtype by name or as the library's. float16 and bfloat16 are computed with in float32.
        scheme : {"uniform", "normal", "mamba_ssm", "zeros"}
            For weights: uniform in +-1/sqrt(fan in), as torch's layers; N(0, 0.02^2), as transformers; as "uniform" with no
            biases of linear layers, and the last projections of mixers and MLPs divided by the root of their number in
            a ``LanguageModel``, as in mamba_ssm. Decay rates, steps, skips and norms start as in their papers. "zeros": all
            parameters 0, from which nothing is learnt.

        Raises
        ------
        ArgumentError, DtypeError, DeviceError
            For a namespace, seed or scheme, a dtype, a device that is none.
        """
        if scheme not in SCHEMES:
            raise ArgumentError(f"scheme: {shown(scheme)}; allowed are {', '.join(map(repr, SCHEMES))}")
        if isinstance(seed, bool) or not isinstance(seed, int | numpy.integer) or seed < 0:
            raise ArgumentError(f"seed: {shown(seed)}; allowed is an integer of at least 0")
        make = drawing.maker(xp, device, dtype)
        depths = self._depths(1)
        for full, owner, name in self.owners():
            drawn = drawing.numbers(owner.parameters[name], int(seed), full, scheme, depths[id(owner)])
            owner._values[name] = make(drawn)
        self._tell(make(numpy.zeros(1)))
        return self

    def _depths(self, depth: int) -> dict[int, int]:
        """How many blocks stand in the row of blocks of which a layer is a part, by the id of the layer."""
        depth = self.depth or depth
        found = {id(self): depth}
        for child in self.children.values():
            found |= child._depths(depth)
        return found

    def owners(self, prefix: str = "") -> Iterator[tuple[str, Parametrised, str]]:
        """Each parameter by dotted name, with the layer that holds it and its name there."""
        for name in self.parameters:
            yield joined(prefix, name), self, name
        for name, child in self.children.items():
            yield from child.owners(joined(prefix, name))

    def shared(self) -> list[list[str]]:
        """The names of each parameter that has several, as its layer stands in several places.

        Where several come with an array each, as in ``set_parameters`` and ``adopt``, the last one counts.
        """
        names: dict[tuple[int, str], list[str]] = {}
        for full, owner, name in self.owners():
            names.setdefault((id(owner), name), []).append(full)
        return [given for given in names.values() if len(given) > 1]

    def named_layers(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """All layers in this one by dotted name, itself first under the name ``""``."""
        yield prefix, self
        for name, child in self.children.items():
            yield from child.named_layers(joined(prefix, name))

    def named_parameters(self) -> dict[str, Array]:
        """All parameters by dotted name, in the order in which they were declared.

        StateError before ``init``.
        """
        found = {}
        for full, owner, name in self.owners():
            if name not in owner._values:
                raise StateError(f"parameter {full!r} has no value yet; layer.init(seed, xp) draws all")
            found[full] = owner._values[name]
        return found

    def set_parameter(self, name: str, array: Array) -> None:
        """Put another array in the place of a parameter.

        Raises
        ------
        ArgumentError
            For an unknown name.
        ShapeError, DtypeError, BackendError, DeviceError
            Unless shape, dtype, library and device are those of the present one; then nothing is changed.
        """
        self.set_parameters({name: array})

    def set_parameters(self, arrays: Mapping[str, Array]) -> None:
        """Several at once, as ``set_parameter``: all or none."""
        owners = self._checked(arrays)
        first = any(name not in owner._values for owner, name in owners.values())
        for full, array in arrays.items():
            owner, name = owners[full]
            owner._values[name] = array
        if first:
            self._tell(next(iter(arrays.values())))

    def replaced(self, arrays: Mapping[str, Array]) -> Self:
        """A layer like this one with other arrays for these parameters; this one is left alone.

        Parameters as a dictionary are a pytree: ``lambda p, x: layer.replaced(p)(x)`` is a function for ``jax.jit`` and
        ``jax.grad``, and its arrays may be tracers. A layer without ``init`` takes them all.
        """
        owners = self._checked(arrays)
        own = {id(owner): {**owner._values} for owner, _ in owners.values()}
        for full, array in arrays.items():
            owner, name = owners[full]
            own[id(owner)][name] = array
        made = self._with(own)
        if any(name not in owner._values for owner, name in owners.values()):
            made._tell(next(iter(arrays.values())))
        return made

    def _tell(self, array: Array) -> None:
        """Tell the backend of the parameters which classes hold them."""
        dispatch.tell(library_of(array, "parameter").name, {type(layer) for _, layer in self.named_layers()})

    def bare(self) -> Self:
        """A layer like this one without arrays."""
        return self._with({id(owner): {} for _, owner in self.named_layers()})

    def holding(self, leaves: Iterable[Any]) -> Self:
        """A layer like this one with these in the places of its parameters, in order and unchecked."""
        own: dict[int, dict[str, Any]] = {}
        for (_, owner, name), leaf in zip(self.owners(), leaves, strict=True):
            own.setdefault(id(owner), {})[name] = leaf
        return self._with(own)

    def adopt(self, arrays: Mapping[str, Array]) -> Self:
        """Take all parameters, by dotted name, as they are, without a copy and without ``init``; the layer is returned.

        Raises
        ------
        StateError
            For a name too many or too few; then, as for the others, nothing is changed.
        ShapeError, DtypeError, BackendError, DeviceError
            For arrays of another shape than the layer declares, of no real float dtype, or that do not go together.
        """
        owners = {full: (owner, name) for full, owner, name in self.owners()}
        missing, unknown = sorted(owners.keys() - arrays.keys()), sorted(arrays.keys() - owners.keys())
        if missing or unknown:
            raise StateError(f"parameters: missing are {missing}, unknown are {unknown}")
        check_same_library(list(arrays.items()))
        for full, (owner, name) in owners.items():
            shape = owner.parameters[name].shape
            check_floating(arrays[full], full, complex_allowed=False)
            if tuple(arrays[full].shape) != shape:
                raise ShapeError(f"{full}: shape {tuple(arrays[full].shape)}, must be {shape}")
        for full, (owner, name) in owners.items():
            owner._values[name] = arrays[full]
        if arrays:
            self._tell(next(iter(arrays.values())))
        return self

    def _with(self, values: Mapping[int, dict[str, Array]], copies: dict[int, Any] | None = None) -> Self:
        copies = {} if copies is None else copies
        if id(self) not in copies:  # a layer in two places is one layer in the copy too
            made = copies[id(self)] = copy.copy(self)
            made._values = values.get(id(self), self._values)
            made._frozen = set(self._frozen)
            made.children = {name: child._with(values, copies) for name, child in self.children.items()}
        copied: Self = copies[id(self)]
        return copied

    def _checked(self, arrays: Mapping[str, Array]) -> dict[str, tuple[Parametrised, str]]:
        owners = {full: (owner, name) for full, owner, name in self.owners()}
        # Before init, arrays for all parameters are checked against one another and against what was declared.
        bare = arrays.keys() >= owners.keys() and not any(name in o._values for o, name in owners.values())
        present = arrays if bare else self.named_parameters()
        for full, array in arrays.items():
            if full not in owners:
                raise ArgumentError(f"parameter {full!r}: unknown; the layer has {', '.join(owners)}")
            first = next(iter(present.values())) if bare else present[full]
            check_same_library([("present parameters", first), (full, array)])
            owner, name = owners[full]
            wanted = owner.parameters[name].shape
            if tuple(array.shape) != wanted:
                raise ShapeError(f"{full}: shape {tuple(array.shape)}, must be {wanted}")
            if dtype_name(array.dtype) != dtype_name(present[full].dtype):
                raise DtypeError(
                    f"{full}: dtype {dtype_name(array.dtype)}, must be {dtype_name(present[full].dtype)}"
                )
        return {full: owners[full] for full in arrays}

    # -- what is trained -------------------------------------------------------------------------------------

    def freeze(self, prefix: str = "") -> None:
        """Give these parameters no gradient: an exact name, all under a dotted prefix, or all without one.

        ArgumentError, and nothing changed, if no parameter has that name or prefix.
        """
        for _, owner, name in self._matching(prefix):
            owner._frozen.add(name)

    def unfreeze(self, prefix: str = "") -> None:
        """The opposite of ``freeze``."""
        for _, owner, name in self._matching(prefix):
            owner._frozen.discard(name)

    def _matching(self, prefix: str) -> list[tuple[str, Parametrised, str]]:
        if not isinstance(prefix, str):
            raise ArgumentError(f"prefix: {shown(prefix)}; a dotted name is expected, or '' for all")
        found = [
            entry
            for entry in self.owners()
            if not prefix or entry[0] == prefix or entry[0].startswith(prefix + ".")
        ]
        if not found:
            raise ArgumentError(
                f"prefix: {shown(prefix)} is no parameter and no prefix of one; the layer has "
                f"{', '.join(full for full, _, _ in self.owners())}"
            )
        return found

    def trainable(self) -> dict[str, Array]:
        """The parameters that are not frozen, by name."""
        frozen = {full for full, owner, name in self.owners() if name in owner._frozen}
        return {name: array for name, array in self.named_parameters().items() if name not in frozen}

    def train(self) -> Self:
        """Mark this layer and all in it as in training. (None of ours computes otherwise in evaluation.)"""
        return self._mode(True)

    def eval(self) -> Self:
        """The opposite of ``train``."""
        return self._mode(False)

    def _mode(self, training: bool) -> Self:
        for _, layer in self.named_layers():
            layer.training = training
        return self


def sizes(**given: Any) -> None:
    """ArgumentError unless each of these is an integer of at least 1."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | numpy.integer) or value < 1:
            raise ArgumentError(f"{name}: {shown(value)}; allowed is an integer of at least 1")
