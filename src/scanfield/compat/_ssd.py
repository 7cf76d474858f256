"""Mamba-2's chunked scan under mamba_ssm's name."""

from __future__ import annotations

from math import inf
from typing import Any

from scanfield.arrays import Array, cast
from scanfield.compat import _arrays
from scanfield.errors import ArgumentError, ShapeError
from scanfield.layers.parametrised import sizes as check_sizes
from scanfield.scans.gated_delta import gdn2
from scanfield.scans.options import check_chunk_size
from scanfield.scans.ssd import ssd


def mamba_chunk_scan_combined(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    chunk_size: int,
    D: Array | None = None,
    z: Array | None = None,
    dt_bias: Array | None = None,
    initial_states: Array | None = None,
    seq_idx: Array | None = None,
    cu_seqlens: Any = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: Any = None,
) -> Any:
    """``mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined``: the state-space dual of Mamba-2.

    Parameters
    ----------
    x : array (batch, time, heads, P)
    dt : array (batch, time, heads)
        Step before bias, softplus and clamp.
    A : array (heads,)
    B, C : arrays (batch, time, groups, N)
    chunk_size : int
        At least 1. Tuned for one GPU kernel upstream; it changes no result, and here it chooses nothing.
    D : array (heads,) or (heads, P), optional
    z : array (batch, time, heads, P), optional
        Gate, multiplies the output by z sigmoid(z).
    dt_bias : array (heads,), optional
    initial_states : array (batch, heads, P, N), optional
        With ``seq_idx`` that of each row's first sequence, with ``cu_seqlens`` one for each sequence.
    seq_idx : integers (batch, time), optional
        The state starts anew wherever this number changes.
    cu_seqlens : integers (sequences + 1,), optional
        Bounds of sequences packed into one row (batch 1). They separate the sequences here, whatever else is asked
        for; upstream ignores them unless ``return_varlen_states``, and leaves the separation to ``seq_idx``.
    dt_softplus : bool
    dt_limit : (lowest, highest)
        Clamp of the step, after softplus.
    return_final_states : bool
        Also return the state after each row's last token, (batch, heads, P, N).
    return_varlen_states : bool
        Also return the state after each sequence of ``cu_seqlens``, (sequences, heads, P, N); it has gradients
        here.
    state_dtype : dtype, optional
        The dtype in which states are returned; float32 at least if absent.

    Returns
    -------
    output (batch, time, heads, P), or (output, final states), (output, varlen states), (output, final, varlen
    states)

    Raises
    ------
    ShapeError, DtypeError, BackendError, DeviceError, ArgumentError
        As ``scanfield.ssd``; for ``return_varlen_states`` without ``cu_seqlens``, and for a ``seq_idx`` that cuts
        elsewhere than ``cu_seqlens``.

    Notes
    -----
    The interface of mamba-ssm 2.3.2 with the ``state_dtype`` of its main branch.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.mamba_ssm import mamba_chunk_scan_combined
    >>> x, dt = numpy.ones((1, 3, 1, 1)), numpy.ones((1, 3, 1))
    >>> mamba_chunk_scan_combined(x, dt, numpy.log([0.5]), x, x, 256).ravel()
    array([1.  , 1.5 , 1.75])
    """
    check_chunk_size(chunk_size)
    if chunk_size is None:
        raise ArgumentError("chunk_size: None; an integer of at least 1 is needed")
    if return_varlen_states and cu_seqlens is None:
        raise ArgumentError("return_varlen_states: needs cu_seqlens, the bounds of the sequences")
    xp = _arrays.namespace(
        x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states
    )
    _arrays.check_rank(x, "x", "batch time heads channels")
    batch, time, heads, width = x.shape
    if z is not None:
        _arrays.check_shape(z, "z", batch=batch, time=time, heads=heads, channels=width)
    # The gate is applied before the output is rounded.
    sequences = {"x": x if z is None else _arrays.wide(xp, x), "dt": dt, "B": B, "C": C}
    bounds: Any = cu_seqlens
    last: tuple[int, ...] | None = None
    if cu_seqlens is not None:
        bounds = _arrays.checked_bounds(cu_seqlens, batch, time)
        last = (len(bounds) - 2,)
    if seq_idx is not None:
        pack = _arrays.pack_of(seq_idx, batch, time)
        if cu_seqlens is not None:
            _arrays.check_seq_idx_agrees(pack, bounds)
        else:
            if initial_states is not None and initial_states.shape[0] != batch:
                raise ShapeError(f"initial_states: {initial_states.shape[0]} states for a batch of {batch}")
            initial_states = _arrays.spread_states(xp, initial_states, pack)
            for name, array in sequences.items():
                _arrays.check_rank(
                    array, name, "batch time heads" if name == "dt" else "batch time heads channels"
                )
            sequences = {name: _arrays.folded(xp, array) for name, array in sequences.items()}
            bounds, last = pack.bounds, pack.last
    y, states = ssd(
        **sequences, A=A, D=D, dt_bias=dt_bias, initial_state=initial_states, dt_softplus=dt_softplus,
        dt_limit=dt_limit, cu_seqlens=bounds,
    )  # fmt: skip
    y = xp.reshape(y, (batch, time, heads, width))
    y = y if z is None else _arrays.gated(xp, y, z, x.dtype)
    if state_dtype is not None:
        try:
            states = cast(xp, states, state_dtype)
        except (TypeError, ValueError):
            raise ArgumentError(
                f"state_dtype: {state_dtype!r:.60}; a dtype of x's library is expected"
            ) from None
    results = [y]
    if return_final_states:
        results.append(states if last is None else _arrays.take(xp, states, last))
    if return_varlen_states:
        results.append(states)
    return results[0] if len(results) == 1 else tuple(results)


