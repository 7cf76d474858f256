"""The gated delta rule in chunks on CuPy arrays: for long sequences, with or without tensor cores."""

from __future__ import annotations

from typing import Any, NamedTuple

import cupy

from scanfield.arrays import HALF, dtype_name
from scanfield.dispatch import Call, Grads, Verb
from scanfield_cupy.gated_delta import GatedDelta, blocks, no_gradients, shared_heads
from scanfield_cupy.layout import (
    Array,
    as_dtype,
    bounds_of,
    common_dtype,
    contiguous,
    dtype,
    multiprocessors,
    saved_states,
    sequences_of,
    shared_memory,
    steps,
)
from scanfield_cupy.modules import MOST_BLOCKS, MOST_ROWS, STORED, launch

_RECURRENT = GatedDelta()
_NAMES = ("query", "key", "value", "log_decay", "erase", "write")
# As the kernels have them: tokens of a chunk, threads of a block.
_CHUNK, _THREADS = 64, 128
# Chunks are chosen for sequences of so many tokens in the mean, for keys of so many channels (less would be padding), and
# where fewer blocks than so many for each multiprocessor would walk token by token: a full card walks with fewer
# operations. By arithmetic (docs/cuda.md); benchmarks/gpu.py times both sides.
LONG, NARROW, FULL = 512, 32, 2
# What kernels leave to each other takes no more memory than this: heads run in turns.
_WORK_BYTES = 2**31


