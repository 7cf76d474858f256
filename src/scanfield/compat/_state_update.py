"""One decoding step of Mamba-1 and Mamba-2 under mamba_ssm's name: the state is updated in place."""

from __future__ import annotations

from typing import Any

from scanfield.arrays import Array, Namespace, cast
from scanfield.compat import _arrays
from scanfield.errors import ShapeError
from scanfield.scans.selective import selective_scan
from scanfield.scans.ssd import ssd


def selective_state_update(
    state: Array,
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None = None,
    z: Array | None = None,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Array | None = None,
) -> Array:
    """``mamba_ssm.ops.triton.selective_state_update.selective_state_update``: one token; ``state`` is overwritten.

    Parameters
    ----------
    state : array (batch, channels, N) or (batch, heads, P, N)
        The state before the token; afterwards the state behind it, in its own dtype and memory.
    x, dt, z : arrays (batch, channels) or (batch, heads, P)
        Input, step before bias and softplus, and the optional gate.
    A : array (channels, N) or (heads, P, N)
    B, C : arrays (batch, N) or (batch, groups, N)
        Head h uses group h // (heads / groups).
    D, dt_bias : arrays (channels,) or (heads, P), optional
    dt_softplus : bool
    state_batch_indices : integers (batch,), optional
        Row i works on ``state[state_batch_indices[i]]`` of a larger pool; no row twice.

    Returns
    -------
    array of the shape of ``x``, in its dtype

    Raises
    ------
    BackendError
        For a state that cannot be changed in place (JAX, read-only NumPy).
    ShapeError, DtypeError, DeviceError, ArgumentError
        For arrays that do not fit each other, and rows outside of the pool. The state is then unchanged.

    Notes
    -----
    The interface of mamba-ssm 2.3.2, with ``D`` and ``dt_bias`` truly optional. Where A, dt and dt_bias are
    expanded from one value a head (stride 0, as Mamba-2 passes them), nothing is computed per channel that need not
    be.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.mamba_ssm import selective_state_update
    >>> state, one = numpy.ones((1, 1, 1)), numpy.ones((1, 1))
    >>> selective_state_update(state, one, one, numpy.log([[0.5]]), one, one), state
    (array([[1.5]]), array([[[1.5]]]))
    """
    xp = _arrays.namespace(state=state, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    _arrays.check_rank(state, "state", "batch channels state", "batch heads channels state")
    _arrays.check_writable(state, "state")
    with_heads = len(state.shape) == 4
    _arrays.check_rank(A, "A", "heads channels state" if with_heads else "channels state")
    _check(state, x, dt, A, B, C, D, z, dt_bias, with_heads)
    rows = None
    if state_batch_indices is not None:
        rows = _arrays.check_rows(state_batch_indices, "state_batch_indices", x.shape[0], state.shape[0])
    elif state.shape[0] != x.shape[0]:
        raise ShapeError(f"state: {state.shape[0]} states for a batch of {x.shape[0]} (x {tuple(x.shape)})")
    before = state if rows is None else _arrays.take(xp, state, rows)
    if not with_heads:
        y, after = selective_scan.step(before, x, dt, A, B, C, D, z, dt_bias, delta_softplus=dt_softplus)
    elif _tied(A, (1, 2)) and _tied(dt, (2,)) and (dt_bias is None or _tied(dt_bias, (1,))):
        y, after = _one_step_a_head(xp, before, x, dt, A, B, C, D, z, dt_bias, dt_softplus)
    else:
        y, after = _all_channels(xp, before, x, dt, A, B, C, D, z, dt_bias, dt_softplus)
    _arrays.write(state, after, "state", rows)
    return y


def _check(
    state: Array,
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None,
    z: Array | None,
    dt_bias: Array | None,
    with_heads: bool,
) -> None:
    names = ("heads", "channels", "state") if with_heads else ("channels", "state")
    sizes = dict(zip(names, state.shape[1:], strict=True))
    inner = {name: sizes[name] for name in names[:-1]}
    _arrays.check_rank(x, "x", " ".join(["batch", *inner]))
    batch = {"batch": x.shape[0]}
    for name, array in {"x": x, "dt": dt, "z": z}.items():
        if array is not None:
            _arrays.check_shape(array, name, **batch, **inner)
    _arrays.check_shape(A, "A", **sizes)
    for name, array in {"D": D, "dt_bias": dt_bias}.items():
        if array is not None:
            _arrays.check_shape(array, name, **inner)
    for name, array in {"B": B, "C": C}.items():
        _arrays.check_rank(array, name, "batch state", "batch groups state")
        groups = array.shape[1] if len(array.shape) == 3 else 1
        grouped = {"groups": groups} if len(array.shape) == 3 else {}
        _arrays.check_shape(array, name, **batch, **grouped, state=sizes["state"])
        heads = sizes.get("heads", 1)
        if groups < 1 or heads % groups:
            raise ShapeError(
                f"{name}: shape {tuple(array.shape)} has {groups} groups, which do not divide {heads} heads"
            )


def _tied(array: Array, axes: tuple[int, ...]) -> bool:
    """Whether the array repeats one entry along these axes, seen by its strides; False where a library shows none."""
    strides = getattr(array, "stride", None)
    strides = strides() if callable(strides) else getattr(array, "strides", None)
    return strides is not None and all(strides[axis] == 0 or array.shape[axis] == 1 for axis in axes)


def _groups(xp: Namespace, x: Array) -> Array:
    return xp.expand_dims(x, axis=1) if len(x.shape) == 2 else x


def _one_step_a_head(
    xp: Namespace,
    state: Array,
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None,
    z: Array | None,
    dt_bias: Array | None,
    dt_softplus: bool,
) -> tuple[Any, Any]:
    """Mamba-2: one step and one decay a head."""
    bias = None if dt_bias is None else dt_bias[:, 0]
    wide = x if z is None else _arrays.wide(xp, x)  # the gate is applied before the output is rounded
    y, after = ssd.step(
        state, wide, dt[..., 0], A[:, 0, 0], _groups(xp, B), _groups(xp, C), D, bias, dt_softplus=dt_softplus
    )
    return (y if z is None else _arrays.gated(xp, y, z, x.dtype)), after


def _all_channels(
    xp: Namespace,
    state: Array,
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None,
    z: Array | None,
    dt_bias: Array | None,
    dt_softplus: bool,
) -> tuple[Any, Any]:
    """Heads side by side as channels: those of a head are neighbours, so groups keep their meaning."""
    batch, heads, width, size = state.shape

    def flat(a: Array | None, *lead: int) -> Array | None:
        return None if a is None else xp.reshape(a, (*lead, heads * width))

    y, after = selective_scan.step(
        xp.reshape(state, (batch, heads * width, size)),
        flat(x, batch), flat(dt, batch), xp.reshape(A, (heads * width, size)), _groups(xp, B), _groups(xp, C),
        flat(D), flat(z, batch), flat(dt_bias), delta_softplus=dt_softplus,
    )  # fmt: skip
    return cast(xp, xp.reshape(y, x.shape), x.dtype), xp.reshape(after, state.shape)
