"""The protocol of all layers: parameters by dotted name, a call that changes nothing, one step, exact gradients.

A layer declares its ``parameters`` (name -> ``Parameter``), its ``children`` (name -> layer), the names of the state it
``carries``, and says in ``define`` what it computes. The rest stands here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, ClassVar, NamedTuple

import numpy

from scanfield.advice import shown
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
from scanfield.keywords import check_no_more
from scanfield.layers.convolution import Bounds, read_bounds
from scanfield.layers.explain import Composite, LayerRelevance, Walked, report_of, walk
from scanfield.layers.parametrised import Parametrised
from scanfield.layers.tape import Run, Value, joined, walk_back
from scanfield.lrp.rules import Rule
from scanfield.scans.canonical import quiet
from scanfield.scans.packing import check_bounds

State = dict[str, Array]
"""What a layer carries from one call to the next, by dotted name."""


class LayerResult(NamedTuple):
    """What a layer returns: ``output`` in the dtype of x, ``state`` by dotted name in float32 at least."""

    output: Array
    state: State


class Layer(Parametrised, ABC):
    """Base of all layers.

    A layer is made without arrays; ``init`` draws its parameters. Calls, gradients and relevance change nothing in it.
    """

    tokens: bool = False
    """Whether the input is integers (batch, time), not features (batch, time, width)."""
    rules: ClassVar[tuple[str, ...]] = ()
    """Names of the rules of relevance between which its own operations have a choice; empty: they have none."""

    _state_names: tuple[str, ...] | None = None

    @abstractmethod
    def define(self, run: Run, x: Value) -> Value:
        """What the layer computes."""

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
        if isinstance(x, int | float | numpy.generic | list | tuple):  # refused with what the parameters say
            self.start(x, state, None)
        xp = library_of(x, "x").namespace
        check_token(x, self.tokens)
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
            d_output: Array | None = None,
            d_state: Mapping[str, Array] | None = None,
            *more: Any,
            **others: Any,
        ) -> tuple[Array | None, State | None, dict[str, Array]]:
            check_no_more("pullback", ("d_output", "d_state"), more, others)
            found = self.pull(run, last, d_output, d_state)
            return self.gradients(run, value, x, found)

        return result, pullback

    # -- relevance -------------------------------------------------------------------------------------------

    def supports(self, rule: Rule | str) -> bool:
        """Whether a rule (or its name) can be chosen for this layer: all in it that has a choice of rules has this one.

        >>> from scanfield.layers import Linear, MambaBlock
        >>> Linear(2, 2).supports("gamma"), MambaBlock(2).supports("gamma"), MambaBlock(2).supports("epsilon")
        (True, False, True)
        """
        name = rule if isinstance(rule, str) else rule.name
        choosing = [layer for _, layer in self.named_layers() if layer.rules]
        return bool(choosing) and all(name in layer.rules for layer in choosing)

    def relevance(
        self,
        R_output: Array | None,
        x: Array,
        state: State | None = None,
        *,
        R_state: Mapping[str, Array] | None = None,
        rules: Composite | Rule | None = None,
        epsilon: float = 1e-6,
        cu_seqlens: Any = None,
    ) -> LayerRelevance:
        """Relevance of x and of the state that came in, from that of the output (LRP).

        Parameters
        ----------
        R_output : array in the shape of the output, or None
            Relevance of each output number; for the question "why this logit" the logit itself at its place, 0 elsewhere.
        x, state, cu_seqlens
            As in the call.
        R_state : dict, optional
            Relevance of the state that goes out, by name.
        rules : Composite or Rule, optional
            By name or class of layer; one rule is the default of a composite. Without it relevance passes through linear
            parts unchanged.
        epsilon : float
            Stabiliser of the output, and of the few divisions inside.

        Returns
        -------
        LayerRelevance
            ``x``, ``state`` and a ``report`` of what was conserved, in float32 at least.

        Raises
        ------
        ArgumentError
            For a rule that a layer does not have or a name that no layer has, before anything runs; without relevance.
        ShapeError, DtypeError, BackendError, DeviceError, StateError
            As in the call, and for relevance that does not fit.

        Notes
        -----
        MambaLRP (arXiv 2406.07592): identity rule for activations, half to each factor of a SiLU gate, norms, steps, decays,
        keys, queries and read-outs held constant, residual branches each with their own part. Equals gradient times input
        of the layer with these held constant.

        Examples
        --------
        >>> import numpy
        >>> from scanfield.layers import Linear
        >>> layer = Linear(2, 1, bias=False).init(0, numpy, dtype="float64")
        >>> layer.set_parameter("weight", numpy.array([[3.0, -1.0]]))
        >>> layer.relevance(numpy.array([[[2.0]]]), numpy.array([[[1.0, 1.0]]]), epsilon=0.0).x
        array([[[ 3., -1.]]])
        """
        composite = rules if isinstance(rules, Composite) else Composite(default=rules)
        resolved = composite.resolve(self)
        run, value = self.start(x, state, read_bounds(cu_seqlens), keep=True, save=True)
        last = self.through(run, value)
        walked = self.propagate(run, last, R_output, R_state, composite, resolved, epsilon)
        return self.relevances(run, value, walked)

    # -- the parts of a run, for Trace -----------------------------------------------------------------------

    def start(
        self,
        x: Array,
        state: Mapping[str, Array] | None,
        bounds: Bounds,
        *,
        keep: bool = False,
        save: bool = False,
        parameters: Mapping[str, Array] | None = None,
    ) -> tuple[Run, Value]:
        """A run of this layer, with its input checked and entered; ``parameters`` instead of its own."""
        _check_mapping("state", state)
        parameters = self.named_parameters() if parameters is None else parameters
        carried = [(f"state[{name!r}]", array) for name, array in (state or {}).items()]
        library = check_same_library(
            [("x", x), *parameters.items(), *carried],
            peers=True,
            held=("layer", parameters),
            tokens=self.tokens,
        )
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
        if self._state_names is None:
            found = [joined(path, name) for path, layer in self.named_layers() for name in layer.carries]
            self._state_names = tuple(found)
        return self._state_names

    def _state(self, xp: Namespace, dtype: Any, state: Mapping[str, Array] | None) -> State | None:
        if state is None:
            return None
        names = self.state_names()
        if set(state) != set(names):
            raise StateError(
                f"state: holds {sorted(state)}, this layer's is {sorted(names)}; pass what an earlier call returned, or None"
            )
        for name in names:
            check_floating(state[name], f"state[{name!r}]", complex_allowed=False)
        return {name: cast(xp, state[name], dtype) for name in names}

    def through(self, run: Run, x: Value) -> Value:
        """Run ``define``."""
        run.layers.append(self)
        with quiet(library_of(x.array, "x").name):
            return self.define(run, x)

    def finish(self, run: Run, last: Value, x: Array) -> LayerResult:
        """Outputs as the caller has them."""
        dtype = x.dtype if not self.tokens else next(iter(run.parameters.values())).dtype
        # Where torch's autocast halves a convolution's input, its state is still carried whole.
        state = {name: cast(run.xp, run.carried[name].array, run.dtype) for name in self.state_names()}
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
        _check_mapping("d_state", d_state)
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

    def propagate(
        self,
        run: Run,
        last: Value,
        R_output: Array | None,
        R_state: Mapping[str, Array] | None,
        composite: Composite,
        resolved: Mapping[str, Rule],
        epsilon: Any,
    ) -> Walked:
        """Walk back with relevance that fits."""
        _check_mapping("R_state", R_state)
        if R_output is None and not R_state:
            raise ArgumentError("R_output: relevance of the output or of the state is needed, both are None")
        if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 <= epsilon < inf:
            raise ArgumentError(f"epsilon: {shown(epsilon)}; allowed is a finite number of at least 0")
        seeds = [(last, seed(run, last, R_output, "R_output"), float(epsilon))]
        for name, array in (R_state or {}).items():
            if name not in run.carried:
                raise ArgumentError(
                    f"R_state: {name!r}; the state holds {', '.join(run.carried) or 'nothing'}"
                )
            # A state is no read-out: the sequence that goes on sees no second stabiliser.
            value = run.carried[name]
            seeds.append((value, seed(run, value, array, f"R_state[{name!r}]"), 0.0))
        with quiet(library_of(last.array, "output").name):
            return walk(run, seeds, resolved, composite, float(epsilon))

    def relevances(self, run: Run, value: Value, walked: Walked) -> LayerRelevance:
        """By name; 0 where nothing arrived."""
        xp = run.xp

        def of(leaf: Value | None, array: Array) -> Array:
            found = None if leaf is None else walked.values.get(leaf.index)
            if found is not None:
                return found
            return xp.zeros(array.shape, dtype=run.dtype, device=device_of(array))

        before = {name: of(run.before.get(name), array) for name, array in (run.state or {}).items()}
        with quiet(library_of(value.array, "x").name):
            return LayerRelevance(of(value, value.array), before, report_of(xp, walked, run))

    def gradients(
        self, run: Run, value: Value, x: Array, found: Mapping[int, Array]
    ) -> tuple[Array | None, State | None, dict[str, Array]]:
        """By name, in the shapes and dtypes of what they belong to; 0 where nothing depends on it.

        A parameter with several names has its whole gradient under each: a step by it is the same step.
        """
        xp = run.xp
        found = dict(found)
        for names in self.shared():
            leaves = [run.leaves[name].index for name in names if name in run.leaves]
            parts = [found[index] for index in leaves if index in found]
            if parts:
                found |= dict.fromkeys(leaves, sum(parts[1:], start=parts[0]))

        def of(leaf: Value | None, like: Array) -> Array:
            array = None if leaf is None else found.get(leaf.index)
            return xp.zeros_like(like) if array is None else cast(xp, array, like.dtype)

        d_x = None if self.tokens else of(value, x)
        d_before = None if run.state is None else {n: of(run.before.get(n), a) for n, a in run.state.items()}
        grads = {n: of(run.leaves.get(n), a) for n, a in run.parameters.items() if n in run.trainable}
        return d_x, d_before, grads


def check_token(x: Array, tokens: bool) -> None:
    """ShapeError unless x has the axes of one token."""
    if x.ndim != (1 if tokens else 2):
        raise ShapeError(
            f"x: shape {tuple(x.shape)}; one token is {'(batch,)' if tokens else '(batch, width)'}"
        )


def seed(run: Run, value: Value, array: Array | None, name: str) -> Array | None:
    """A cotangent or relevance in the dtype of the run; ShapeError unless it fits its value."""
    if array is None:
        return None
    check_same_library(
        [("the output", value.array), (name, array)], shape_of=lambda _: tuple(value.array.shape)
    )
    check_floating(array, name, complex_allowed=False)
    if tuple(array.shape) != tuple(value.array.shape):
        raise ShapeError(f"{name}: shape {tuple(array.shape)}, must be {tuple(value.array.shape)}")
    return cast(run.xp, array, run.dtype)


def _check_mapping(name: str, given: Any) -> None:
    if given is not None and not isinstance(given, Mapping):
        raise StateError(
            f"{name}: a {type(given).__name__}; arrays by name, as a state holds them, are expected"
        )
