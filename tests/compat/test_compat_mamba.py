"""compat.mamba_ssm on arrays of every library: the layouts, what is done in place, packed rows, and what is refused."""

from __future__ import annotations

import arrays
import numpy as np
import pytest

import scanfield
from scanfield.compat import mamba_ssm as compat

BATCH, T, CHANNELS, STATE, WIDTH = 2, 5, 4, 3, 3


def leave_out(backend, test, given):
    """On JAX a pack compiles for seconds; the convolution, which is ours to cut, stands for the scans."""
    return backend == "jax" and given.get("function") in ("scan", "chunk")


def draw(seed: int, **shapes):
    r = np.random.default_rng(seed)
    return {name: r.standard_normal(shape) for name, shape in shapes.items()}


def scan_inputs(time: int = T):
    drawn = draw(
        1, u=(BATCH, CHANNELS, time), delta=(BATCH, CHANNELS, time), A=(CHANNELS, STATE), B=(BATCH, 2, STATE, time),
        C=(BATCH, STATE, time), D=(CHANNELS,), z=(BATCH, CHANNELS, time), delta_bias=(CHANNELS,),
    )  # fmt: skip
    return drawn | {"A": -np.abs(drawn["A"])}


def same(library, got, want, tolerance=1e-12):
    assert library.is_array(got) and library.on_device(got)
    want = want if isinstance(want, np.ndarray) else library.numpy(want)
    assert arrays.deviation(library.numpy(got), want) <= tolerance


def test_selective_scan_is_the_operation_with_time_last(library):
    inputs = scan_inputs(library.time(T))
    state = draw(2, state=(BATCH, CHANNELS, STATE))["state"]
    y, last = compat.selective_scan_fn(
        **library.arrays(inputs),
        delta_softplus=True,
        return_last_state=True,
        initial_state=library.array(state),
    )
    ours = {n: np.moveaxis(x, -1, 1) if x.ndim > 2 else x for n, x in inputs.items()}
    want = scanfield.selective_scan(**ours, initial_state=state, delta_softplus=True)
    same(library, y, np.moveaxis(want.output, 1, -1))
    same(library, last, want.final_state)


def test_selective_scan_by_bounds_and_of_no_tokens(library):
    """cu_seqlens cuts where seq_idx does, with a state each; of no tokens the state is the one that came."""
    inputs = {
        n: x if x.ndim < 3 or library.name == "jax" else x[:1]
        for n, x in scan_inputs(library.time(T)).items()
    }
    given, states = library.arrays(inputs), draw(2, s=(2, CHANNELS, STATE))["s"]
    if library.name not in ("jax", "dask"):
        bounds = [0, 2, T]
        y, last = compat.selective_scan_fn(
            **given, return_last_state=True, cu_seqlens=bounds, initial_state=library.array(states)
        )
        assert tuple(last.shape) == states.shape
        for row, (start, stop) in enumerate([(0, 2), (2, T)]):
            one = {n: x[..., start:stop] if x.ndim > 2 else x for n, x in inputs.items()}
            want, want_last = compat.selective_scan_fn(
                **one, return_last_state=True, initial_state=states[row : row + 1]
            )
            assert arrays.deviation(library.numpy(y)[..., start:stop], want) <= 1e-12
            assert arrays.deviation(library.numpy(last)[row : row + 1], want_last) <= 1e-12
    nothing = {n: x[..., :0] if len(x.shape) > 2 else x for n, x in given.items()}
    before = library.array(states[: given["u"].shape[0]])
    y, last = compat.selective_scan_fn(**nothing, return_last_state=True, initial_state=before)
    assert tuple(y.shape) == (given["u"].shape[0], CHANNELS, 0)
    same(library, last, before, 0.0)


