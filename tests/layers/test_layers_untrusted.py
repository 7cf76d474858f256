"""Layers' checkpoints and state dicts from anywhere: taken whole, or refused with nothing changed."""

from __future__ import annotations

import functools
import json
import os
import tempfile
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from spoiling import DRAWS, ODD, SEED, odd_bytes, odd_tree, packed, unpacked

import scanfield
from scanfield import tensorfile
from scanfield.layers import LanguageModel, MambaBlock, load, load_state_dict, save, state_dict

fuzz = settings(max_examples=DRAWS, derandomize="SCANFIELD_FUZZ_SEED" not in os.environ, deadline=None)
mutators = st.randoms(use_true_random=False)


@functools.cache
def model() -> LanguageModel:
    return LanguageModel(5, 3, [MambaBlock(3, 2)]).init(0)


@functools.cache
def original() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        save(model(), Path(folder) / "model", "transformers")
        return (Path(folder) / "model").read_bytes()


def bits(layer: Any) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in layer.named_parameters().items()}


@fuzz
@seed(SEED)
@given(mutators)
def test_spoilt_files(rng: Random) -> None:
    if rng.random() < 0.4:
        content = odd_bytes(rng, original())
    else:
        header, body = unpacked(original())
        content = packed(odd_tree(rng, header), body)
    layer, before = model(), bits(model())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        path.write_bytes(content)
        try:
            load(layer, path, "transformers")
        except scanfield.ScanfieldError as error:
            message = str(error)
        else:
            message = ""
        assert len(message) < 4000 and message.isprintable(), message
        assert set(bits(layer)) == set(before) if not message else bits(layer) == before
        assert os.listdir(folder) == ["model"] and path.read_bytes() == content
    load_state_dict(layer, {name: np.frombuffer(raw, layer.named_parameters()[name].dtype).reshape(
        layer.named_parameters()[name].shape) for name, raw in before.items()})  # fmt: skip


VALUES = [
    *ODD, b"bytes", object(), np.ones(3), np.ones((0, 3)), np.array(1.0), np.array("a"), np.array([None]),
    np.ones(3, "datetime64[s]"),
    np.ma.masked_invalid(np.ones(3)), np.ones(3, np.int8), np.ones(3, np.longdouble), np.broadcast_to(1.0,
    (2**40,)), np.ones((5, 3), ">f4"),
    np.broadcast_to(np.float32(1.0), (5, 2**45)), np.ones(3, [("a", float)]), type, [np.ones(3)],
]  # fmt: skip


@fuzz
@seed(SEED)
@given(mutators)
def test_spoilt_state_dicts(rng: Random) -> None:
    names = rng.choice(["scanfield", "mamba_ssm", "transformers", "fla"])
    good = {name: array + 1.0 for name, array in state_dict(model(), names).items()}
    given_: dict[Any, Any] = dict(good)
    for _ in range(rng.choice([1, 1, 2])):
        name = rng.choice(list(good))
        what = rng.randrange(5)
        if what == 0:
            given_.pop(name, None)
        elif what == 1:
            given_[
                rng.choice(["", "a", "lm_head.weight", "\ud800", 3, None, ("a",), 10**5000, "x" * 10**5])
            ] = good[name]
        else:
            given_[name] = rng.choice(VALUES)
    before, kept = model().named_parameters(), bits(model())
    try:
        load_state_dict(model(), given_, names)
    except scanfield.ScanfieldError as error:
        message = str(error)
    else:
        message = ""
    assert len(message) < 4000 and (not message or bits(model()) == kept)
    model().set_parameters(before)


