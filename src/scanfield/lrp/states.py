"""The reverse scans of relevance: a scan's own backward, and diagonal ones whose every state has a stabiliser too.

With kappa = h / stab(h) = |h| / (|h| + state_epsilon) the adjoint of a diagonal recurrence becomes
g_t = C_t rho_t + decay_(t+1) kappa_(t+1) g_(t+1), and what enters h_t receives kappa_t g_t (MambaLRP, arXiv 2406.07592).
"""

from __future__ import annotations

from typing import Any, Protocol

from scanfield.arrays import Array, Namespace, cast, dtype_of, is_complex, library_of, zeros
from scanfield.dispatch import Call, Grads, Prepared, loops, registry
from scanfield.errors import BackendError
from scanfield.scans import selective_forms
from scanfield.scans.canonical import quiet
from scanfield.scans.generic import GenericForm, chunk_of, divide, square_root_chunk, walk_back

OPERATIONS = ("linear_scan", "selective_scan")
"""Whose states may have a stabiliser each."""


class Walk(Protocol):
    """A scan that has run forward and can run back."""

    output: Array
    final_state: Array

    def back(
        self, d_output: Array | None, d_final_state: Array | None, wanted: tuple[bool, ...]
    ) -> tuple[Grads, Array | None]:
        """The gradients of the wanted inputs, and the leak of the states (None: there is none)."""


def walk(prepared: Prepared, method: str | None, state_epsilon: float) -> Walk:
    """The forward of a call, by the implementation that its gradients would come from."""
    if state_epsilon == 0:
        return _Plain(prepared.call, method)
    return (_Linear if prepared.call.operation == "linear_scan" else _Selective)(
        prepared.call, method, state_epsilon
    )


class _Plain:
    """State epsilon 0: the scan's own backward, whoever runs it."""

    def __init__(self, call: Call, method: str | None) -> None:
        self.call = call
        self.output, self.final_state, self.residuals, self.chosen = registry.save(call, method)

    def back(
        self, d_output: Array | None, d_final_state: Array | None, wanted: tuple[bool, ...]
    ) -> tuple[Grads, Array | None]:
        return registry.backward(
            self.chosen, self.call, self.residuals, d_output, d_final_state, wanted
        ), None


class _Linear:
    """The states are the output, so kappa is known and goes into the decays of a second scan."""

    def __init__(self, call: Call, method: str | None, epsilon: float) -> None:
        self.call, self.method, self.epsilon = call, method, epsilon
        self.output, self.final_state = registry.call(call, "forward", method)

    def back(
        self, d_output: Array | None, d_final_state: Array | None, wanted: tuple[bool, ...]
    ) -> tuple[Grads, Array | None]:
        a, b, state, bounds = self.call.arrays
        library = library_of(a, "a")
        xp = library.namespace
        with quiet(library.name):
            kappa = _kept(xp, self.output, self.epsilon)
            # b in full: kappa differs for every token, also where b does not.
            full = self.call._replace(
                arrays=(a * kappa, xp.broadcast_to(b, self.output.shape), state, bounds)
            )
            _, _, residuals, chosen = registry.save(full, self.method)
            _, g, d_state, _ = registry.backward(
                chosen, full, residuals, d_output, d_final_state, (False, True, wanted[2], False)
            )
            leak = (1 - kappa) * inner(xp, g, self.output)
            return (None, kappa * g, d_state, None), leak


class _Selective:
    """The states exist for one chunk at a time: recomputed from those at its start."""

    def __init__(self, call: Call, method: str | None, epsilon: float) -> None:
        method = registry.forced_method() if method is None else method
        if method not in (None, "generic", "generic.recurrent"):
            raise BackendError(
                f"method {method!r} has no state_epsilon: it runs by 'generic.recurrent' alone; pass state_epsilon=0, or "
                f"no method"
            )
        self.call = call
        self.form = _Stabilised(epsilon)
        self.output, self.final_state, self.residuals = self.form.save(call)

    def back(
        self, d_output: Array | None, d_final_state: Array | None, wanted: tuple[bool, ...]
    ) -> tuple[Grads, Array | None]:
        return self.form.relevance(self.call, self.residuals, d_output, d_final_state, wanted)


