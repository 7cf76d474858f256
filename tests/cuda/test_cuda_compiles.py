"""Every kernel compiles for cards that are not here, without a warning or a spilled register, at its documented cost."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import compiling
import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cuda.md"
ALL = compiling.cases()
# The script of compiling.py compiles all of them; here, in minutes, the smallest and the largest of each kind.
SMALL = compiling.representative()
LARGE = [case for case in compiling.demanding() if case not in SMALL]

needs_nvrtc = pytest.mark.skipif(
    compiling.nvrtc() is None, reason="needs NVIDIA's run-time compiler: pip install nvidia-cuda-nvrtc"
)


def check(case: compiling.Case, said: str) -> dict[str, compiling.Usage]:
    assert "warning" not in said, said
    found = compiling.usage(said)
    assert found
    for name, used in found.items():
        assert used.spilled == 0, (name, used)
        assert used.stack == 0 or case.local_memory(name), (name, used)
    return found


def documented() -> dict[str, dict[str, int]]:
    """Registers of each kernel by the page."""
    table = PAGE.read_text(encoding="utf-8").split("<!-- registers -->")[1]
    rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in table.splitlines()
        if ".cu " in line
    ]
    return {row[0]: {name: int(n) for name, n in re.findall(r"(\w+) (\d+)", row[1])} for row in rows}


@needs_nvrtc
@pytest.mark.parametrize("case", [*SMALL, *LARGE], ids=str)
def test_nvrtc_for_hopper_at_the_documented_cost(case: compiling.Case):
    size, said = compiling.with_nvrtc(case, "sm_90")
    assert size > 1000
    found = check(case, said)
    kept = documented()[str(case)]
    assert set(found) == set(kept)
    more = {name: (used.registers, kept[name]) for name, used in found.items() if used.registers > kept[name]}
    assert not more, f"registers, now and by docs/cuda.md: {more}"


@needs_nvrtc
@pytest.mark.parametrize(("number", "case"), list(enumerate([*SMALL[::2], *LARGE])), ids=str)
def test_nvrtc_for_other_cards(number: int, case: compiling.Case):
    """Older and newer ones in turns."""
    check(case, compiling.with_nvrtc(case, ("sm_80", "sm_100")[number % 2])[1])


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, of NVIDIA's toolkit")
@pytest.mark.parametrize("case", SMALL[::5], ids=str)
def test_nvcc(case: compiling.Case):
    for architecture in compiling.ARCHITECTURES:
        check(case, compiling.with_nvcc(case, architecture))


def test_the_page_has_every_module():
    assert set(documented()) == {str(case) for case in ALL}
