"""The sweep back one layer at a time, and the primitive operations that it is made of.

    dL_dz = dL_dh (1 - h^2) or dL_dh;   dW = dL_dz^T h_prev;   db = column sums of dL_dz;   dL_dh_prev = dL_dz W
    dB_i = sum_n 2 pi x_i (cos(2 pi x B) dL_dphi_sin - sin(2 pi x B) dL_dphi_cos)

These are the formulas on values, (n, width), as a data loss needs them; stacks (d + 2, n, width) are swept back as whole
jets (``layer_jets``; ``loss_and_grad`` does so for all layers). The forms that write return nothing, take
``accumulate=True`` to add to what stands there, refuse arguments that share memory with what they write, and sum in a
fixed order. NumPy, PyTorch and CuPy.
"""

from __future__ import annotations

import numpy

from scanfield.advice import shown
from scanfield.arrays import Array, check_same_library, current_device_of, library_of
from scanfield.errors import ArgumentError, ShapeError
from scanfield.pinn import layer_jets
from scanfield.pinn.fourier import check_count
from scanfield.pinn.jets import TWO_PI
from scanfield.pinn.primitives import write_or_add
from scanfield.pinn.workspace import Workspace
from scanfield.pinn.writing import check_fourier, check_layer, check_same_shape, writable


def layer_backward(
    dL_dh: Array, h: Array, h_prev: Array, W: Array, apply_tanh_grad: bool
) -> tuple[Array, Array, Array]:
    """Gradients of one layer, as new arrays.

    Parameters
    ----------
    dL_dh, h : (n, out) or (d + 2, n, out)
        Cotangent of the layer's output, and that output: values, or jets (value, d slopes, Laplacian).
    h_prev : (n, in) or (d + 2, n, in)
        The layer's input.
    W : (out, in)
        Its weight.
    apply_tanh_grad : bool
        Whether the layer ends in a tanh.

    Returns
    -------
    dW, db, dL_dh_prev : (out, in), (out,), as h_prev

    Raises
    ------
    ShapeError, BackendError, DeviceError
        Arguments that do not fit each other.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.pinn import layer_backward
    >>> dW, db, dL_dh_prev = layer_backward(
    ...     numpy.ones((1, 1)), numpy.array([[0.5]]), numpy.array([[2.0, 3.0]]), numpy.array([[4.0, 5.0]]), True
    ... )
    >>> dW.tolist(), db.tolist(), dL_dh_prev.tolist()
    ([[1.5, 2.25]], [0.75], [[3.0, 3.75]])
    """
    check_layer(dL_dh, h, h_prev, W)
    if len(dL_dh.shape) == 3:
        return layer_jets.backward(dL_dh, h, h_prev, W, apply_tanh_grad)
    xp = library_of(W, "W").namespace
    with current_device_of(W):
        dz = dL_dh * (1.0 - h * h) if apply_tanh_grad else dL_dh
        return dz.T @ h_prev, xp.sum(dz, axis=0), dz @ W


def fourier_backward(dL_dphi: Array, x: Array, B: Array) -> Array:
    """The gradient (d, features) of the frequencies from the cotangent of [sin | cos](2 pi x B).

    Parameters
    ----------
    dL_dphi : (n, 2 features) or (d + 2, n, 2 features)
        Of the values, or of the jets.
    x : (n, d)
        Points.
    B : (d, features)
        Frequencies in cycles per length.

    Returns
    -------
    (d, features) array

    Raises
    ------
    ShapeError, BackendError, DeviceError
        Arguments that do not fit each other.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.pinn import fourier_backward
    >>> fourier_backward(numpy.array([[1.0, 0.0]]), numpy.array([[1.0]]), numpy.array([[1.0]])).round(12).tolist()
    [[6.28318530718]]
    """
    check_fourier(dL_dphi, x, B)
    if len(dL_dphi.shape) == 3:
        return layer_jets.frequencies(dL_dphi, x, B)
    xp = library_of(B, "B").namespace
    with current_device_of(B):
        p, m = (TWO_PI * x) @ B, B.shape[1]
        return TWO_PI * (x.T @ (xp.cos(p) * dL_dphi[:, :m] - xp.sin(p) * dL_dphi[:, m:]))