@pytest.mark.parametrize("function", ["scan", "convolution", "chunk"])
def test_rows_of_several_sequences_equal_each_sequence_alone(library, function):
    """seq_idx in a batch: the state starts anew where the number changes, a row's first sequence continues its state."""
    time = library.time(T)
    cut = time // 2
    seq_idx = np.array([[4] * time, [0] * cut + [1] * (time - cut)])
    pieces = [(0, 0, time), (1, 0, cut), (1, cut, time)]
    if function == "scan":
        inputs, axis = scan_inputs(time), -1
        states = draw(3, s=(BATCH, CHANNELS, STATE))["s"]
        call, options = compat.selective_scan_fn, {"return_last_state": True, "delta_softplus": True}
        state_name, sequences = "initial_state", ("u", "delta", "B", "C", "z")
    elif function == "convolution":
        inputs, axis = draw(4, x=(BATCH, CHANNELS, time), weight=(CHANNELS, WIDTH), bias=(CHANNELS,)), -1
        states = draw(5, s=(BATCH, CHANNELS, WIDTH - 1))["s"]
        call, options = compat.causal_conv1d_fn, {"return_final_states": True, "activation": "silu"}
        state_name, sequences = "initial_states", ("x",)
    else:
        inputs, axis = draw(
            6, x=(BATCH, time, 2, 3), dt=(BATCH, time, 2), A=(2,), B=(BATCH, time, 1, 3), C=(BATCH, time, 1, 3), D=(2,)
        ), 1  # fmt: skip
        states = draw(7, s=(BATCH, 2, 3, 3))["s"]
        call, options = compat.mamba_chunk_scan_combined, {"return_final_states": True, "chunk_size": 4}
        state_name, sequences = "initial_states", ("x", "dt", "B", "C")
    given = library.arrays(inputs) | {state_name: library.array(states)}
    y, last = call(**given, **options, seq_idx=library.array(seq_idx) if library.name != "dask" else seq_idx)
    for row, start, stop in pieces:
        one = {
            n: np.take(x[row : row + 1], range(start, stop), axis=axis) if n in sequences else x
            for n, x in inputs.items()
        }
        before = states[row : row + 1] if start == 0 else None
        want, want_last = call(**one, **options, **{state_name: before})
        found = np.take(library.numpy(y)[row : row + 1], range(start, stop), axis=axis)
        assert arrays.deviation(found, want) <= 1e-12
        if stop == time:
            assert arrays.deviation(library.numpy(last)[row : row + 1], want_last) <= 1e-12


def test_convolution_in_pieces_in_steps_and_packed(library):
    time = library.time(T)
    drawn = draw(
        8,
        x=(BATCH, CHANNELS, time),
        weight=(CHANNELS, WIDTH),
        bias=(CHANNELS,),
        s=(BATCH, CHANNELS, WIDTH - 1),
    )
    whole = np.concatenate([drawn["s"], drawn["x"]], axis=-1)
    truth = drawn["bias"][:, None] + sum(
        drawn["weight"][:, j, None] * whole[..., j : j + time] for j in range(WIDTH)
    )
    given = library.arrays(drawn)
    x, weight, bias, state = (given[n] for n in ("x", "weight", "bias", "s"))
    y, last = compat.causal_conv1d_fn(x, weight, bias, initial_states=state, return_final_states=True)
    same(library, y, truth)
    same(library, last, whole[..., time:])

    # two rows end to end, an empty sequence between them keeps its state
    xp = library.xp
    packed = xp.reshape(xp.permute_dims(x, (0, 2, 1)), (1, BATCH * time, CHANNELS))
    states = xp.permute_dims(xp.stack([state[0, ...], state[1, ...], state[1, ...]], axis=0), (0, 2, 1))
    out, after = compat.causal_conv1d(packed, weight, bias, states, cu_seqlens=[0, time, time, 2 * time])
    same(library, xp.permute_dims(xp.reshape(out, (BATCH, time, CHANNELS)), (0, 2, 1)), truth)
    want = np.stack([whole[0, :, time:], drawn["s"][1], whole[1, :, time:]])
    same(library, xp.permute_dims(after, (0, 2, 1)), want)