class _Stabilised(selective_forms.Recurrent):
    """The selective scan whose adjoint passes through kappa."""

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon

    def relevance(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> tuple[Grads, Array]:
        """The gradients of u and the initial state, and the leak of each token's states."""
        u, D = call.arrays[0], call.arrays[5]
        xp = library_of(u, "u").namespace
        with self.quiet(call):
            dtype = dtype_of(xp, call.compute)
            s = selective_forms.step_sizes(xp, selective_forms.raw_steps(xp, call, dtype), *call.options[:3])
            d_q = zeros(xp, u.shape, dtype, u) if d_output is None else cast(xp, d_output, dtype)
            inner = selective_forms.on_steps(call, s, read=True)
            inner_wanted = tuple(entry in (0, 6) or (entry == 8 and wanted[8]) for entry in range(10))
            grads = GenericForm.backward(self, inner, residuals, d_q, d_final_state, inner_wanted)
            d_u, leak, d_state = grads[0], grads[6], grads[8]
            d_u = d_u if D is None else d_u + D * d_q
            return (d_u, *(None,) * 7, d_state, None), leak

    def reverse(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """The adjoint scan of a dense call; the leak stands in the place of the gate's gradient."""
        u, s, A, B, C, _, _, _, state, _ = call.arrays
        xp = library_of(u, "u").namespace
        _, state_shape, _, wide = self.shapes(call)
        carry = zeros(xp, state_shape, wide, u) if d_final_state is None else cast(xp, d_final_state, wide)
        carry, (_, d_u, _, _, _, leak) = walk_back(
            _core,
            (xp, s.dtype, wide, self.epsilon),
            (s, u, B, C, A, u),
            (*divide((s, u, B, C), u.shape[1])[0], False, True),
            (False, True, False, False, False, True),
            residuals[0],
            d_output,
            carry,
            chunk_of(call.options[3], u.shape[1], square_root_chunk(u.shape[1])),
            (s.dtype, s.dtype, wide, wide, wide, s.dtype),
            xp,
        )
        return d_u, *(None,) * 5, leak, None, carry if wanted[8] and state is not None else None, None


def _core(config: Any, arrays: Any, h: Array, d_read: Array, carry: Array) -> tuple[Array, Any]:
    xp, dtype, wide, epsilon = config
    s, u, B, C, A, _ = arrays
    B, C = cast(xp, B, wide), cast(xp, C, wide)
    decay = selective_forms.decays(xp, s, A)
    _, (states,) = loops.scan(
        selective_forms.token, None, (), h, (decay, selective_forms.entering(xp, s * cast(xp, u, dtype), B))
    )
    kappa = _kept(xp, states, epsilon)
    factor = 2 if is_complex(A) else 1
    d_states = factor * selective_forms.entering(
        xp, cast(xp, d_read, dtype), xp.conj(C) if is_complex(C) else C
    )
    passed = (xp.conj(decay) if is_complex(decay) else decay) * kappa
    carry, (g,) = loops.scan(selective_forms.back_token, None, (), carry, (passed, d_states), reverse=True)
    entered = selective_forms.read(xp, kappa * g, xp.conj(B) if is_complex(B) else B)
    leak = xp.sum((1 - kappa) * inner(xp, g, states), axis=-1)
    d_u = s * (xp.real(entered) if is_complex(entered) else entered)
    return carry, (None, d_u, None, None, None, leak)


def _kept(xp: Namespace, states: Array, epsilon: float) -> Array:
    """kappa = |h| / (|h| + epsilon), real"""
    size = xp.abs(states)
    return size / (size + epsilon)


def inner(xp: Namespace, gradient: Array, array: Array) -> Array:
    """Re conj(gradient) array"""
    return xp.real(xp.conj(gradient) * array) if is_complex(array) else gradient * array