def mse_backward(pred: Array, target: Array) -> Array:
    """(2 / n) (pred - target), the gradient of the mean over n points of ``|pred - target|^2``, (n, outputs).

    >>> import numpy
    >>> from scanfield.pinn import mse_backward
    >>> mse_backward(numpy.array([[1.0, 2.0], [3.0, 4.0]]), numpy.zeros((2, 2))).tolist()
    [[1.0, 2.0], [3.0, 4.0]]
    """
    check_same_library([("pred", pred), ("target", target)])
    check_same_shape("target", target, "pred", pred)
    with current_device_of(pred):
        return (pred - target) * (2.0 / pred.shape[0])


# ------------------------------------------------------------------------------------------------------------
# forms that write


def mse_backward_inplace(pred: Array, target: Array, d_loss: Array, *, accumulate: bool = False) -> None:
    """``mse_backward`` into ``d_loss`` (n, outputs)."""
    check_same_shape("target", target, "pred", pred)
    steps = writable("d_loss", d_loss, {"pred": pred, "target": target}, tuple(pred.shape))

    def write(p: Array, t: Array, out: Array) -> None:
        steps.module.subtract(p, t, out=out)
        steps.module.multiply(out, 2.0 / pred.shape[0], out=out)

    with current_device_of(d_loss):
        write_or_add(steps.module, write, (pred, target), d_loss, accumulate)


def layer_backward_inplace(
    dL_dh: Array,
    h: Array,
    h_prev: Array,
    W: Array,
    layer_idx: int,
    apply_tanh_grad: bool,
    ws: Workspace,
    *,
    accumulate: bool = False,
) -> None:
    """``layer_backward`` into ``dL_dz``, ``dW``, ``db`` and ``dL_dh_prev`` of a workspace, at a layer.

    Jets (d + 2, n, width) go into ``dL_dz_stacks`` and ``dL_dh_prev_stacks`` in place of ``dL_dz`` and ``dL_dh_prev``.

    Parameters
    ----------
    dL_dh, h, h_prev, W, apply_tanh_grad
        As in ``layer_backward``; n is the workspace's batch.
    layer_idx : int
        0 is the layer after the embedding.
    ws : Workspace
    accumulate : bool
        Add to ``dW`` and ``db`` (the cotangents are always written): for row chunks and several loss terms.

    Raises
    ------
    ArgumentError
        A layer that is not there, or an argument that shares memory with what is written.
    ShapeError
        Shapes that do not fit. Nothing has been written then.
    """
    if check_count("layer_idx", layer_idx, 0) >= ws.num_layers:
        raise ArgumentError(f"layer_idx: {shown(layer_idx)}; allowed is 0 to {ws.num_layers - 1}")
    check_layer(dL_dh, h, h_prev, W)
    given = {"dL_dh": dL_dh, "h": h, "h_prev": h_prev, "W": W}
    jets = len(dL_dh.shape) == 3
    bars = (ws.dL_dz_stacks, ws.dL_dh_prev_stacks) if jets else (ws.dL_dz, ws.dL_dh_prev)
    dz, dh_prev, dW, db = (each[layer_idx] for each in (*bars, ws.dW, ws.db))
    (*before, _), (out, into), which = dL_dh.shape, W.shape, "_stacks" if jets else ""
    steps = writable(f"ws.dL_dz{which}", dz, given, (*before, out))
    writable("ws.dW", dW, given, (out, into))
    writable("ws.db", db, given, (out,))
    writable(f"ws.dL_dh_prev{which}", dh_prev, given, (*before, into))
    with current_device_of(W):
        if jets:
            layer_jets.backward_inplace(dL_dh, h, h_prev, W, layer_idx, apply_tanh_grad, ws, accumulate)
            return
        if apply_tanh_grad:
            steps.tanh_slope_times(h, dL_dh, dz, False)
        else:
            dz[...] = dL_dh
        module = steps.module
        if accumulate:
            product = module.matmul(dz.T, h_prev, out=ws.buffers.take("product", (out, into)))
            module.add(dW, product, out=dW)
        else:
            module.matmul(dz.T, h_prev, out=dW)
        steps.sum_rows(dz, db, accumulate, ws.buffers.take)
        module.matmul(dz, W, out=dh_prev)


