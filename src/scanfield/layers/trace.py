"""The record of one run: gradients that add up, relevance layer by layer, the graph, what if a value were another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from scanfield.advice import shown
from scanfield.arrays import Array, check_same_library
from scanfield.errors import ArgumentError, ShapeError, StateError
from scanfield.keywords import advised_class
from scanfield.layers.convolution import read_bounds
from scanfield.layers.explain import Balance, BlockReport, Composite, total
from scanfield.layers.layer import Layer, LayerResult, State
from scanfield.layers.tape import Kind, Run, Value, check_unchanged, rerun
from scanfield.lrp.rules import Rule
from scanfield.scans.canonical import quiet


class GraphNode(NamedTuple):
    """One operation that ran, or a value that came in (kind "input")."""

    name: str
    kind: Kind | str
    layer: str
    """The dotted name of the layer in which it ran."""
    shapes: tuple[tuple[int, ...], ...]
    """Of its outputs."""
    parents: tuple[str, ...]
    """The nodes whose values it read, parameters apart."""
    parameters: tuple[str, ...]
    """The parameters that it read."""
    branches: int
    """How many operations read its values; above 1 a value goes several ways."""


class Explanation(NamedTuple):
    """Relevance of one run: of what came in, of every activation, and the balance of every operation."""

    x: Array
    state: State
    activations: dict[str, Array]
    """Relevance of each activation that received any, by the names of ``Trace.activations``."""
    balances: dict[str, BlockReport]
    """Per operation, in the order of the walk: from the output to the input."""
    report: BlockReport

    def __str__(self) -> str:
        """The conservation table."""
        head = f"{'operation':<44}{'out':>12}{'in':>12}{'bias':>12}{'absorbed':>12}{'gap':>10}"
        lines = [
            f"{name:<44}" + "".join(f"{total(x):>12.5g}" for x in row) + f"{total(row.gap):>10.1e}"
            for name, row in [*self.balances.items(), ("all", self.report)]
        ]
        return "\n".join([head, *lines])


@advised_class
class Trace:
    """Runs a layer and keeps what ran. It only adds: outputs equal those of the plain call bit for bit.

    Activations are named by their layer and operation: ``"mixer.in_proj:linear"``, ``"mixer:scan"``; with ``#2`` for the
    second of that name, and ``.1`` for the second output (of a scan or a convolution, the state).

    A parameter that another array took the place of after the forward is noticed; what is written into an array in place is
    not.

    Parameters
    ----------
    layer : Layer

    Attributes
    ----------
    gradients : dict
        Of the parameters by name, added up over all backward passes since the start or ``zero_grad``.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.layers import Linear, Sequential, Trace
    >>> layer = Sequential(a=Linear(2, 3), b=Linear(3, 1)).init(0, numpy, dtype="float64")
    >>> trace = Trace(layer)
    >>> output, _ = trace.forward(numpy.ones((1, 4, 2)))
    >>> [node.name for node in trace.graph()]
    ['x', 'a:linear', 'b:linear']
    >>> d_x, _ = trace.backward(numpy.ones((1, 4, 1)))
    >>> trace.gradients["b.bias"]
    array([4.])
    >>> patched, _ = trace.rerun({"a:linear": numpy.zeros((1, 4, 3))})
    >>> bool((patched == layer.named_parameters()["b.bias"]).all())
    True
    """

    def __init__(self, layer: Layer) -> None:
        if not isinstance(layer, Layer):
            raise ArgumentError(f"layer: {type(layer).__name__}; allowed is a layer")
        self.layer = layer
        self.gradients: dict[str, Array] = {}
        self._run: Run | None = None
        self._patched = False
        self._activation_gradients: dict[str, Array] | None = None

    def forward(self, x: Array, state: State | None = None, *, cu_seqlens: Any = None) -> LayerResult:
        """Run the layer as its call does, and keep the record."""
        run, value = self.layer.start(x, state, read_bounds(cu_seqlens), keep=True)
        last = self.layer.through(run, value)
        self._run, self._x, self._value, self._last, self._patched = run, x, value, last, False
        self._activation_gradients = None
        self._name_values(run, value)
        return self.layer.finish(run, last, x)

    def backward(
        self, d_output: Array | None = None, d_state: Mapping[str, Array] | None = None
    ) -> tuple[Array | None, State | None]:
        """Gradients of x and of the state that came in; those of the parameters are added to ``gradients``.

        StateError before a forward, after a rerun, and if a parameter changed since the forward.
        """
        run = self._ready("backward")
        found = self.layer.pull(run, self._last, d_output, d_state, keep=True)
        d_x, d_before, gradients = self.layer.gradients(run, self._value, self._x, found)
        for name, gradient in gradients.items():
            before = self.gradients.get(name)
            self.gradients[name] = gradient if before is None else before + gradient
        self._activation_gradients = {
            name: found[value.index] for name, value in self._values.items() if value.index in found
        }
        return d_x, d_before

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.gradients = {}

    @property
    def activations(self) -> dict[str, Array]:
        """All values that the last forward made, by name, in the order in which they were made."""
        self._forwarded("activations")
        return {name: value.array for name, value in self._values.items()}

    @property
    def activation_gradients(self) -> dict[str, Array]:
        """Of the last backward, by the names of ``activations``; absent where nothing depends on it."""
        if self._activation_gradients is None:
            raise StateError("activation_gradients: there was no backward after the last forward")
        return dict(self._activation_gradients)

    def relevance(
        self,
        R_output: Array | None,
        R_state: Mapping[str, Array] | None = None,
        *,
        rules: Composite | Rule | None = None,
        epsilon: float = 1e-6,
    ) -> Explanation:
        """Relevance of the recorded run; arguments and errors as in ``layer.relevance``, StateError as in ``backward``.

        Every layer is asked for its rule before anything is computed.
        """
        run = self._ready("relevance")
        composite = rules if isinstance(rules, Composite) else Composite(default=rules)
        resolved = composite.resolve(self.layer)
        walked = self.layer.propagate(run, self._last, R_output, R_state, composite, resolved, epsilon)
        x, state, report = self.layer.relevances(run, self._value, walked)
        activations = {n: walked.values[v.index] for n, v in self._values.items() if v.index in walked.values}
        balances = {self._names[id(b.entry)]: _row(b) for b in walked.balances}
        return Explanation(x, state, activations, balances, report)

    def graph(self) -> tuple[GraphNode, ...]:
        """What ran, every node after its parents; the values that came in stand first."""
        run = self._forwarded("graph")
        made: dict[int, str] = {self._value.index: "x"}
        made |= {value.index: f"state:{name}" for name, value in run.before.items()}
        parameters = {value.index: name for name, value in run.leaves.items()}
        readers: Counter[str] = Counter()
        nodes = []
        for entry in run.entries:
            name = self._names[id(entry)]
            read = [value.index for value in entry.inputs if value is not None]
            parents = tuple(dict.fromkeys(made[index] for index in read if index in made))
            readers.update(parents)
            shapes = tuple([tuple(value.array.shape) for value in entry.outputs])
            names = tuple([parameters[index] for index in read if index in parameters])
            nodes.append((name, entry.function.kind, entry.path, shapes, parents, names))
            made |= {value.index: name for value in entry.outputs}
        inputs = [("x", self._value), *((f"state:{name}", value) for name, value in run.before.items())]
        return (
            *(
                GraphNode(name, "input", "", (tuple(value.array.shape),), (), (), readers[name])
                for name, value in inputs
            ),
            *(GraphNode(*node, readers[node[0]]) for node in nodes),
        )

    def rerun(self, patches: Mapping[str, Array]) -> LayerResult:
        """The result if these activations (or ``"x"``) were other arrays; all that does not depend on them is reused.

        Afterwards ``backward`` and ``relevance`` raise StateError until the next forward. ArgumentError for an unknown name,
        ShapeError for another shape.
        """
        run = self._forwarded("rerun")
        check_unchanged(run.parameters, self.layer.named_parameters(), "rerun")
        known = {"x": self._value, **self._values}
        replaced = {}
        for name, array in patches.items():
            if name not in known:
                raise ArgumentError(f"patches: {shown(name)} is no activation; there are {', '.join(known)}")
            like = known[name].array
            check_same_library([("the recorded value", like), (name, array)])
            if tuple(array.shape) != tuple(like.shape):
                raise ShapeError(f"{name}: shape {tuple(array.shape)}, must be {tuple(like.shape)}")
            replaced[known[name].index] = run.xp.astype(array, like.dtype)
        self._patched = True
        with quiet(check_same_library([("x", self._x)]).name):
            changed = rerun(run.xp, run.entries, replaced)
        carried = {
            name: Value(changed.get(value.index, value.array), value.index, False)
            for name, value in run.carried.items()
        }
        last = Value(changed.get(self._last.index, self._last.array), self._last.index, False)
        return self.layer.finish(
            Run(run.xp, run.dtype, run.parameters, None, run.bounds, carried=carried), last, self._x
        )

    def release(self) -> None:
        """Forget the record and what it holds of memory; gradients stay."""
        self._run = None
        self._activation_gradients = None

    def _forwarded(self, what: str) -> Run:
        if self._run is None:
            raise StateError(f"{what}: there was no forward; trace.forward(x) comes first")
        return self._run

    def _ready(self, what: str) -> Run:
        run = self._forwarded(what)
        if self._patched:
            raise StateError(f"{what}: a rerun replaced activations of this record; run the forward again")
        check_unchanged(run.parameters, self.layer.named_parameters(), what)
        return run

    def _name_values(self, run: Run, x: Value) -> None:
        seen: Counter[str] = Counter()
        self._names: dict[int, str] = {}
        self._values: dict[str, Value] = {}
        for entry in run.entries:
            name = f"{entry.path}:{entry.function.kind}" if entry.path else str(entry.function.kind)
            seen[name] += 1
            name = name if seen[name] == 1 else f"{name}#{seen[name]}"
            self._names[id(entry)] = name
            for i, value in enumerate(entry.outputs):
                self._values[f"{name}.{i}" if i else name] = value


def _row(balance: Balance) -> BlockReport:
    return BlockReport(balance.sum_out, balance.sum_in, balance.to_bias, balance.absorbed)
