"""`scanfield.warmup`: what it runs, on which library, and what it refuses before anything is imported or made."""

from __future__ import annotations

from typing import Any

import pytest
from arrays import Library

import scanfield
from scanfield import inspection
from scanfield.errors import ArgumentError, BackendError, DtypeError, ShapeError

NAMES = {"readonly": "numpy", "strict": "array_api_strict"}
SCAN = {"a": (1, 3, 2), "b": (1, 3, 2), "initial_state": (1, 2)}


def test_a_call_and_its_gradient_run_on_the_library_that_is_asked_for(library: Library, monkeypatch):
    ran = []
    vjp = inspection.vjp

    def seen(op: Any, **given: Any) -> Any:
        result, pullback = vjp(op, **given)
        ran.append(sorted(given))
        assert all(library.is_array(x) for x in given.values() if x is not None and not isinstance(x, str))

        def pulled(*cotangents: Any) -> Any:
            ran.append([tuple(x.shape) for x in cotangents])
            return pullback(*cotangents)

        return result, pulled

    monkeypatch.setattr(inspection, "vjp", seen)
    name = NAMES.get(library.name, library.name)
    told = scanfield.warmup(scanfield.linear_scan, SCAN, "float32", library=name, method="generic")
    assert ran == [["a", "b", "initial_state", "method"], [(1, 3, 2), (1, 2)]]
    assert told.operation == "linear_scan" and told.taken["forward"].startswith("generic")


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        (
            {"shapes": SCAN | {"c": (1,)}},
            ArgumentError,
            "'c' is no array of linear_scan; it has a, b, initial_state",
        ),
        ({"shapes": SCAN | {"a": (1, True, 2)}}, ShapeError, "expected a sequence of sizes"),
        ({"shapes": SCAN | {"a": 3}}, ShapeError, "'a' has 3; expected a sequence of sizes"),
        ({"shapes": SCAN | {"a": (1, -3, 2)}}, ShapeError, r"'a' has \(1, -3, 2\); expected a sequence"),
        ({"shapes": SCAN | {"a": (1, 3.0, 2)}}, ShapeError, r"'a' has \(1, 3.0, 2\); expected a sequence"),
        ({"dtype": "int32"}, DtypeError, "dtype: 'int32'; allowed are the names float16, .*as strings"),
        ({"dtype": float}, DtypeError, "dtype: <class 'float'>; allowed are the names"),
        ({"library": "nowhere.at.all"}, BackendError, "library: 'nowhere.at.all' cannot be imported"),
        ({"library": None}, BackendError, "library: None cannot be imported"),
        ({"library": "json"}, BackendError, "library: 'json' is no array API namespace"),
        ({"device": "moon"}, BackendError, "makes no array of float32 on device 'moon'"),
    ],
)
def test_what_cannot_be_made_is_named(changed: dict[str, Any], error: type[Exception], words: str):
    given = {"shapes": SCAN, "dtype": "float32"} | changed
    with pytest.raises(error, match=words):
        scanfield.warmup(scanfield.linear_scan, **given)
