"""What a thousand draws leave behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def forget(request: pytest.FixtureRequest) -> Iterator[None]:
    """JAX keeps what it compiled for each draw's shapes, a megabyte a draw."""
    yield
    if "library" in request.fixturenames:
        request.getfixturevalue("library").forget()
