"""What users of a CPU have today, written from the papers: the recurrences in PyTorch, JAX and plain NumPy.

Arrays are (batch, time, ...) as in scanfield, unless a peer is known by another layout; converting is done before the
clock starts. Each maker takes NumPy arrays and gives a function without arguments, whose result is (output, state) or
the gradients by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


def _tensors(arrays: Arrays, *, grad: bool = False) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    return {name: torch.tensor(x, requires_grad=grad) for name, x in arrays.items()}


def _back(*found: Any) -> tuple[np.ndarray, ...]:
    return tuple(x.detach().numpy() for x in found)


def _trained(forward: Callable[..., Any], arrays: Arrays, d_output: np.ndarray) -> Callable[[], Arrays]:
    """Forward and backward through autograd, from a cotangent of the output."""
    import torch

    given, cotangent = _tensors(arrays, grad=True), torch.tensor(d_output)

    def run() -> Arrays:
        output, _ = forward(**given)
        gradients = torch.autograd.grad(output, list(given.values()), cotangent)
        return {name: x.numpy() for name, x in zip(given, gradients, strict=True)}

    return run


# -- the selective scan ----------------------------------------------------------------------------------------------
def mamba_reference(arrays: Arrays) -> Callable[[], tuple[np.ndarray, ...]]:
    """The way of mamba's PyTorch reference, whose arrays are (batch, channels, time, state).

    Decays and inputs of all tokens at once, then a loop that reads out by an einsum a token.
    """
    import torch

    given = _tensors(arrays)
    u, delta, B, C = (given[n].transpose(1, 2).contiguous() for n in ("u", "delta", "B", "C"))
    A = given["A"]

    @torch.no_grad()
    def run() -> tuple[np.ndarray, ...]:
        decay = torch.exp(torch.einsum("bdt,dn->bdtn", delta, A))
        entering = torch.einsum("bdt,bnt,bdt->bdtn", delta, B, u)
        state = torch.zeros(decay.shape[0], decay.shape[1], decay.shape[3])
        outputs = []
        for t in range(u.shape[2]):
            state = decay[:, :, t] * state + entering[:, :, t]
            outputs.append(torch.einsum("bdn,bn->bd", state, C[:, :, t]))
        return _back(torch.stack(outputs, dim=2).transpose(1, 2), state)

    return run


def _eager_selective(u: Any, delta: Any, A: Any, B: Any, C: Any) -> tuple[Any, Any]:
    """One token after another, no array of all tokens' states; unbind, since a slice's gradient is a whole array."""
    import torch

    state = torch.zeros(u.shape[0], *A.shape)
    outputs = []
    for u_t, s, B_t, C_t in zip(u.unbind(1), delta.unbind(1), B.unbind(1), C.unbind(1), strict=True):
        state = torch.exp(s[..., None] * A) * state + (s * u_t)[..., None] * B_t[:, None]
        outputs.append((state @ C_t[..., None])[..., 0])
    return torch.stack(outputs, dim=1), state


def eager_selective_training(arrays: Arrays, d_output: np.ndarray) -> Callable[[], Arrays]:
    """The token loop in eager PyTorch with autograd."""
    return _trained(_eager_selective, arrays, d_output)


def _sweep(a: Any, x: Any) -> None:
    """x becomes h_t = a_t h_(t-1) + x_t along axis 1, whose length is a power of two, in place; a is used up.

    Blelloch's two sweeps (also Brent and Kung's): pairs of ever longer blocks, then back to the blocks between.
    """
    time = x.shape[1]
    half = 1
    while half < time:
        left, right = slice(half - 1, None, 2 * half), slice(2 * half - 1, None, 2 * half)
        x[:, right].add_(a[:, right].mul(x[:, left]))
        a[:, right].mul_(a[:, left])
        half *= 2
    half //= 2
    while half >= 1:
        right = slice(3 * half - 1, None, 2 * half)
        left = slice(2 * half - 1, -half, 2 * half)
        x[:, right].add_(a[:, right].mul(x[:, left]))
        half //= 2


def parallel_selective_training(arrays: Arrays, d_output: np.ndarray) -> Callable[[], Arrays]:
    """The way of mambapy: all states by a parallel scan with a backward of its own, the rest by autograd."""
    import torch

    class Scan(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Any, x: Any) -> Any:
            h = x.clone()
            _sweep(a.clone(), h)
            ctx.save_for_backward(a, h)
            return h

        @staticmethod
        def backward(ctx: Any, d_h: Any) -> Any:
            a, h = ctx.saved_tensors
            d_x = d_h.flip(1)
            _sweep(torch.cat([torch.zeros_like(a[:, :1]), a.flip(1)[:, :-1]], dim=1), d_x)
            d_x = d_x.flip(1)
            d_a = torch.zeros_like(a)
            d_a[:, 1:].add_(d_x[:, 1:] * h[:, :-1])
            return d_a, d_x

    def forward(u: Any, delta: Any, A: Any, B: Any, C: Any) -> tuple[Any, Any]:
        decay = torch.exp(delta[..., None] * A)
        h = Scan.apply(decay, delta[..., None] * B[:, :, None] * u[..., None])
        return (h @ C[..., None])[..., 0], h[:, -1]

    return _trained(forward, arrays, d_output)


def jax_selective(arrays: Arrays) -> Callable[[], tuple[np.ndarray, ...]]:
    """A jitted `lax.scan` over one sequence whose state lies (state, channels), so that channels are vectorised.

    With an axis for the batch, or the read-out by einsum, XLA takes several times as long.
    """
    import jax
    import jax.numpy as jnp

    assert arrays["u"].shape[0] == 1
    tokens = tuple(jnp.asarray(arrays[name][0]) for name in ("u", "delta", "B", "C"))
    A = jnp.asarray(np.ascontiguousarray(arrays["A"].T))

    @jax.jit
    def scan(A: Any, tokens: Any) -> Any:
        def step(h: Any, token: Any) -> Any:
            u, s, B, C = token
            h = jnp.exp(s[None] * A) * h + (s * u)[None] * B[:, None]
            return h, C @ h

        return jax.lax.scan(step, jnp.zeros(A.shape, jnp.float32), tokens)

    def run() -> tuple[np.ndarray, ...]:
        state, output = jax.block_until_ready(scan(A, tokens))
        return np.asarray(output)[None], np.asarray(state).T[None]

    return run


# -- the gated delta rule --------------------------------------------------------------------------------------------
def _eager_gdn2(query: Any, key: Any, value: Any, log_decay: Any, erase: Any, write: Any) -> tuple[Any, Any]:
    import torch

    batch, _, heads, K = query.shape
    state = torch.zeros(batch, heads, K, value.shape[3])
    tokens = (x.unbind(1) for x in (query * K**-0.5, key, value, log_decay, erase, write))
    outputs = []
    for q, k, v, g, e, w in zip(*tokens, strict=True):
        state = torch.exp(g)[..., None] * state
        read = ((e * k)[..., None, :] @ state)[..., 0, :]
        state = state + k[..., None] * (w * v - read)[..., None, :]
        outputs.append((q[..., None, :] @ state)[..., 0, :])
    return torch.stack(outputs, dim=1), state


def _prepared_gdn2(
    query: Any, key: Any, value: Any, log_decay: Any, erase: Any, write: Any
) -> tuple[Any, Any]:
    """The same recurrence with all that does not need the state computed before the loop, for all tokens at once."""
    import torch

    batch, _, heads, K = query.shape
    state = torch.zeros(batch, heads, K, value.shape[3])
    rows = ((query * K**-0.5)[..., None, :], (erase * key)[..., None, :], (write * value)[..., None, :])
    columns = (key[..., None], torch.exp(log_decay)[..., None])
    outputs = []
    for q, e, v, k, g in zip(*(x.unbind(1) for x in (*rows, *columns)), strict=True):
        state = g * state
        state = state + k * (v - e @ state)
        outputs.append(q @ state)
    return torch.stack(outputs, dim=1)[..., 0, :], state


GDN2_LOOPS = {
    "PyTorch eager token loop": _eager_gdn2,
    "the same, gates prepared for all tokens at once": _prepared_gdn2,
}


def eager_gdn2(arrays: Arrays, loop: str) -> Callable[[], tuple[np.ndarray, ...]]:
    """A token loop in eager PyTorch, without autograd."""
    import torch

    given = _tensors(arrays)

    @torch.no_grad()
    def run() -> tuple[np.ndarray, ...]:
        return _back(*GDN2_LOOPS[loop](**given))

    return run


def eager_gdn2_training(arrays: Arrays, d_output: np.ndarray, loop: str) -> Callable[[], Arrays]:
    """The same with autograd."""
    return _trained(GDN2_LOOPS[loop], arrays, d_output)


def einsum_step(state: np.ndarray, query, key, value, log_decay, erase, write):
    """One token of the gated delta rule, as one writes it in NumPy."""
    state = state * np.exp(log_decay)[..., None]
    read = np.einsum("bhk,bhkv->bhv", erase * key, state)
    state += np.einsum("bhk,bhv->bhkv", key, write * value - read)
    return np.einsum("bhk,bhkv->bhv", query * np.float32(query.shape[-1] ** -0.5), state), state