@pytest.mark.backend("numpy", "torch", "strict", "cupy")
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("size", [WIDTH - 1, WIDTH + 1])
def test_convolution_update_walks_through_the_sequence(library, ring, size):
    """Tokens by twos and ones after a state that is updated in place; as a ring its places go round."""
    drawn = draw(
        9, x=(BATCH, CHANNELS, 6), weight=(CHANNELS, WIDTH), bias=(CHANNELS,), s=(BATCH, CHANNELS, size)
    )
    before = drawn["s"][..., size - (WIDTH - 1) :]
    truth = compat.causal_conv1d_fn(
        drawn["x"], drawn["weight"], drawn["bias"], initial_states=before, activation="silu"
    )
    given = {name: _writable(library, x) for name, x in drawn.items()}
    state = given["s"]
    for start, stop in [(0, 2), (2, 3), (3, 5), (5, 6)]:
        counts = library.array(np.full(BATCH, size + start)) if ring else None
        y = compat.causal_conv1d_update(
            given["x"][..., start:stop], state, given["weight"], given["bias"], "silu", counts
        )
        same(library, y, truth[..., start:stop])
        seen = np.concatenate([drawn["s"], drawn["x"][..., :stop]], axis=-1)
        places = np.arange(seen.shape[-1]) % size
        want = seen[..., -size:]
        if ring:
            want = np.stack([seen[..., places == slot][..., -1] for slot in range(size)], axis=-1)
        same(library, state, want)
    one = compat.causal_conv1d_update(given["x"][..., 0], state, given["weight"])
    assert tuple(one.shape) == (BATCH, CHANNELS)


def _writable(library, x):
    return np.array(x) if library.name == "readonly" else library.array(x)


@pytest.mark.backend("numpy", "torch", "strict", "dask", "cupy")
@pytest.mark.parametrize("heads", [False, True])
def test_state_update_is_the_step_written_in_place(library, heads):
    inner, b = ((4, 2), (BATCH, 2, STATE)) if heads else ((CHANNELS,), (BATCH, STATE))
    drawn = draw(
        10, x=(BATCH, *inner), dt=(BATCH, *inner), A=(*inner, STATE), B=b, C=b, D=inner, z=(BATCH, *inner), dt_bias=inner,
        state=(BATCH, *inner, STATE),
    )  # fmt: skip
    state = _writable(library, drawn["state"])
    given = library.arrays({n: x for n, x in drawn.items() if n != "state"})
    y = compat.selective_state_update(state, **given, dt_softplus=True)
    flat = {n: x for n, x in drawn.items() if n != "state"}
    if heads:
        lead = {
            "x": (BATCH, 8),
            "dt": (BATCH, 8),
            "z": (BATCH, 8),
            "A": (8, STATE),
            "D": (8,),
            "dt_bias": (8,),
        }
        flat = {n: x.reshape(lead.get(n, x.shape)) for n, x in flat.items()}
    want, after = scanfield.selective_scan.step(
        drawn["state"].reshape(BATCH, -1, STATE), flat["x"], flat["dt"], flat["A"], flat["B"], flat["C"], flat["D"],
        flat["z"], flat["dt_bias"], delta_softplus=True,
    )  # fmt: skip
    same(library, y, want.reshape(drawn["x"].shape))
    same(library, state, after.reshape(drawn["state"].shape))


@pytest.mark.backend("jax")
def test_a_state_that_cannot_be_changed_is_refused(library):
    one = library.array(np.ones((1, 1)))
    with pytest.raises(scanfield.BackendError, match=r"state: .*in place.*selective_scan\.step"):
        compat.selective_state_update(library.array(np.ones((1, 1, 1))), one, one, one, one, one)


def test_read_only_state_is_refused_and_unchanged():
    state = np.ones((1, 1, 1))
    state.flags.writeable = False
    one = np.ones((1, 1))
    with pytest.raises(scanfield.BackendError, match=r"state: .*read-only"):
        compat.selective_state_update(state, one, one, one, one, one)


def _step(**changes):
    ones = {"state": np.ones((2, 3, 2)), "x": np.ones((2, 3)), "dt": np.ones((2, 3)), "A": np.ones((3, 2))}
    return ones | {"B": np.ones((2, 2)), "C": np.ones((2, 2))} | changes


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"dt": np.ones((2, 4))}, scanfield.ShapeError, r"dt: shape \(2, 4\).*\(2, 3\)"),
        ({"A": np.ones((3, 3))}, scanfield.ShapeError, r"A: shape \(3, 3\)"),
        ({"B": np.ones((2, 2, 2))}, scanfield.ShapeError, "B: .*2 groups"),
        ({"x": np.ones((1, 3)), "dt": np.ones((1, 3))}, scanfield.ShapeError, "B: "),
        ({"state_batch_indices": np.array([0, 2])}, scanfield.ShapeError, "state_batch_indices: row 2"),
        ({"state_batch_indices": np.array([1, 1])}, scanfield.ArgumentError, "state_batch_indices: .*twice"),
        ({"state_batch_indices": np.array([1])}, scanfield.ShapeError, "state_batch_indices: 1 rows"),
        ({"C": np.ones((2, 2), dtype=int)}, scanfield.DtypeError, "C: dtype int"),
    ],
)
def test_bad_steps_change_nothing(changes, error, text):
    given = _step(**changes)
    with pytest.raises(error, match=text):
        compat.selective_state_update(**given)
    assert np.array_equal(given["state"], np.ones((2, 3, 2)))


