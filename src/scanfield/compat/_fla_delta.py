"""flash-linear-attention's rules with one decay a head, or none: gated_delta_rule and delta_rule, in both forms."""

from __future__ import annotations

from typing import Any

from scanfield.arrays import Array, Namespace
from scanfield.compat import _arrays, _gates, _rule
from scanfield.errors import ArgumentError

_NOT_BETA = "; is it beta? fused_recurrent_gated_delta_rule's fifth argument is gk: pass beta=..."


def chunk_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    chunk_indices: Any = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """``fla.ops.gated_delta_rule.chunk_gated_delta_rule``: one decay and one beta a head.

    Parameters
    ----------
    q, k : arrays (batch, time, heads, K)
    v : array (batch, time, vheads, V)
        ``vheads`` a multiple of ``heads``.
    g : array (batch, time, vheads)
        Natural logarithm of the decay; with ``use_gate_in_kernel=True`` (a keyword behind the signature) the raw
        gate of
        -exp(A_log) softplus(g + dt_bias), both parameters (vheads,).
    beta : array (batch, time, vheads)
        Strength of erasing and writing; with ``use_beta_sigmoid_in_kernel`` its logit.
    chunk_indices
        Upstream's own plan of a pack; it changes no result.

    The other arguments, the results and the errors are those of ``chunk_gdn2`` and ``chunk_kda``.

    Notes
    -----
    The interface of fla-core 0.6.0; Gated DeltaNet, arXiv 2412.06464, equation 10.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.fla import chunk_gated_delta_rule
    >>> ones = numpy.ones((1, 2, 1, 1))
    >>> half = 0.5 * ones[..., 0]
    >>> chunk_gated_delta_rule(ones, ones, ones, numpy.log(half), half)[0].ravel()
    array([0.5  , 0.625])
    """
    name = "chunk_gated_delta_rule"
    words = _rule.read_words(name, kwargs, "use_gate_in_kernel", *_rule.WORDS, state_v_first=state_v_first)
    _rule.refuse(name, cp_context=cp_context)
    return _gated(
        q, k, v, g, None, None, beta, words, words.use_gate_in_kernel, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, _rule.bounds_of(cu_seqlens, cu_seqlens_cpu),
    )  # fmt: skip


def fused_recurrent_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    gk: Array | None = None,
    gv: Array | None = None,
    beta: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """``fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule``: as the chunk form, with decays of three kinds.

    Parameters
    ----------
    g, gk, gv : arrays (batch, time, vheads), (batch, time, vheads, K), (batch, time, vheads, V), optional
        Natural logarithms of decays of the head, of key channels and of value channels, multiplied together. **The
        fifth position is gk**, where ``chunk_gated_delta_rule`` has beta.
    beta : array (batch, time, vheads) or (batch, time, vheads, V), optional
        1 if absent.

    The other arguments, the results and the errors are those of ``chunk_gated_delta_rule``.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.fla import fused_recurrent_gated_delta_rule
    >>> ones = numpy.ones((1, 2, 1, 1))
    >>> half = 0.5 * ones[..., 0]
    >>> fused_recurrent_gated_delta_rule(ones, ones, ones, numpy.log(half), beta=half)[0].ravel()
    array([0.5  , 0.625])
    """
    name = "fused_recurrent_gated_delta_rule"
    words = _rule.read_words(name, kwargs, "transpose_state_layout", state_v_first=state_v_first)
    words = words._replace(A_log=A_log, dt_bias=dt_bias)
    return _gated(
        q, k, v, g, gk, gv, beta, words, use_gate_in_kernel, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, cu_seqlens,
    )  # fmt: skip


