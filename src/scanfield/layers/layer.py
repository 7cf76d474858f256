"""The protocol of all layers: parameters by dotted name, a call that changes nothing, one step, exact gradients.

A layer declares its ``parameters`` (name -> ``Parameter``), its ``children`` (name -> layer), the names of the state it
``carries``, and says in ``define`` what it computes. The rest stands here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Self

import numpy

from scanfield.arrays import (
    Array,
    Namespace,
    cast,
    check_floating,
    check_same_library,
    device_of,
    dtype_name,
    dtype_of,
    library_of,
    widest,
)
from scanfield.errors import ArgumentError, DtypeError, ShapeError, StateError
from scanfield.layers import parameters as drawing
from scanfield.layers.convolution import Bounds, read_bounds
from scanfield.layers.parameters import SCHEMES, Parameter
from scanfield.layers.tape import Run, Value, joined, walk_back
from scanfield.scans.canonical import quiet
from scanfield.scans.packing import check_bounds

State = dict[str, Array]
"""What a layer carries from one call to the next, by dotted name."""


class LayerResult(NamedTuple):
    """What a layer returns: ``output`` in the dtype of x, ``state`` by dotted name in float32 at least."""

    output: Array
    state: State


class Layer:
    """Base of all layers.

    A layer is made without arrays; ``init`` draws its parameters. Calls, gradients and relevance change nothing in it.
    """

    tokens: bool = False
    """Whether the input is integers (batch, time), not features (batch, time, width)."""
    kinds: ClassVar[tuple[str, ...]] = ("epsilon",)
    """The rules of relevance that may be chosen for this layer by name or type."""

    def __init__(
        self,
        parameters: Mapping[str, Parameter] | None = None,
        children: Mapping[str, Layer] | None = None,
        carries: tuple[str, ...] = (),
    ) -> None:
        self.parameters = dict(parameters or {})
        self.children = dict(children or {})
        self.carries = carries
        self.training = True
        self._values: dict[str, Array] = {}
        self._frozen: set[str] = set()

    def define(self, run: Run, x: Value) -> Value:
        """What the layer computes."""
        raise NotImplementedError(type(self).__name__)

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
        scheme : {"uniform", "normal", "zeros"}
            For weights: uniform in +-1/sqrt(fan in), as torch and mamba_ssm; N(0, 0.02^2), as transformers. Decay rates,
            steps, skips and norms start as in their papers. "zeros": all parameters 0, from which nothing is learnt.

        Raises
        ------
        ArgumentError, DtypeError
            For a namespace, dtype, seed or scheme that is none.
        """
        if scheme not in SCHEMES:
            raise ArgumentError(f"scheme: {scheme!r}; allowed are {', '.join(map(repr, SCHEMES))}")
        if isinstance(seed, bool) or not isinstance(seed, int | numpy.integer) or seed < 0:
            raise ArgumentError(f"seed: {seed!r}; allowed is an integer of at least 0")
        make = drawing.maker(xp, device, dtype)
        for full, owner, name in self._owners():
            owner._values[name] = make(drawing.numbers(owner.parameters[name], int(seed), full, scheme))
        return self

    def _owners(self, prefix: str = "") -> Iterator[tuple[str, Layer, str]]:
        for name in self.parameters:
            yield joined(prefix, name), self, name
        for name, child in self.children.items():
            yield from child._owners(joined(prefix, name))

    def named_layers(self, prefix: str = "") -> Iterator[tuple[str, Layer]]:
        """All layers in this one by dotted name, itself first under the name ``""``."""
        yield prefix, self
        for name, child in self.children.items():
            yield from child.named_layers(joined(prefix, name))

    def named_parameters(self) -> dict[str, Array]:
        """All parameters by dotted name, in the order in which they were declared.

        StateError before ``init``.
        """
        found = {}
        for full, owner, name in self._owners():
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
        for full, array in arrays.items():
            owner, name = owners[full]
            owner._values[name] = array

    def replaced(self, arrays: Mapping[str, Array]) -> Self:
        """A layer like this one with other arrays for these parameters; this one is left alone.

        Parameters as a dictionary are a pytree: ``lambda p, x: layer.replaced(p)(x)`` is a function for ``jax.jit`` and
        ``jax.grad``, and its arrays may be tracers.
        """
        owners = self._checked(arrays)
        own = {id(owner): {**owner._values} for owner, _ in owners.values()}
        for full, array in arrays.items():
            owner, name = owners[full]
            own[id(owner)][name] = array
        return self._with(own)

    def _with(self, values: Mapping[int, dict[str, Array]]) -> Self:
        made = copy.copy(self)
        made._values = values.get(id(self), self._values)
        made._frozen = set(self._frozen)
        made.children = {name: child._with(values) for name, child in self.children.items()}
        return made

    def _checked(self, arrays: Mapping[str, Array]) -> dict[str, tuple[Layer, str]]:
        owners = {full: (owner, name) for full, owner, name in self._owners()}
        present = self.named_parameters()
        for full, array in arrays.items():
            if full not in owners:
                raise ArgumentError(f"parameter {full!r}: unknown; the layer has {', '.join(owners)}")
            check_same_library([("present parameters", present[full]), (full, array)])
            if tuple(array.shape) != tuple(present[full].shape):
                raise ShapeError(f"{full}: shape {tuple(array.shape)}, must be {tuple(present[full].shape)}")
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

    def _matching(self, prefix: str) -> list[tuple[str, Layer, str]]:
        found = [
            entry
            for entry in self._owners()
            if not prefix or entry[0] == prefix or entry[0].startswith(prefix + ".")
        ]
        if not found:
            raise ArgumentError(
                f"prefix: {prefix!r} is no parameter and no prefix of one; the layer has "
                f"{', '.join(full for full, _, _ in self._owners())}"
            )
        return found

    def trainable(self) -> dict[str, Array]:
        """The parameters that are not frozen, by name."""
        frozen = {full for full, owner, name in self._owners() if name in owner._frozen}
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

    # -- running ---------------------------------------------------------------------------------------------

    def __call__(self, x: Array, state: State | None = None, *, cu_seqlens: Any = None) -> LayerResult:
        """The output and the state after the last token; nothing is changed.

        Parameters
        ----------
        x : array (batch, time, width), or integers (batch, time) for a layer of tokens
        state : dict, optional
            As an earlier call returned it; None starts from nothing.
        cu_seqlens : integers (sequences + 1,), optional
            Bounds of sequences packed into one row; the state then has a row for each.

        Raises
        ------
        StateError
            Before ``init``, and for a state that is not this layer's.
        ShapeError, DtypeError, BackendError, DeviceError
            For arrays that do not fit.
        """
        run, value = self.start(x, state, read_bounds(cu_seqlens))
        return self.finish(run, self.through(run, value), x)

    def step(self, x: Array, state: State | None = None) -> LayerResult:
        """One token: x (batch, width), or (batch,) integers; the output has no time axis either."""
        xp = library_of(x, "x").namespace
        if x.ndim != (1 if self.tokens else 2):
            raise ShapeError(
                f"x: shape {tuple(x.shape)}; one token is {'(batch,)' if self.tokens else '(batch, width)'}"
            )
        whole = xp.expand_dims(x, axis=1)
        run, value = self.start(whole, state, None)
        run.single = True
        output, after = self.finish(run, self.through(run, value), whole)
        return LayerResult(xp.squeeze(output, axis=1), after)

    def vjp(
        self, x: Array, state: State | None = None, *, cu_seqlens: Any = None
    ) -> tuple[LayerResult, Callable[..., tuple[Array | None, State | None, dict[str, Array]]]]:
        """The result, and the function that pulls cotangents back.

        Returns
        -------
        result : LayerResult
        pullback : callable
            ``pullback(d_output, d_state=None) -> (d_x, d_state, gradients)``: the gradient of x (None for tokens), of the
            state that came in (None if none did), and of each parameter that is not frozen, by name, in its dtype. Either
            cotangent may be None; ``d_state`` may hold some of the state's names.

        Examples
        --------
        >>> import numpy
        >>> from scanfield.layers import Linear
        >>> layer = Linear(2, 1, bias=False).init(0, numpy, dtype="float64", scheme="zeros")
        >>> result, pullback = layer.vjp(numpy.array([[[1.0, 2.0]]]))
        >>> pullback(numpy.ones((1, 1, 1)))[2]["weight"]
        array([[1., 2.]])
        """
        run, value = self.start(x, state, read_bounds(cu_seqlens), keep=True, save=True)
        last = self.through(run, value)
        result = self.finish(run, last, x)

        def pullback(
            d_output: Array | None = None, d_state: Mapping[str, Array] | None = None
        ) -> tuple[Array | None, State | None, dict[str, Array]]:
            found = self.pull(run, last, d_output, d_state)
            return self.gradients(run, value, x, found)

        return result, pullback

    # -- the parts of a run, for Trace -----------------------------------------------------------------------

    def start(
        self,
        x: Array,
        state: Mapping[str, Array] | None,
        bounds: Bounds,
        *,
        keep: bool = False,
        save: bool = False,
    ) -> tuple[Run, Value]:
        """A run of this layer, with its input checked and entered."""
        parameters = self.named_parameters()
        library = check_same_library([("x", x), *parameters.items(), *(state or {}).items()])
        self._check_input(x)
        check_bounds(bounds, x.shape[0], x.shape[1])
        names = [dtype_name(array.dtype) for array in parameters.values()]
        names += [] if self.tokens else [dtype_name(x.dtype)]
        dtype = dtype_of(library.namespace, widest(names))
        run = Run(
            library.namespace,
            dtype,
            parameters,
            self._state(library.namespace, dtype, state),
            bounds,
            frozenset(self.trainable()) if keep else frozenset(),
            keep,
            save,
        )
        array = x if self.tokens else cast(library.namespace, x, dtype)
        return run, run.enter(array, not self.tokens)

    def _check_input(self, x: Array) -> None:
        if not self.tokens:
            check_floating(x, "x", complex_allowed=False)
        elif not dtype_name(x.dtype).startswith(("int", "uint")):
            raise DtypeError(f"x: dtype {dtype_name(x.dtype)}; tokens are integers")
        if x.ndim != (2 if self.tokens else 3):
            axes = "(batch, time)" if self.tokens else "(batch, time, width)"
            raise ShapeError(f"x: shape {tuple(x.shape)}, must be {axes}")

    def state_names(self) -> tuple[str, ...]:
        """The names of the state, in order."""
        return tuple([joined(path, name) for path, layer in self.named_layers() for name in layer.carries])

    def _state(self, xp: Namespace, dtype: Any, state: Mapping[str, Array] | None) -> State | None:
        if state is None:
            return None
        names = self.state_names()
        if set(state) != set(names):
            raise StateError(
                f"state: holds {sorted(state)}, this layer's is {sorted(names)}; pass what an earlier call returned, or None"
            )
        return {name: cast(xp, state[name], dtype) for name in names}

    def through(self, run: Run, x: Value) -> Value:
        """Run ``define``."""
        run.layers.append(self)
        with quiet(library_of(x.array, "x").name):
            return self.define(run, x)

    def finish(self, run: Run, last: Value, x: Array) -> LayerResult:
        """Outputs as the caller has them."""
        dtype = x.dtype if not self.tokens else next(iter(run.parameters.values())).dtype
        state = {name: run.carried[name].array for name in self.state_names()}
        return LayerResult(cast(run.xp, last.array, dtype), state)

    def pull(
        self,
        run: Run,
        last: Value,
        d_output: Array | None,
        d_state: Mapping[str, Array] | None,
        *,
        keep: bool = False,
    ) -> dict[int, Array]:
        """Walk back with cotangents that fit."""
        if d_output is None and not d_state:
            raise ArgumentError("pullback: d_output or d_state is needed, both are None")
        seeds = [(last, seed(run, last, d_output, "d_output"))]
        for name, array in (d_state or {}).items():
            if name not in run.carried:
                raise ArgumentError(
                    f"d_state: {name!r}; the state holds {', '.join(run.carried) or 'nothing'}"
                )
            seeds.append((run.carried[name], seed(run, run.carried[name], array, f"d_state[{name!r}]")))
        with quiet(library_of(last.array, "output").name):
            return walk_back(run.xp, run.entries, seeds, keep=keep)

    def gradients(
        self, run: Run, value: Value, x: Array, found: Mapping[int, Array]
    ) -> tuple[Array | None, State | None, dict[str, Array]]:
        """By name, in the shapes and dtypes of what they belong to; 0 where nothing depends on it."""
        xp = run.xp

        def of(leaf: Value | None, like: Array) -> Array:
            array = None if leaf is None else found.get(leaf.index)
            return xp.zeros_like(like) if array is None else cast(xp, array, like.dtype)

        d_x = None if self.tokens else of(value, x)
        d_before = None if run.state is None else {n: of(run.before.get(n), a) for n, a in run.state.items()}
        grads = {n: of(run.leaves.get(n), a) for n, a in run.parameters.items() if n in run.trainable}
        return d_x, d_before, grads


def seed(run: Run, value: Value, array: Array | None, name: str) -> Array | None:
    """A cotangent or relevance in the dtype of the run; ShapeError unless it fits its value."""
    if array is None:
        return None
    check_same_library([("output", value.array), (name, array)])
    check_floating(array, name, complex_allowed=False)
    if tuple(array.shape) != tuple(value.array.shape):
        raise ShapeError(f"{name}: shape {tuple(array.shape)}, must be {tuple(value.array.shape)}")
    return cast(run.xp, array, run.dtype)


def place_of(layer: Layer) -> Any:
    """The device of a layer's parameters."""
    return device_of(next(iter(layer.named_parameters().values())))


def sizes(**given: Any) -> None:
    """ArgumentError unless each of these is an integer of at least 1."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | numpy.integer) or value < 1:
            raise ArgumentError(f"{name}: {value!r}; allowed is an integer of at least 1")