ROW = np.ones((1, 2, 4))
MINIMAL = tuple(np.ones(s) for s in ((1, 4, 2, 3), (1, 4, 2), (1, 4, 2, 5), (1, 4, 2, 5)))


def split(zxbcdt=None, **changes):
    one, zxbcdt = np.ones(1), np.ones((1, 4, 5)) if zxbcdt is None else zxbcdt
    given = {
        "conv1d_weight": np.ones((3, 2)),
        "conv1d_bias": None,
        "dt_bias": one,
        "A": -one,
        "D": one,
        "headdim": 1,
    }
    return compat.mamba_split_conv1d_scan_combined(zxbcdt, chunk_size=8, **{**given, **changes})


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: compat.causal_conv1d_fn(ROW, np.ones((3, 2))), scanfield.ShapeError, "weight: shape"),
        (lambda: compat.causal_conv1d_fn(np.ones(3), np.ones((3, 2))), scanfield.ShapeError, r"\(3,\) has 1 axis; exp"),
        (lambda: compat.causal_conv1d_fn(ROW, np.ones((2, 2)), activation="gelu"), scanfield.ArgumentError, "activation"),
        (
            lambda: compat.causal_conv1d_fn(ROW, np.ones((2, 2)), final_states_out=np.ones((1, 2, 1))),
            scanfield.ArgumentError, "final_states_out: .*return_final_states",
        ),
        (
            lambda: compat.causal_conv1d_fn(ROW, np.ones((2, 2)), seq_idx=np.zeros((1, 4), int), cu_seqlens=[0, 4]),
            scanfield.ArgumentError, "seq_idx: .*cu_seqlens",
        ),
        (
            lambda: compat.causal_conv1d_fn(ROW, np.ones((2, 2)), seq_idx=np.zeros((1, 3), int)),
            scanfield.ShapeError, r"seq_idx: shape \(1, 3\)",
        ),
        (lambda: split(np.ones((1, 4, 6))), scanfield.ShapeError, "zxbcdt: 6 features"),
        (lambda: split(conv1d_weight=np.ones((4, 2))), scanfield.ShapeError, "conv1d_weight: 4 channels"),
        (lambda: split(headdim=None), scanfield.ArgumentError, "headdim: None"),
        (lambda: split(D=np.ones((1, 2))), scanfield.ArgumentError, r"headdim: 1, but D \(1, 2\)"),
        (lambda: split(outproj_bias=np.ones(1)), scanfield.ArgumentError, "outproj_bias: given"),
        (lambda: split(ngroups=0), scanfield.ArgumentError, "ngroups: 0"),
        (lambda: split(rmsnorm_weight=np.ones(2)), scanfield.ShapeError, "rmsnorm_weight: shape"),
        (
            lambda: compat.causal_conv1d_update(ROW, np.ones((1, 2, 1)), np.ones((2, 3))),
            scanfield.ShapeError, "conv_state: holds 1 inputs",
        ),
        (
            lambda: compat.selective_scan_fn(ROW, ROW, np.ones((2, 3)), np.ones((1, 3, 5)), np.ones((1, 3, 4))),
            scanfield.ShapeError, "B: ",
        ),
        (
            lambda: compat.selective_scan_fn(ROW, ROW, np.ones((2, 3)), np.ones((1,)), np.ones((1, 3, 4))),
            scanfield.ShapeError, r"B: .*\(batch, groups, state, time\)",
        ),
        (
            lambda: compat.selective_scan_fn(ROW, ROW, np.ones((2, 3)) + 1j, np.ones((1, 3, 5)), np.ones((1, 3, 8))),
            scanfield.ShapeError, "B: .*even",
        ),
        (
            lambda: compat.mamba_inner_fn(
                ROW, np.ones((1, 1, 2)), None, np.ones((3, 1)), np.ones((1, 1)), np.ones((1, 1)), None, -np.ones((1, 1)),
                checkpoint_lvl=2,
            ),
            scanfield.ArgumentError, "checkpoint_lvl: 2",
        ),
        (lambda: compat.ssd_minimal_discrete(*MINIMAL, 0), scanfield.ArgumentError, "block_len: 0"),
        (lambda: compat.ssd_minimal_discrete(MINIMAL[0], *MINIMAL[2:], MINIMAL[2], 4), scanfield.ShapeError, "A: shape"),
        (
            lambda: compat.ssd_minimal_discrete(*MINIMAL, 4, np.ones((1, 2, 3, 4))),
            scanfield.ShapeError, r"initial_states: shape \(1, 2, 3, 4\)",
        ),
        *(
            (
                lambda name=name: compat.selective_scan_fn(
                    **{
                        "u": ROW, "delta": ROW, "A": -np.ones((2, 3)), "B": np.ones((1, 3, 4)), "C": np.ones((1, 3, 4)),
                        name: None,
                    }
                ),
                scanfield.ScanfieldError, f"^{name}: expected an array",
            )
            for name in ("u", "delta", "A", "B", "C")
        ),
        (
            lambda: compat.selective_state_update(
                np.ones((1, 2, 3)), np.ones((1, 2)), np.ones((1, 2)), None, np.ones((1, 3)), np.ones((1, 3))
            ),
            scanfield.ScanfieldError, "^A: expected an arr",
        ),
        (
            lambda: compat.mamba_chunk_scan_combined(
                *(np.ones(s) for s in ((1, 4, 1, 2), (1, 4, 1), (1,), (1, 4, 1, 3), (1, 4, 1, 3))), 2,
                return_final_states=True, state_dtype="zz",
            ),
            scanfield.ArgumentError, "state_dtype: 'zz'",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("name", compat.__all__)
def test_unknown_keywords_are_refused(name):
    with pytest.raises(TypeError, match="cu_seqlen_q"):
        getattr(compat, name)(cu_seqlen_q=None)


def test_bad_packs_of_the_chunked_scan_are_named():
    x, dt = np.ones((1, 4, 1, 1)), np.ones((1, 4, 1))
    arguments = (x, dt, -np.ones(1), x, x)
    call = compat.mamba_chunk_scan_combined
    with pytest.raises(scanfield.ArgumentError, match="return_varlen_states: needs cu_seqlens"):
        call(*arguments, 8, return_varlen_states=True)
    with pytest.raises(scanfield.ArgumentError, match=r"seq_idx: changes at .*cu_seqlens cuts at"):
        call(*arguments, 8, cu_seqlens=[0, 2, 4], seq_idx=np.array([[0, 1, 1, 1]]))
    with pytest.raises(scanfield.ShapeError, match="initial_states: 2 states for a batch of 1"):
        call(*arguments, 8, seq_idx=np.array([[0, 1, 1, 1]]), initial_states=np.ones((2, 1, 1, 1)))
    with pytest.raises(scanfield.ShapeError, match="cu_seqlens: ends with 3"):
        call(*arguments, 8, cu_seqlens=[0, 3])
    with pytest.raises(scanfield.ArgumentError, match="chunk_size"):
        call(*arguments, 0)


@pytest.mark.backend("jax")
def test_jax_differentiates_the_packed_convolution(library):
    """Against a difference in float64, through the activation, a packed row and the state."""
    import jax

    x = library.array(draw(11, x=(1, 4, CHANNELS))["x"])
    weight = library.array(draw(12, w=(CHANNELS, WIDTH))["w"])

    def loss(x):
        y, last = compat.causal_conv1d(x, weight, activation="silu", cu_seqlens=(0, 1, 4))
        return (y**2).sum() + (last**3).sum()

    slope = jax.grad(loss)(x)
    place, step = (0, 0, 1), 1e-5
    difference = (loss(x.at[place].add(step)) - loss(x.at[place].add(-step))) / (2 * step)
    assert abs(float(slope[place] - difference)) <= 1e-8
