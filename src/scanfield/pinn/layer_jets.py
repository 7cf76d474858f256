"""A layer's sweep back on whole jets: what the functions of ``layerwise`` do with stacks (d + 2, n, width).

A stack holds the value, d first derivatives and the Laplacian. A layer's pre-activation derivatives are products that its
input gives again, z_i = h_prev_i W^T and z_c = h_prev_c W^T, so that these functions need no more arguments than those on
values:

    dL_dz = s1 dL_dh + s2 sum_i z_i dL_dh_i + (s3 sum_i z_i^2 + s2 z_c) dL_dh_c
    dL_dz_i = s1 dL_dh_i + 2 s2 z_i dL_dh_c;   dL_dz_c = s1 dL_dh_c         (s1, s2, s3 of tanh from h, see ``activations``)
    dW = dL_dz^T h_prev over all blocks;   db = column sums of the value's dL_dz;   dL_dh_prev = dL_dz W
"""

from __future__ import annotations

import sys

from scanfield.arrays import Array, library_of, zeros
from scanfield.pinn.inplace import InPlace
from scanfield.pinn.jets import TWO_PI
from scanfield.pinn.kernels import Kernels
from scanfield.pinn.memory import NOTHING
from scanfield.pinn.workspace import Workspace

LAPLACIAN = (None,)
"""The second-order channel of a stack here."""


def backward(
    dL_dh: Array, h: Array, h_prev: Array, W: Array, apply_tanh_grad: bool
) -> tuple[Array, Array, Array]:
    """dW, db and dL_dh_prev, as new arrays."""
    xp = library_of(W, "W").namespace
    kernels, (blocks, n, _), d = Kernels(xp), dL_dh.shape, dL_dh.shape[0] - 2
    bar = dL_dh
    if apply_tanh_grad:
        t = h[0, ...]
        s1 = 1.0 - t * t
        s2, s3 = -2.0 * t * s1, s1 * (6.0 * t * t - 2.0)
        z = kernels.linear_back(h_prev[1:, ...], W.T, NOTHING, None)
        first, last = z[:d, ...], bar[d + 1, ...]
        bent = s3 * xp.sum(first * first, axis=0) + s2 * z[d, ...]
        value = s1 * bar[0, ...] + s2 * xp.sum(first * bar[1 : 1 + d, ...], axis=0) + bent * last
        slopes = s1 * bar[1 : 1 + d, ...] + 2.0 * (s2 * last) * first
        bar = xp.concat([value[None, ...], slopes, (s1 * last)[None, ...]])
    left = xp.reshape(bar, (blocks * n, W.shape[0]))
    dW = left.T @ xp.reshape(h_prev, (blocks * n, W.shape[1]))
    return dW, xp.sum(bar[0, ...], axis=0), kernels.linear_back(bar, W, NOTHING, None)


def backward_inplace(
    dL_dh: Array,
    h: Array,
    h_prev: Array,
    W: Array,
    layer: int,
    apply_tanh_grad: bool,
    ws: Workspace,
    accumulate: bool,
) -> None:
    """``backward`` into ``dL_dz_stacks``, ``dW``, ``db`` and ``dL_dh_prev_stacks`` of a workspace, all checked."""
    kernels, memory = _kernels(ws), ws.buffers.part("layers")
    dz, dW, db = ws.dL_dz_stacks[layer], ws.dW[layer], ws.db[layer]
    dz[...] = dL_dh
    if apply_tanh_grad:
        blocks, n, into = h_prev.shape
        z = memory.take("z", (blocks, n, W.shape[0]))
        flat = h_prev.reshape(blocks * n, into)
        kernels.module.matmul(flat, W.T, out=z.reshape(blocks * n, W.shape[0]))
        kernels.activate_back("tanh", z, h, dz, ws.d, LAPLACIAN, memory, None)
    if not accumulate:
        dW[...] = 0.0
        db[...] = 0.0
    kernels.add_weight(dW, dz, h_prev, memory)
    kernels.add_bias(db, dz, memory)
    blocks, n, out = dz.shape
    target = ws.dL_dh_prev_stacks[layer]
    kernels.module.matmul(dz.reshape(blocks * n, out), W, out=target.reshape(blocks * n, W.shape[1]))


def frequencies(dL_dphi: Array, x: Array, B: Array, two_pi: float = TWO_PI) -> Array:
    """The gradient (d, features) of the frequencies from the cotangent (d + 2, n, 2 features) of the features' stack."""
    xp = library_of(B, "B").namespace
    omega = two_pi * B
    p = x @ omega
    nothing = zeros(xp, (B.shape[0], 0), B.dtype, B)
    waves = (xp.sin(p), xp.cos(p))
    _, _, rows = Kernels(xp).features_back(
        dL_dphi, x, omega, nothing, waves, LAPLACIAN, want_points=False, memory=NOTHING
    )
    return two_pi * xp.sum(rows(), axis=0)


def frequencies_inplace(
    dL_dphi: Array, x: Array, B: Array, dL_dB: Array, two_pi: float, ws: Workspace, accumulate: bool
) -> None:
    """``frequencies`` into ``dL_dB`` or added to it, in the buffers of a workspace."""
    kernels, memory = _kernels(ws), ws.buffers.part("layers")
    module, (n, _), m = kernels.module, x.shape, B.shape[1]
    omega, total = (memory.take(name, tuple(B.shape)) for name in ("omega", "total"))
    p, s, c = (memory.take(name, (n, m)) for name in ("p", "sin", "cos"))
    module.multiply(B, two_pi, out=omega)
    module.matmul(x, omega, out=p)
    module.sin(p, out=s)
    module.cos(p, out=c)
    nothing = memory.take("raw", (B.shape[0], 0))
    _, _, rows = kernels.features_back(
        dL_dphi, x, omega, nothing, (s, c), LAPLACIAN, want_points=False, memory=memory
    )
    total[...] = 0.0
    kernels.add_frequencies(total, rows, memory)
    module.multiply(total, two_pi, out=total)
    if accumulate:
        module.add(dL_dB, total, out=dL_dB)
    else:
        dL_dB[...] = total


def _kernels(ws: Workspace) -> InPlace:
    """Those of the library itself: they take tanh from its value, and need no bias for it."""
    return InPlace(ws.xp, None, sys.modules[ws.library])