def _gated(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None,
    gk: Array | None,
    gv: Array | None,
    beta: Array | None,
    words: _rule.Words,
    use_gate: bool,
    scale: float | None,
    initial_state: Array | None,
    output_final_state: bool,
    l2norm: bool,
    beta_sigmoid: bool,
    allow_neg_eigval: bool,
    bounds: Any,
) -> tuple[Any, ...]:
    _gates.check_gate(use_gate, words.A_log, words.dt_bias, None)
    head = "batch time vheads"
    gates = {"g": (g, head), "gk": (gk, f"{head} K"), "gv": (gv, f"{head} V"), "beta": (beta, None)}
    xp = _rule.fitted(q, k, v, gates, initial_state, grouped=True, hints={"gk": _NOT_BETA})
    beta = _beta(xp, v, beta, beta_sigmoid, allow_neg_eigval)
    if use_gate:
        if g is None:
            raise ArgumentError("g: None; use_gate_in_kernel=True needs the raw gate")
        g = _gates.log_decay(xp, g, words.A_log, words.dt_bias, None)
    return _rule.run(
        xp, q, k, v, summed(xp, g, gk), beta=beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=l2norm, state_v_first=words.state_v_first,
        bounds=bounds, chunk_size=words.chunk_size, value_decay=gv,
    )  # fmt: skip


def _beta(
    xp: Namespace, v: Array, beta: Array | None, beta_sigmoid: bool = False, allow_neg_eigval: bool = False
) -> Array:
    """beta checked and ready, a head or a value channel each; ones if absent."""
    if beta is None:
        beta = xp.ones_like(v[..., 0])
        beta_sigmoid, allow_neg_eigval = False, False
    batch, time, vheads, width = v.shape
    value = {"V": width} if len(beta.shape) == 4 else {}
    _rule.check_gate_shape(beta, "beta", batch=batch, time=time, vheads=vheads, **value)
    return _gates.strength(xp, beta, beta_sigmoid, allow_neg_eigval)


def summed(xp: Namespace, g: Array | None, gk: Array | None) -> Array | None:
    """The log decay of a head and that of its channels, together."""
    if g is None or gk is None:
        return g if gk is None else gk
    return xp.expand_dims(_arrays.wide(xp, g), axis=-1) + _arrays.wide(xp, gk)


def chunk_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """``fla.ops.delta_rule.chunk_delta_rule``: erase and write with one beta a head, no decay.

    Parameters
    ----------
    q, k : arrays (batch, time, heads, K)
    v : array (batch, time, vheads, V)
        ``vheads`` is ``heads`` upstream; a multiple is taken too. float32 is taken too.
    beta : array (batch, time, vheads)

    The other arguments, the results and the errors are those of ``chunk_gdn2``; of further keywords ``chunk_size``
    alone.

    Notes
    -----
    The interface of fla-core 0.6.0; Yang et al., arXiv 2406.06484, equation 2.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.fla import chunk_delta_rule
    >>> ones = numpy.ones((1, 2, 1, 1))
    >>> chunk_delta_rule(ones, ones, ones, 0.5 * ones[..., 0])[0].ravel()
    array([0.5 , 0.75])
    """
    words = _rule.read_words("chunk_delta_rule", kwargs, "chunk_size")
    bounds = _rule.bounds_of(cu_seqlens, cu_seqlens_cpu)
    return _delta(
        q,
        k,
        v,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        bounds,
        words.chunk_size,
    )


def fused_recurrent_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
) -> tuple[Any, ...]:
    """``fla.ops.delta_rule.fused_recurrent_delta_rule``: as ``chunk_delta_rule``; beta may be absent, which is 1.

    It may also be (batch, time, vheads, V), one for each value channel.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.fla import fused_recurrent_delta_rule
    >>> ones = numpy.ones((1, 2, 1, 1))
    >>> fused_recurrent_delta_rule(ones, ones, ones, 0.5 * ones[..., 0])[0].ravel()
    array([0.5 , 0.75])
    """
    return _delta(
        q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


def _delta(
    q: Array,
    k: Array,
    v: Array,
    beta: Array | None,
    scale: float | None,
    initial_state: Array | None,
    output_final_state: bool,
    l2norm: bool,
    bounds: Any,
    chunk_size: int | None = None,
) -> tuple[Any, ...]:
    xp = _rule.fitted(q, k, v, {"beta": (beta, None)}, initial_state, grouped=True)
    beta = _beta(xp, v, beta)
    return _rule.run(
        xp, q, k, v, None, beta=beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=l2norm, bounds=bounds, chunk_size=chunk_size,
    )  # fmt: skip