class GatedDeltaChunk(GatedDelta):
    """Implementation of ``gdn2`` in chunks of 64 tokens; a step is one of the kernels that walk token by token.

    ``tensor``: products of bfloat16 on tensor cores, for values of half precision. bfloat16 is multiplied as it is,
    float16 as two numbers of bfloat16: a state outgrows the range of float16.
    """

    def __init__(self, *, tensor: bool = False) -> None:
        self.tensor = tensor

    def declines(self, call: Call, verb: Verb) -> str | None:
        """What no kernel takes, cards that lack shared memory; with tensor cores, values that are not of half precision."""
        reason = super().declines(call, "forward")
        if reason is not None or verb == "step":
            return reason
        value = call.arrays[2]
        if self.tensor:
            if dtype_name(value.dtype) not in HALF or call.compute != "float32":
                return f"value is {dtype_name(value.dtype)}, tensor cores multiply float16 and bfloat16"
            capability = value.device.compute_capability
            if int(capability) < 80:
                return f"this card's compute capability is {capability}: bfloat16 needs 80 (Ampere) or more"
        need, have = self.shared_memory(call, verb), shared_memory(value.device.id)
        if need > have:
            return f"chunks need {need} bytes of shared memory for {verb}, this card gives a block {have}"
        return None

    def shared_memory(self, call: Call, verb: Verb) -> int:
        """Bytes that the kernels of a verb ask for at most."""
        kernels = _BACKWARD if verb in ("save", "backward") else _FORWARD
        return max(_shared(name, _plan(call, self.tensor)) for name in kernels)

    def notes(self, call: Call) -> tuple[str, ...]:
        """What is copied before a kernel runs; what chunks cannot do."""
        plan = _plan(call, self.tensor)
        given = {name: x for name, x in zip(_NAMES, call.arrays, strict=False) if x is not None}
        copied = [name for name, x in given.items() if dtype_name(x.dtype) != plan.dtype_of(name)]
        first = (
            f"copies {', '.join(copied)} to another dtype first"
            if copied
            else f"reads {', '.join(given)} as they lie: no copy"
        )
        return (
            f"{self.name} {first}",
            f"{self.name} is for log decays <= 0: with growth it overflows before the state does; a NaN or infinity "
            "spreads within its chunk of 64 tokens. cupy.rawkernel.recurrent does neither",
        )

    @property
    def name(self) -> str:
        """Of the candidate."""
        return "cupy.rawkernel.tensor" if self.tensor else "cupy.rawkernel.chunk"

    def forward(self, call: Call) -> tuple[Array, Array]:
        """Output and final state."""
        return _forward(call, self.tensor, keep=False)[:2]

    def save(self, call: Call) -> tuple[Array, Array, tuple[Array, ...]]:
        """Output, final state; the states at the chunks' starts and, where the rule erases, the updates."""
        output, final, starts, updates = _forward(call, self.tensor, keep=True)
        return output, final, (starts,) if updates is None else (starts, updates)

    def backward(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """The wanted gradients."""
        return _backward(call, self.tensor, residuals, d_output, d_final_state, wanted)


class GatedDeltaByLength(GatedDelta):
    """Implementation of ``gdn2``: chunks for long sequences, token by token for short ones.

    By the shapes alone, and the same for forward and backward, so that each finds what the other has kept.
    """

    def __init__(self) -> None:
        self._chunk = GatedDeltaChunk()

    def _choose(self, call: Call) -> GatedDelta | GatedDeltaChunk:
        query, bounds = call.arrays[0], call.arrays[7]
        batch, time, _, K = query.shape
        tokens = batch * time // max(1, sequences_of(bounds, batch))
        if tokens < LONG or K < NARROW or blocks(call) >= FULL * multiprocessors(query.device.id):
            return _RECURRENT
        return _RECURRENT if self._chunk.declines(call, "save") is not None else self._chunk

    def declines(self, call: Call, verb: Verb) -> str | None:
        """What the kernels that are chosen do not take."""
        reason = super().declines(call, "forward")
        return reason if reason is not None else self._choose(call).declines(call, verb)

    def notes(self, call: Call) -> tuple[str, ...]:
        """Which kernels are chosen; what is copied before they run."""
        chosen = self._choose(call)
        name = "chunk" if chosen is self._chunk else "recurrent"
        return (f"cupy.rawkernel runs as cupy.rawkernel.{name}, by the shapes", *chosen.notes(call))

    def forward(self, call: Call) -> tuple[Array, Array]:
        """Output and final state."""
        return self._choose(call).forward(call)

    def save(self, call: Call) -> tuple[Array, Array, tuple[Array, ...]]:
        """Output, final state and residuals."""
        return self._choose(call).save(call)

    def backward(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """The wanted gradients."""
        return self._choose(call).backward(call, residuals, d_output, d_final_state, wanted)


class _Plan(NamedTuple):
    """How a call runs."""

    sequences: int
    batch: int
    time: int
    vheads: int
    group: int
    """Value heads that share a key."""
    K: int
    V: int
    slots: int
    """Room for chunks."""
    stored: str
    """Of value, erase and write."""
    keys: str
    """Of query, key and the output."""
    decay: str
    carry: str
    tensor: int
    """0: without tensor cores; else how many numbers of bfloat16 stand for one."""

    @property
    def kept(self) -> str:
        """The dtype of what kernels leave to each other."""
        return "bfloat16" if self.tensor == 1 else self.carry

    @property
    def rows(self) -> int:
        """K, padded."""
        return -(-self.K // _CHUNK) * _CHUNK

    @property
    def state_rows(self) -> int:
        """Those that a kernel for states holds."""
        return next(rows for rows in (64, 128, 256) if rows >= self.K)

    @property
    def empty(self) -> bool:
        return 0 in (self.batch, self.time, self.vheads, self.V, self.K, self.sequences)

    def dtype_of(self, name: str) -> str:
        """As kernels read an input."""
        return {"query": self.keys, "key": self.keys, "log_decay": self.decay}.get(name, self.stored)

    def turn(self, *, backward: bool, keep: bool) -> int:
        """Heads of a launch."""
        each = _CHUNK * (3 * self.state_rows + (3 if backward else 1) * _CHUNK)
        if backward or not keep:
            each += _CHUNK * self.V + self.K * self.V
        size = int(dtype(self.kept).itemsize)
        return max(1, min(self.vheads, _WORK_BYTES // max(1, self.slots * each * size)))

    def sizes(self, head: int, heads: int, room: tuple[int, int]) -> tuple[int, ...]:
        """The integers that kernels have in common; ``room``: the heads in residuals, and the first of them."""
        return (
            self.sequences, self.time, self.vheads, self.group, self.K, self.V, self.state_rows, self.slots, head, heads,
            *room,
        )  # fmt: skip


def _plan(call: Call, tensor: bool) -> _Plan:
    query, key, value, decay, erase, write, _, bounds = call.arrays
    batch, time, vheads, V = value.shape
    heads, K = query.shape[2:]
    sequences = sequences_of(bounds, batch)
    stored = common_dtype((value, erase, write), call.compute)
    pieces = (1 if dtype_name(value.dtype) == "bfloat16" else 2) if tensor else 0
    return _Plan(
        sequences,
        batch,
        time,
        vheads,
        vheads // max(1, heads),
        K,
        V,
        saved_states(bounds, sequences, time, _CHUNK),
        stored,
        common_dtype((query, key), call.compute),
        stored if decay is None else common_dtype((decay,), call.compute),
        call.compute,
        pieces,
    )


# ---- what each kernel asks for ----------------------------------------------------------------------------------------

_FORWARD = ("delta_inside", "delta_states", "delta_output")
_BACKWARD = (*_FORWARD, "delta_states_back", "delta_triangles", "delta_outer", "delta_gradients")
_FILES = {
    "delta_inside": "gated_delta_inside.cu",
    "delta_states": "gated_delta_states.cu",
    "delta_states_back": "gated_delta_states.cu",
    "delta_output": "gated_delta_output.cu",
    "delta_triangles": "gated_delta_outer.cu",
    "delta_outer": "gated_delta_outer.cu",
    "delta_gradients": "gated_delta_gradients.cu",
}


def _shared(kernel: str, plan: _Plan) -> int:
    """Bytes of shared memory, as the kernels lay it out."""
    wide = plan.carry == "float64"
    number = 8 if wide else 4
    operand = 2 if plan.tensor == 1 else number
    pad, columns = 16 // operand, 16 if wide else 32

    def tile(lines: int, width: int) -> int:
        return operand * lines * (width + pad)

    if kernel == "delta_inside":
        matrix = number * _CHUNK * (_CHUNK + 16 // number)
        totals = number * _THREADS
        return matrix + totals + 2 * tile(_CHUNK, columns) + (tile(_CHUNK, _CHUNK) if plan.tensor else 0)
    if kernel in ("delta_states", "delta_states_back"):
        operands = 2 if kernel == "delta_states_back" else 1
        return tile(_CHUNK, _CHUNK) + tile(plan.state_rows + operands * _CHUNK, columns)
    if kernel == "delta_output":
        return tile(_CHUNK, _CHUNK) + tile(_CHUNK, 2 * columns)
    if kernel == "delta_triangles":
        return tile(_CHUNK, _CHUNK) + 3 * tile(_CHUNK, columns)
    if kernel == "delta_outer":
        return 3 * tile(_CHUNK, columns) + 2 * tile(2 * columns, columns) + number * _THREADS
    channels = 3 * _THREADS + 2 * _CHUNK * (16 + 16 // number)
    return number * channels + 2 * tile(_CHUNK, _CHUNK)


def _run(
    plan: _Plan, kernel: str, asked: tuple[int, int], arguments: tuple[Any, ...], *, backward: bool = False
) -> None:
    file = _FILES[kernel]
    defined = {
        "STORED": STORED[plan.stored],
        "KEYS": STORED[plan.keys],
        "DECAY": STORED[plan.decay],
        "TENSOR": str(plan.tensor),
    }
    if kernel in ("delta_inside", "delta_states", "delta_states_back"):
        defined["BACKWARD"] = str(int(backward))
    if file == "gated_delta_states.cu":
        defined["ROWS"] = str(plan.state_rows)
    grid = (min(asked[0], MOST_BLOCKS), min(asked[1], MOST_ROWS), 1)
    launch(file, defined, kernel, grid, arguments, _shared(kernel, plan), _THREADS)


def _inputs(call: Call, plan: _Plan) -> tuple[Any, ...]:
    """The inputs as kernels take them: addresses and steps, then the scale."""
    given: list[Any] = []
    for name, x in zip(_NAMES, call.arrays, strict=False):
        if x is None:
            given += [None, 0, 0, 0, 0]
        else:
            read: Array = as_dtype(x, plan.dtype_of(name))
            given += [read, *steps(read)]
    scale, erase_vector, _ = call.options
    return (*given, dtype(call.compute).type(scale), int(erase_vector))


class _Work:
    """What kernels leave to each other for the heads of a launch."""

    def __init__(self, plan: _Plan, heads: int) -> None:
        self._plan, self._heads = plan, heads
        self.decay = cupy.empty((plan.slots, heads, plan.state_rows), dtype(plan.carry))
        self.q, self.k = self.rows(), self.rows()

    def rows(self) -> Array:
        """(chunks, heads, 64, rows)"""
        plan = self._plan
        return cupy.empty((plan.slots, self._heads, _CHUNK, plan.state_rows), dtype(plan.kept))

    def triangle(self) -> Array:
        """(chunks, heads, 64, 64)"""
        return cupy.empty((self._plan.slots, self._heads, _CHUNK, _CHUNK), dtype(self._plan.kept))

    def states(self) -> Array:
        """(chunks, heads, K, V)"""
        plan = self._plan
        return cupy.empty((plan.slots, self._heads, plan.K, plan.V), dtype(plan.kept))

    def columns(self) -> Array:
        """(batch, time, heads, V)"""
        plan = self._plan
        return cupy.empty((plan.batch, plan.time, self._heads, plan.V), dtype(plan.kept))


def _forward(call: Call, tensor: bool, *, keep: bool) -> tuple[Array, Array, Array | None, Array | None]:
    """Output, final state, and with ``keep`` the states at the chunks' starts and the updates, where the rule erases."""
    query, _, value, _, erase, _, state, bounds = call.arrays
    plan = _plan(call, tensor)
    with query.device:
        output = cupy.empty(value.shape, dtype(plan.keys))
        final = cupy.empty((plan.sequences, plan.vheads, plan.K, plan.V), dtype(plan.carry))
        starts = updates = None
        if keep:
            starts = cupy.empty((plan.slots, plan.vheads, plan.K, plan.V), dtype(plan.kept))
            if erase is not None:
                updates = cupy.empty(value.shape, dtype(plan.kept))
        if plan.empty:
            output[...] = 0
            final[...] = 0 if state is None else state
        else:
            inputs, on_device, state = _inputs(call, plan), bounds_of(bounds), contiguous(state, call.compute)
            turn = plan.turn(backward=False, keep=keep)
            for head in range(0, plan.vheads, turn):
                heads = min(turn, plan.vheads - head)
                work = _Work(plan, heads)
                room = (plan.vheads, 0) if keep else (heads, head)
                sizes = plan.sizes(head, heads, room)
                now_starts = work.states() if starts is None else starts
                now_updates = work.columns() if updates is None and erase is not None else updates
                W = None if erase is None else work.rows()
                P, items = work.triangle(), plan.slots * heads
                _run(
                    plan, "delta_inside", (items, 1),
                    (*inputs, None, on_device, *sizes, W, work.k, work.q, P, work.decay, now_updates),
                )  # fmt: skip
                columns = 16 if plan.carry == "float64" else 32
                _run(
                    plan, "delta_states", (-(-plan.V // columns) * heads, plan.sequences),
                    (*inputs, state, on_device, *sizes, W, work.k, work.decay, now_updates, now_starts, final),
                )  # fmt: skip
                _run(
                    plan, "delta_output", (items * -(-plan.V // (2 * columns)), 1),
                    (*inputs, on_device, *sizes, work.q, P, now_updates, now_starts, output),
                )  # fmt: skip
        return as_dtype(output, dtype_name(query.dtype)), final, starts, updates


def _backward(
    call: Call,
    tensor: bool,
    residuals: tuple[Array, ...],
    d_output: Array | None,
    d_final_state: Array | None,
    wanted: tuple[bool, ...],
) -> Grads:
    query, _, value, log_decay, erase, write, state, bounds = call.arrays
    plan = _plan(call, tensor)
    asked = [want and x is not None for x, want in zip(call.arrays, wanted, strict=True)]
    number = dtype(call.compute)
    with query.device:
        if plan.empty:
            return no_gradients(call, asked, number, d_final_state)
        starts, updates = (*residuals, None)[:2]
        d_output, d_final_state = contiguous(d_output, call.compute), contiguous(d_final_state, call.compute)
        inputs, on_device = _inputs(call, plan), bounds_of(bounds)
        d_value = cupy.empty(value.shape, number) if asked[2] else None
        d_write = _of_gate(write, plan.V, asked[5], plan)
        d_state = cupy.empty(state.shape, number) if asked[6] else None
        whole = (plan.batch, plan.time, plan.vheads, plan.K)
        d_query, d_key = (cupy.empty(whole, number) if want else None for want in asked[:2])
        d_decay, d_erase = (
            _of_gate(gate, plan.K, asked[i], plan) for i, gate in ((3, log_decay), (4, erase))
        )
        of_rows = any(asked[i] for i in (0, 1, 3, 4))
        columns = 16 if plan.carry == "float64" else 32
        turn = plan.turn(backward=True, keep=True)
        for head in range(0, plan.vheads, turn):
            heads = min(turn, plan.vheads - head)
            work, items = _Work(plan, heads), plan.slots * heads
            own, kept = plan.sizes(head, heads, (heads, head)), plan.sizes(head, heads, (plan.vheads, 0))
            W, J = (None, None) if erase is None else (work.rows(), work.triangle())
            d_updates, d_ends = work.columns(), work.states()
            _run(
                plan, "delta_inside", (items, 1),
                (*inputs, d_output, on_device, *own, W, work.k, work.q, J, work.decay, d_updates), backward=True,
            )  # fmt: skip
            _run(
                plan, "delta_states_back", (-(-plan.V // columns) * heads, plan.sequences),
                (d_output, d_final_state, on_device, *own, W, work.k, work.q, work.decay, d_updates, d_ends, d_state),
                backward=True,
            )  # fmt: skip
            d_P = work.triangle() if of_rows else None
            d_L = work.triangle() if of_rows and erase is not None else None
            _run(
                plan, "delta_triangles", (items, 1),
                (*inputs, d_output, on_device, *kept, J, updates, d_updates, d_P, d_L, d_value, d_write,
                 _width(d_write)),
            )  # fmt: skip
            if not of_rows:
                continue
            _run(
                plan, "delta_outer", (items * -(-plan.K // (2 * columns)), 1),
                (*inputs, d_output, on_device, *kept, d_updates, updates, starts, d_ends, work.q, W, work.k, work.decay),
            )  # fmt: skip
            _run(
                plan, "delta_gradients", (items, 1),
                (*inputs, on_device, *kept, work.q, W, work.k, work.decay, d_P, d_L, d_query, d_key, d_decay, d_erase,
                 _width(d_decay), _width(d_erase)),
            )  # fmt: skip
        heads_of_keys = query.shape[2]
        return (
            shared_heads(d_query, heads_of_keys),
            shared_heads(d_key, heads_of_keys),
            d_value,
            d_decay,
            d_erase,
            d_write,
            d_state,
            None,
        )


def _of_gate(gate: Array | None, channels: int, want: bool, plan: _Plan) -> Array | None:
    """Room for a gate's gradient: one number a head where the gate has one, which kernels then sum over the channels."""
    if not want or gate is None:
        return None
    width = 1 if gate.shape[3] == 1 else channels
    return cupy.empty((plan.batch, plan.time, plan.vheads, width), dtype(plan.carry))


def _width(gradient: Array | None) -> int:
    return 0 if gradient is None else int(gradient.shape[3])
