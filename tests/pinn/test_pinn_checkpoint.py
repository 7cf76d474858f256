"""Files of networks: the same bits in another process, and a clear refusal of whatever is no such file."""

from __future__ import annotations

import json
import struct
import textwrap

import numpy as np
import pytest
from processes import python

from scanfield import pinn
from scanfield.errors import ShapeError, StateError
from scanfield.pinn import checkpoint
from scanfield.pinn.placing import to_host


def network(hidden=(6, 5), seed=1, **where):
    embedding = pinn.FourierFeatures(2, 4, wavenumber=5.0, seed=seed)
    return pinn.Network.create(embedding, hidden=list(hidden), seed=seed, activation="swish", **where)


def test_another_process_predicts_the_same_bits(tmp_path):
    """Two hidden layers, trained frequencies, complex output, trained 20 steps (field report F077)."""
    problem = pinn.Helmholtz(pinn.Box((0, 0), (1, 1)), 5.0, 1.0, pinn.Impedance(0.0))
    fit = pinn.train(problem, network(), points=60, optimizer="adam", iterations=20)
    fit.save(tmp_path / "net.safetensors")
    x = np.random.default_rng(0).random((11, 2))
    here = pinn.jet(fit.network, x).value
    there = python(
        textwrap.dedent(f"""
            import numpy as np
            from scanfield import pinn
            x = np.random.default_rng(0).random((11, 2))
            print(pinn.jet(pinn.load_network({str(tmp_path / "net.safetensors")!r}), x).value.tobytes().hex())
        """)
    )
    assert there.split()[-1] == here.tobytes().hex()


def test_networks_come_back_on_every_library(tmp_path, library, xp, device, dtype):
    own = network(xp=xp, device=device, dtype=dtype)
    pinn.save_network(tmp_path / "net", own)
    for back in (
        pinn.load_network(tmp_path / "net", xp=xp, device=device),
        pinn.load_network(tmp_path / "net", like=own),
    ):
        assert back.activation == "swish" and back.widths == own.widths
        for name, value in own.parameters.items():
            assert library.is_array(back.parameters[name]) and library.on_device(back.parameters[name])
            np.testing.assert_array_equal(to_host(back.parameters[name]), to_host(value))
            assert library.dtype(back.parameters[name]) == dtype


@pytest.mark.parametrize(
    "embedding",
    [
        pinn.RawCoordinates(2, mean=(0.5, 1.0), scale=(2.0, 3.0)),
        pinn.PeriodicFeatures([1.0, None], 2, scale=2.0),
        pinn.FourierFeatures(2, 3, scale=1.0, trainable=False),
    ],
)
def test_every_embedding_comes_back(tmp_path, embedding):
    own = pinn.Network.create(embedding, hidden=[3], seed=2)
    pinn.save_network(tmp_path / "net", own, {"wavenumber": 0.1})
    x = np.random.default_rng(0).random((4, 2))
    np.testing.assert_array_equal(
        pinn.jet(pinn.load_network(tmp_path / "net"), x).second, pinn.jet(own, x).second
    )


def test_another_architecture_is_refused(tmp_path):
    pinn.save_network(tmp_path / "net", network())
    with pytest.raises(ShapeError, match=r"W0 has shape \(6, 8\) in the file and \(7, 8\)"):
        pinn.load_network(tmp_path / "net", like=network(hidden=(7, 5)))
    with pytest.raises(ShapeError, match=r"W2 has shape \(2, 5\) in the file and \(5, 5\)"):
        pinn.load_network(tmp_path / "net", like=network(hidden=(6, 5, 5)))


def _with(path, header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def test_damaged_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "net.safetensors"
    pinn.save_network(path, network())
    whole = path.read_bytes()
    assert [child.name for child in tmp_path.iterdir()] == ["net.safetensors"]  # nothing is left beside it

    cut = tmp_path / "cut"
    for size in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        cut.write_bytes(whole[:size])
        with pytest.raises(StateError, match="cut"):
            pinn.load_network(cut)
    flipped = bytearray(whole)
    flipped[-3] ^= 1
    cut.write_bytes(flipped)
    with pytest.raises(StateError, match="checksum"):
        pinn.load_network(cut)

    cut.write_bytes(b"PK\x03\x04 a zip, or a pickle: cos\nsystem\n(S'echo'\ntR.")
    with pytest.raises(StateError, match="safetensors"):
        pinn.load_network(cut)
    cut.write_bytes(struct.pack("<Q", 2**62) + whole[8:])  # a header that claims more than there is
    with pytest.raises(StateError, match="safetensors"):
        pinn.load_network(cut)
    _with(cut, {"__metadata__": {"made": "elsewhere"}})
    with pytest.raises(StateError, match="did not write it"):
        pinn.load_network(cut)
    for record in (
        "[1, 2]",
        "not json",
        '{"kind": "network"}',
        '{"kind": "training", "version": 1, "checksum": "", "facts": {}}',
    ):
        _with(cut, {"__metadata__": {"scanfield": record}})
        with pytest.raises(StateError):
            pinn.load_network(cut)
    with pytest.raises(FileNotFoundError):
        pinn.load_network(tmp_path / "nowhere")


def test_descriptions_that_make_no_network_are_refused(tmp_path):
    own = network()
    tensors = {f"network.{name}": value for name, value in own.parameters.items()}
    tensors["embedding.frequencies"] = own.embedding.frequencies
    good = checkpoint.architecture(own)
    for change in ({"activation": "os.system"}, {"axes": "x"}, {"dtype": "object"}, {"scale": [0.0, 0.0]}):
        checkpoint.write(tmp_path / "net", "network", tensors, {"architecture": good | change})
        with pytest.raises(StateError, match="does not make a network"):
            pinn.load_network(tmp_path / "net")
    checkpoint.write(tmp_path / "net", "network", {}, {"architecture": good})
    with pytest.raises(StateError, match="does not make a network"):
        pinn.load_network(tmp_path / "net")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "net"
    pinn.save_network(path, network())
    before = path.read_bytes()
    with pytest.raises(TypeError):
        checkpoint.write(path, "network", {}, {"architecture": object()})
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1