def fourier_backward_inplace(
    dL_dphi: Array, x: Array, B: Array, ws: Workspace, dL_dB: Array | None = None, *, accumulate: bool = False
) -> None:
    """``fourier_backward`` into ``ws.dB``, or into ``dL_dB``; sine and cosine come from ``ws`` only as memory."""
    check_fourier(dL_dphi, x, B)
    target = ws.dB if dL_dB is None else dL_dB
    fourier_grad(x, dL_dphi, B, target, TWO_PI, accumulate=accumulate, scratch=ws)


# ------------------------------------------------------------------------------------------------------------
# primitive operations


def sub_out(a: Array, b: Array, out: Array, *, accumulate: bool = False) -> None:
    """out = a - b, or out += a - b; all of one shape."""
    check_same_shape("b", b, "a", a)
    steps = writable("out", out, {"a": a, "b": b}, tuple(a.shape))
    with current_device_of(out):
        steps.subtract(a, b, out, accumulate)


def mul_scalar_out(a: Array, s: float, out: Array, *, accumulate: bool = False) -> None:
    """out = a s, or out += a s; ``s`` a real number."""
    if not isinstance(s, int | float | numpy.integer | numpy.floating):
        raise ArgumentError(f"s: expected a real number, came {type(s).__name__}")
    steps = writable("out", out, {"a": a}, tuple(a.shape))
    with current_device_of(out):
        steps.scale(a, float(s), out, accumulate)


def tanh_deriv_mul_out(h: Array, g: Array, out: Array, *, accumulate: bool = False) -> None:
    """out = (1 - h^2) g, or out += it; the derivative of tanh where its value is h."""
    check_same_shape("g", g, "h", h)
    steps = writable("out", out, {"h": h, "g": g}, tuple(h.shape))
    with current_device_of(out):
        steps.tanh_slope_times(h, g, out, accumulate)


def sum_rows_out(a: Array, out: Array, *, accumulate: bool = False) -> None:
    """out (width,) = the sum of the rows of a (n, width), or out += it (by way of one row)."""
    if len(a.shape) != 2:
        raise ShapeError(f"a has shape {tuple(a.shape)}; expected (n, width)")
    steps = writable("out", out, {"a": a}, (a.shape[1],))
    with current_device_of(out):
        steps.sum_rows(a, out, accumulate)


def memset_zero_out(out: Array) -> None:
    """Set every entry to zero."""
    steps = writable("out", out, {}, tuple(out.shape))
    with current_device_of(out):
        steps.zero(out)


def fourier_grad(
    x: Array,
    dL_dphi: Array,
    B: Array,
    dL_dB: Array,
    two_pi: float = TWO_PI,
    *,
    accumulate: bool = False,
    scratch: Workspace | None = None,
) -> None:
    """dL_dB (d, features) = two_pi x^T (cos p dL_dphi_sin - sin p dL_dphi_cos) with p = two_pi x B, or added to it.

    ``dL_dphi`` may be a stack (d + 2, n, 2 features). ``scratch`` is a workspace: then nothing is allocated.
    """
    check_fourier(dL_dphi, x, B)
    steps = writable("dL_dB", dL_dB, {"x": x, "dL_dphi": dL_dphi, "B": B}, tuple(B.shape))
    with current_device_of(dL_dB):
        if len(dL_dphi.shape) == 3:
            if scratch is None:
                found = layer_jets.frequencies(dL_dphi, x, B, two_pi)
                dL_dB[...] = dL_dB + found if accumulate else found
            else:
                layer_jets.frequencies_inplace(dL_dphi, x, B, dL_dB, two_pi, scratch, accumulate)
            return
        take = None if scratch is None else scratch.buffers.part(0).take
        steps.frequency_gradient(x, dL_dphi, B, dL_dB, two_pi, accumulate, take)