HEADERS = {
    "2^60 elements": {"a": {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 2**62]}},
    "2^55 elements in two axes": {"a": {"dtype": "F32", "shape": [2**30, 2**25], "data_offsets": [0, 2**57]}},
    "empty with a long axis": {"a": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}},
    "empty, beyond an index": {"a": {"dtype": "F32", "shape": [0, 2**70], "data_offsets": [0, 0]}},
    "negative sizes": {"a": {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}},
    "sizes that are floats": {"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}},
    "sizes that are truths": {"a": {"dtype": "F32", "shape": [2, True], "data_offsets": [0, 8]}},
    "many axes": {"a": {"dtype": "F32", "shape": [1] * 100, "data_offsets": [0, 4]}},
    "a long product": {"a": {"dtype": "F32", "shape": [10**4000] * 50, "data_offsets": [0, 8]}},
    "before the start": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
    "beyond the end": {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}},
    "backwards": {"a": {"dtype": "F32", "shape": [0], "data_offsets": [8, 8]}},
    "a hole": {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
    "a rest": {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
    "three offsets": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}},
    "shared bytes": {n: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for n in "ab"},
    "half a surrogate": {"\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
    "a dtype that is a list": {"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}},
    "a long dtype": {"a": {"dtype": "F" * 10**6, "shape": [2], "data_offsets": [0, 8]}},
    "no entry": {"a": None},
    "texts that are none": {"__metadata__": {"a": 1}},
    "a list of texts": {"__metadata__": [["a", "b"]]},
    "a list": [],
    "a number": 3,
    "a name twice": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    + b'"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "an entry's name twice": b'{"a":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}}',
    "UTF-16": json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode("utf-16"),
    "not a number": b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}',
    "many digits": b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}',
    "deep": b'{"a":' * 100_000,
}  # fmt: skip


@pytest.mark.parametrize("what", HEADERS)
def test_headers_that_lie(what: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(packed(HEADERS[what], bytes(8)))
    tracemalloc.start()
    try:
        with pytest.raises(scanfield.StateError) as caught:
            tensorfile.read(tmp_path / "a")
        assert tracemalloc.get_traced_memory()[1] < 2**20 + 20 * len(packed(HEADERS[what]))
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 1000 and str(caught.value).isprintable()


def test_shared_bytes_multiply_no_memory(tmp_path: Path) -> None:
    """Two thousand names of one array of a mebibyte: 2 GiB if each had its copy."""
    size = 2**20
    header = {f"a{i}": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]} for i in range(2000)}
    (tmp_path / "a").write_bytes(packed(header, bytes(size)))
    tracemalloc.start()
    try:
        with pytest.raises(scanfield.StateError, match="overlap"):
            tensorfile.read(tmp_path / "a")
        assert tracemalloc.get_traced_memory()[1] < 8 * size
    finally:
        tracemalloc.stop()


def test_a_large_foreign_file_is_not_read(tmp_path: Path) -> None:
    """What its first bytes betray is refused before the rest is looked at; a sparse file of 2^40 bytes stands for it."""
    for start, words in ((2**63, "cut off"), (10**9, "cut off"), (8, "header")):
        with open(tmp_path / "a", "wb") as file:
            file.write(start.to_bytes(8, "little"))
            file.truncate(2**40)
        with pytest.raises(scanfield.StateError, match=words):
            tensorfile.read(tmp_path / "a")
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path):
        with pytest.raises(scanfield.StateError, match="not a file"):
            tensorfile.read(place)
    with pytest.raises(FileNotFoundError):
        tensorfile.read(tmp_path / "nowhere")


@pytest.mark.backend("torch")
def test_spoilt_state_dicts_of_modules() -> None:
    """torch's own errors for what torch checks, ours for a second head; nothing is changed by a refused one."""
    import torch

    from scanfield_torch import nn

    module = nn.LanguageModel(5, 3, [nn.MambaBlock(3, 2)], names="transformers", seed=0)
    good = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for name in ("lm_head.weight", "backbone.embeddings.weight"):
        for value in (
            None,
            3,
            "a",
            np.ones(3),
            torch.ones(3),
            torch.ones((5, 3), dtype=torch.complex64),
            torch.ones(5, 4),
        ):
            with pytest.raises((scanfield.ScanfieldError, RuntimeError)):
                module.load_state_dict({**good, name: value})
            now = module.state_dict()
            assert all(torch.equal(now[n], good[n]) for n in good)