def ssd_minimal_discrete(
    X: Array, A: Array, B: Array, C: Array, block_len: int, initial_states: Array | None = None
) -> tuple[Any, Any]:
    """``mamba_ssm.modules.ssd_minimal.ssd_minimal_discrete``: listing 1 of the paper of Mamba-2, by the scan.

    Parameters
    ----------
    X : array (batch, time, heads, P)
        Inputs, multiplied by their steps already.
    A : array (batch, time, heads)
        Natural logarithm of the decay: rate times step.
    B, C : arrays (batch, time, heads, N)
    block_len : int
        At least 1; it changes no result, and need not divide the time.
    initial_states : array (batch, 1, heads, P, N), optional

    Returns
    -------
    (output (batch, time, heads, P), final state (batch, heads, P, N))

    Raises
    ------
    ShapeError, DtypeError, BackendError, DeviceError, ArgumentError
        As ``scanfield.gdn2``.

    Notes
    -----
    The interface of mamba-ssm 2.3.2; Dao and Gu, arXiv 2405.21060, listing 1.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.mamba_ssm import ssd_minimal_discrete
    >>> ones = numpy.ones((1, 3, 1, 1))
    >>> ssd_minimal_discrete(ones, numpy.log(0.5 * ones[..., 0]), ones, ones, 64)[0].ravel()
    array([1.  , 1.5 , 1.75])
    """
    check_sizes(block_len=block_len)
    xp = _arrays.namespace(X=X, A=A, B=B, C=C, initial_states=initial_states)
    _arrays.check_rank(X, "X", "batch time heads channels")
    batch, time, heads, width = X.shape
    _arrays.check_rank(B, "B", "batch time heads state")
    sizes = {"batch": batch, "time": time, "heads": heads}
    _arrays.check_shape(A, "A", **sizes)
    for name, array in {"B": B, "C": C}.items():
        _arrays.check_shape(array, name, **sizes, state=B.shape[3])
    state = None
    if initial_states is not None:
        before = {"batch": batch, "1": 1, "heads": heads, "channels": width, "state": B.shape[3]}
        _arrays.check_shape(initial_states, "initial_states", **before)
        state = xp.matrix_transpose(initial_states[:, 0, ...])
    y, state = gdn2(C, B, X, A, initial_state=state, scale=1.0)
    return y, xp.matrix_transpose(state)
