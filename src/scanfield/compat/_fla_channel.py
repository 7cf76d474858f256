"""flash-linear-attention's rules with a decay for each channel: gdn2 and kda, in both forms.

The two forms of a rule are one computation here; they differ in the order of their arguments, in defaults, and in
which gates they can compute. Both have all gradients.
"""

from __future__ import annotations

from typing import Any

from scanfield.arrays import Array
from scanfield.compat import _gates, _rule
from scanfield.compat._rule import CHUNK


def chunk_gdn2(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    b: Array,
    w: Array,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """``fla.ops.gdn2.chunk_gdn2``: Gated DeltaNet-2, with a decay, an erase and a write gate for each channel.

    Parameters
    ----------
    q, k : arrays (batch, time, heads, K)
    v : array (batch, time, vheads, V)
        ``vheads`` is ``heads`` upstream; a multiple is taken too.
    g : array (batch, time, vheads, K)
        Natural logarithm of the decay; with ``use_gate_in_kernel`` the raw gate.
    b, w : arrays (batch, time, vheads, K), (batch, time, vheads, V)
        Erase and write gates.
    scale : float, optional
        K^(-1/2) if absent.
    initial_state : array (batch or sequences, vheads, K, V), optional
        (..., V, K) with ``state_v_first``.
    output_final_state : bool
        Return the final state; None stands for it otherwise.
    use_qk_l2norm_in_kernel : bool
        Divide every query and key by sqrt(sum of squares + 1e-6) first.
    use_gate_in_kernel : bool
        The log decay is -exp(A_log) softplus(g + dt_bias), or with ``lower_bound`` lower_bound sigmoid(exp(A_log)
        (g + dt_bias)); pass ``A_log`` (vheads,) and ``dt_bias`` (vheads K,) as keywords.
    cu_seqlens, cu_seqlens_cpu : integers (sequences + 1,), optional
        Bounds of packed sequences (batch 1), and their copy on the host.
    safe_gate : bool
        With ``use_gate_in_kernel`` the bound must lie in [-5, 0).
    disable_recompute : bool
        What upstream keeps for backward; it changes no result.
    return_intermediate_states : bool
        Return the states at the starts of chunks of 64 as a third result, (batch, chunks, vheads, K, V).
    state_v_first : bool
        States are (..., V, K).
    cp_context
        Refused: None only.
    **kwargs
        ``A_log``, ``dt_bias``, ``chunk_size`` (any integer of at least 1; it changes no result), and
        ``transpose_state_layout``, the old name of ``state_v_first``. Others raise.

    Returns
    -------
    (output (batch, time, vheads, V) in the dtype of ``q``, final state in float32 at least, or None)

    Raises
    ------
    ShapeError, DtypeError, BackendError, DeviceError, ArgumentError
        As ``scanfield.gdn2``; for gates that have no parameters, and for what is not supported, by its name.

    Notes
    -----
    The interface of fla-core 0.6.0. Any K, any dtype, any device; a state need not be float32.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.fla import chunk_gdn2
    >>> ones = numpy.ones((1, 2, 1, 1))
    >>> output, state = chunk_gdn2(ones, ones, ones, numpy.log(0.5 * ones), 0 * ones, ones, output_final_state=True)
    >>> output.ravel(), state.ravel()
    (array([1. , 1.5]), array([1.5]))
    """
    words = _rule.read_words("chunk_gdn2", kwargs, *_rule.WORDS, state_v_first=state_v_first)
    _rule.refuse("chunk_gdn2", cp_context=cp_context)
    return _gdn2(
        q, k, v, g, b, w, words, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        _rule.bounds_of(cu_seqlens, cu_seqlens_cpu), safe_gate, lower_bound, return_intermediate_states,
    )  # fmt: skip


def fused_recurrent_gdn2(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    b: Array,
    w: Array,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """``fla.ops.gdn2.fused_recurrent_gdn2``: as ``chunk_gdn2``, with ``A_log`` and ``dt_bias`` in front of ``scale``.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.fla import fused_recurrent_gdn2
    >>> ones = numpy.ones((1, 2, 1, 1))
    >>> fused_recurrent_gdn2(ones, ones, ones, numpy.log(0.5 * ones), 0 * ones, ones)[0].ravel()
    array([1. , 1.5])
    """
    words = _rule.read_words(
        "fused_recurrent_gdn2", kwargs, "transpose_state_layout", state_v_first=state_v_first
    )
    return _gdn2(
        q, k, v, g, b, w, words._replace(A_log=A_log, dt_bias=dt_bias), scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, cu_seqlens, False, lower_bound, False,
    )  # fmt: skip


def _gdn2(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    b: Array,
    w: Array,
    words: _rule.Words,
    scale: float | None,
    initial_state: Array | None,
    output_final_state: bool,
    l2norm: bool,
    use_gate: bool,
    bounds: Any,
    safe_gate: bool,
    lower_bound: float | None,
    intermediate: bool,
) -> tuple[Any, ...]:
    bound = _gates.check_gate(use_gate, words.A_log, words.dt_bias, lower_bound, safe_gate)
    keys, values = "batch time vheads K", "batch time vheads V"
    gates = {"g": (g, keys), "b": (b, keys), "w": (w, values)}
    xp = _rule.fitted(q, k, v, gates, initial_state, grouped=True)
    if use_gate:
        g = _gates.log_decay(xp, g, words.A_log, words.dt_bias, bound)
    return _rule.run(
        xp, q, k, v, g, erase=b, write=w, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=l2norm, state_v_first=words.state_v_first, bounds=bounds,
        chunk_size=_chunk(words, intermediate), return_intermediate_states=intermediate,
    )  # fmt: skip


def _chunk(words: _rule.Words, intermediate: bool) -> int | None:
    return CHUNK if intermediate and words.chunk_size is None else words.chunk_size


# ---------------------------------------------------------------------------------------------------------------------
# Kimi delta attention


def chunk_kda(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """``fla.ops.kda.chunk_kda``: Kimi delta attention, a decay for each channel and one beta a head.

    Parameters
    ----------
    q, k : arrays (batch, time, heads, K)
    v : array (batch, time, vheads, V)
        ``vheads`` a multiple of ``heads``.
    g : array (batch, time, vheads, K)
        Natural logarithm of the decay; with ``use_gate_in_kernel`` the raw gate.
    beta : array (batch, time, vheads)
        Strength of erasing and writing; with ``use_beta_sigmoid_in_kernel`` its logit.
    allow_neg_eigval : bool
        Twice that sigmoid.
    use_graph, max_num_seqs, disable_recompute
        How upstream's kernels are launched; they change no result.

    The other arguments, the results and the errors are those of ``chunk_gdn2``.

    Notes
    -----
    The interface of fla-core 0.6.0; Kimi Linear, arXiv 2510.26692, equation 1.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.fla import chunk_kda
    >>> ones = numpy.ones((1, 2, 1, 1))
    >>> chunk_kda(ones, ones, ones, numpy.log(0.5 * ones), 0.5 * ones[..., 0])[0].ravel()
    array([0.5  , 0.625])
    """
    words = _rule.read_words("chunk_kda", kwargs, *_rule.WORDS, state_v_first=state_v_first)
    _rule.refuse("chunk_kda", cp_context=cp_context)
    return _kda(
        q, k, v, g, beta, words, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, _rule.bounds_of(cu_seqlens, cu_seqlens_cpu), safe_gate, lower_bound,
        return_intermediate_states,
    )  # fmt: skip


def fused_recurrent_kda(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """``fla.ops.kda.fused_recurrent_kda``: as ``chunk_kda``, with ``A_log`` and ``dt_bias`` in front of ``scale``.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.fla import fused_recurrent_kda
    >>> ones = numpy.ones((1, 2, 1, 1))
    >>> fused_recurrent_kda(ones, ones, ones, numpy.log(0.5 * ones), 0.5 * ones[..., 0])[0].ravel()
    array([0.5  , 0.625])
    """
    words = _rule.read_words(
        "fused_recurrent_kda", kwargs, "transpose_state_layout", state_v_first=state_v_first
    )
    return _kda(
        q, k, v, g, beta, words._replace(A_log=A_log, dt_bias=dt_bias), scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, cu_seqlens, False,
        lower_bound, False,
    )  # fmt: skip


def _kda(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    words: _rule.Words,
    scale: float | None,
    initial_state: Array | None,
    output_final_state: bool,
    l2norm: bool,
    use_gate: bool,
    beta_sigmoid: bool,
    allow_neg_eigval: bool,
    bounds: Any,
    safe_gate: bool,
    lower_bound: float | None,
    intermediate: bool,
) -> tuple[Any, ...]:
    bound = _gates.check_gate(use_gate, words.A_log, words.dt_bias, lower_bound, safe_gate)
    gates = {"g": (g, "batch time vheads K"), "beta": (beta, "batch time vheads")}
    xp = _rule.fitted(q, k, v, gates, initial_state, grouped=True)
    if use_gate:
        g = _gates.log_decay(xp, g, words.A_log, words.dt_bias, bound)
    beta = _gates.strength(xp, beta, beta_sigmoid, allow_neg_eigval)
    return _rule.run(
        xp, q, k, v, g, beta=beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=l2norm, state_v_first=words.state_v_first, bounds=bounds,
        chunk_size=_chunk(words, intermediate), return_intermediate_states=intermediate,
    )  # fmt: skip
