"""flash-linear-attention's gated rules without erasing: gla and simple_gla, in both forms."""

from __future__ import annotations

from typing import Any

from scanfield.arrays import Array
from scanfield.compat import _arrays, _rule


def chunk_gla(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
) -> tuple[Any, ...]:
    """``fla.ops.gla.chunk_gla``: gated linear attention, a decay for each key channel.

    Parameters
    ----------
    q, k : arrays (batch, time, heads, K)
    v : array (batch, time, heads, V)
    g : array (batch, time, heads, K)
        Natural logarithm of the decay.
    scale : float, optional
        K^(-1/2) if absent.
    initial_state : array (batch or sequences, heads, K, V), optional
        (..., V, K) with ``state_v_first``.
    output_final_state : bool
        Return the final state; None stands for it otherwise.
    state_v_first : bool
        States are (..., V, K).
    cu_seqlens, cu_seqlens_cpu : integers (sequences + 1,), optional
        Bounds of packed sequences (batch 1), and their copy on the host.

    Returns
    -------
    (output (batch, time, heads, V) in the dtype of ``q``, final state in float32 at least, or None)

    Raises
    ------
    ShapeError, DtypeError, BackendError, DeviceError, ArgumentError
        As ``scanfield.gla``.

    Notes
    -----
    The interface of fla-core 0.6.0; Yang et al., arXiv 2312.06635, equation 3.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.fla import chunk_gla
    >>> ones = numpy.ones((1, 3, 1, 1))
    >>> chunk_gla(ones, ones, ones, numpy.log(0.5 * ones))[0].ravel()
    array([1.  , 1.5 , 1.75])
    """
    bounds = _rule.bounds_of(cu_seqlens, cu_seqlens_cpu)
    return _gated(
        q, k, v, g, None, scale, initial_state, output_final_state, False, state_v_first, bounds, "g"
    )


def fused_recurrent_gla(
    q: Array,
    k: Array,
    v: Array,
    gk: Array | None = None,
    gv: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """``fla.ops.gla.fused_recurrent_gla``: as ``chunk_gla``, with decays of key and of value channels.

    Parameters
    ----------
    gk, gv : arrays (batch, time, heads, K), (batch, time, heads, V), optional
        Natural logarithms; both apply. **The fifth position is gv**, where ``chunk_gla`` has scale.
    reverse : bool
        Time runs backwards.

    The other arguments, the results and the errors are those of ``chunk_gla``.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.fla import fused_recurrent_gla
    >>> ones = numpy.ones((1, 3, 1, 1))
    >>> fused_recurrent_gla(ones, ones, ones, gv=numpy.log(0.5 * ones), reverse=True)[0].ravel()
    array([1.75, 1.5 , 1.  ])
    """
    words = _rule.read_words(
        "fused_recurrent_gla", kwargs, "transpose_state_layout", state_v_first=state_v_first
    )
    return _gated(
        q,
        k,
        v,
        gk,
        gv,
        scale,
        initial_state,
        output_final_state,
        reverse,
        words.state_v_first,
        cu_seqlens,
        "gk",
    )


def _gated(
    q: Array,
    k: Array,
    v: Array,
    gk: Array | None,
    gv: Array | None,
    scale: float | None,
    initial_state: Array | None,
    output_final_state: bool,
    reverse: bool,
    state_v_first: bool,
    bounds: Any,
    name: str,
) -> tuple[Any, ...]:
    gates = {name: (gk, "batch time heads K"), "gv": (gv, "batch time heads V")}
    xp = _rule.fitted(q, k, v, gates, initial_state, grouped=False)
    return _rule.run(
        xp, q, k, v, gk, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        state_v_first=state_v_first, bounds=bounds, reverse=reverse, value_decay=gv,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# one decay a head


def chunk_simple_gla(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    g_gamma: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """``fla.ops.simple_gla.chunk_simple_gla``: one decay a head, of the token or constant.

    Parameters
    ----------
    g : array (batch, time, heads), optional
        Natural logarithm of the decay of each token.
    g_gamma : array (heads,), optional
        Natural logarithm of a constant decay; with ``g`` both apply.

    The other arguments, the results and the errors are those of ``chunk_gla``; of further keywords ``chunk_size``
    alone.

    Notes
    -----
    The interface of fla-core 0.6.0.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.fla import chunk_simple_gla
    >>> ones = numpy.ones((1, 3, 1, 1))
    >>> chunk_simple_gla(ones, ones, ones, g_gamma=numpy.log([0.5]))[0].ravel()
    array([1.  , 1.5 , 1.75])
    """
    words = _rule.read_words("chunk_simple_gla", kwargs, "chunk_size")
    return _simple(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, False, state_v_first,
        _rule.bounds_of(cu_seqlens, cu_seqlens_cpu), words.chunk_size,
    )  # fmt: skip


def fused_recurrent_simple_gla(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    g_gamma: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """``fla.ops.simple_gla.fused_recurrent_simple_gla``: as ``chunk_simple_gla``; ``reverse`` runs time backwards.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.fla import fused_recurrent_simple_gla
    >>> ones = numpy.ones((1, 3, 1, 1))
    >>> fused_recurrent_simple_gla(ones, ones, ones, numpy.log(0.5 * ones[..., 0]))[0].ravel()
    array([1.  , 1.5 , 1.75])
    """
    words = _rule.read_words(
        "fused_recurrent_simple_gla", kwargs, "transpose_state_layout", state_v_first=state_v_first
    )
    return _simple(
        q,
        k,
        v,
        g,
        g_gamma,
        scale,
        initial_state,
        output_final_state,
        reverse,
        words.state_v_first,
        cu_seqlens,
    )


def _simple(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None,
    g_gamma: Array | None,
    scale: float | None,
    initial_state: Array | None,
    output_final_state: bool,
    reverse: bool,
    state_v_first: bool,
    bounds: Any,
    chunk_size: int | None = None,
) -> tuple[Any, ...]:
    gates = {"g": (g, "batch time heads"), "g_gamma": (g_gamma, "heads")}
    xp = _rule.fitted(q, k, v, gates, initial_state, grouped=False)
    decay = g
    if g_gamma is not None:
        constant = xp.broadcast_to(_arrays.wide(xp, g_gamma), v.shape[:3])
        decay = constant if g is None else _arrays.wide(xp, g) + constant
    return _rule.run(
        xp, q, k, v, decay, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        state_v_first=state_v_first, bounds=bounds, reverse=reverse, chunk_size=chunk_size,
    )  # fmt: skip
