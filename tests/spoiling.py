"""Files as an enemy or a bad disk would make them: bytes, trees of JSON and lines of TOML, spoilt by a seeded generator."""

from __future__ import annotations

import json
import os
import random
import re
from typing import Any

DRAWS = int(os.environ.get("SCANFIELD_FUZZ_DRAWS", "20"))
SEED = int(os.environ.get("SCANFIELD_FUZZ_SEED", "0"))

ODD = [
    None, True, False, -1, 0, 1, 2, 0.5, 2**31, 2**60, 2**63, 2**64, 10**30, -(2**60), 1e308, -1e308, 5e-324,
    float("nan"),
    float("inf"), "", "a", "x" * 3000, "\x00", "\x1b[2J", "\ud800", "../../etc/passwd", "/etc/passwd",
    "__class__", "1e999", [],
    [0], [-1], [1, 2, 3], [2**60, 2**60], [0, 2**63], [1] * 70, [[[[[0]]]]], {}, {"a": 1},
    {"__metadata__": {"a": "b"}},
]  # fmt: skip


def odd_bytes(rng: random.Random, data: bytes) -> bytes:
    """A few bytes changed, lost, doubled, moved or overwritten."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(out) + 1)
        end = min(len(out), at + rng.choice([1, 1, 2, 8, 40, len(out)]))
        what = rng.randrange(7)
        if what == 0 and out:
            out[at % len(out)] ^= 1 << rng.randrange(8)
        elif what == 1:
            del out[at:end]
        elif what == 2:
            out[at:at] = out[at:end]
        elif what == 3:
            out[at:at] = rng.randbytes(rng.choice([1, 2, 8]))
        elif what == 4:
            out[:8] = rng.choice([0, 1, len(out), 2**31, 2**62, 2**64 - 1]).to_bytes(8, "little")
        elif what == 5:
            out[at:end] = rng.choice([b"[", b"{", b'"', b"\xff", b"9", b"-", b"\x00"]) * (end - at)
        else:
            digits = list(re.finditer(rb"\d+", bytes(out[:5000])))
            if digits:
                found = rng.choice(digits)
                out[found.start() : found.end()] = rng.choice(
                    [b"0", b"-1", b"1e999", b"9" * 30, b"9" * 5000, b"0.5", b"NaN", b"true"]
                )
    return bytes(out)


def odd_tree(rng: random.Random, tree: Any) -> Any:
    """One place of a tree of JSON replaced by something odd, lost, doubled or under another name."""
    if isinstance(tree, dict) and tree and rng.random() < 0.85:
        key = rng.choice(list(tree))
        what = rng.randrange(8)
        rest = {k: v for k, v in tree.items() if k != key}
        if what == 0:
            return rest
        if what == 1:
            return {**rest, rng.choice(["", "a", "W9", "\ud800", "__metadata__", key + "x"]): tree[key]}
        if what == 2:
            return {**tree, key: tree[rng.choice(list(tree))]}
        return {**tree, key: odd_tree(rng, tree[key])}
    if isinstance(tree, list) and tree and rng.random() < 0.7:
        at = rng.randrange(len(tree))
        what = rng.randrange(5)
        if what == 0:
            return tree[:at] + tree[at + 1 :]
        if what == 1:
            return tree[: at + 1] + tree[at:]
        return [*tree[:at], odd_tree(rng, tree[at]), *tree[at + 1 :]]
    return rng.choice(ODD)


ODD_VALUES = [
    "0", "-1", "1", "2", "0.5", "1e308", "-1e308", "1e-308", "5e-324", "1e17", "inf", "nan", "-inf",
    "9223372036854775807", "3000000000",
    "1" + "0" * 400, "0x" + "f" * 400, "1" * 5000, "0x" + "f" * 5000, "true", "1979-05-27", "07:32:00", "[]",
    "{}", "[0]",
    "[1, 2, 3]", "[-1e300, 1e300]", "[1e17, 0]", "[0.1, 0.1]", "[[1]]", "[[], {}]", '"\\u001b[2J"', '""', '"x"',
    '"k"',
    '"solution.value"', '"solution.wavenumber"', '"solution.__class__"', '"9**9**9**9**9"', '"1e308*1e308"',
    '"1/0"', '"1j"',
    '"x if x else y"', '"' + "(" * 150 + "x" + ")" * 150 + '"', '"' + "-" * 1900 + 'x"', '"' + "x" * 3000 + '"',
    '"__import__(\'os\').system(\'x\')"', '"sin(x, x)"', '"where(x)"', '"x.real"', '"lambda: 0"',
    '"[x for x in y]"',
    '"1or 2"', '"jv(1e300, 1e300)"', '"../../../etc/passwd"', '"/dev/zero"',
    '{ kind = "disk", center = [0, 0], radius = 1e-9 }',
    '{ kind = "interval", lower = 0.1, upper = 0.2 }', '["left", "left"]', '["left", 3]', '"hole circle"',
]  # fmt: skip
ODD_LINES = [
    "[[boundary]]", "[domain.hole]", "[training]", "[parameters]", "[network]", "[", "a.b.c = 1", 'kind = "pml"',
    "hard = true",
    'kind = "periodic"', "axis = 0", "phase = 1.0", 'kind = "interface"', 'kind = "robin"', 'coefficient = "1j"',
    "weight = 1e300",
    'region = { kind = "disk", center = [0, 0], radius = 0.3 }', "width = 0.2", "reflection = 1e-300",
    "name = [1]", "order = 1e300",
    "orders = 1000000000000", "total = 3", "hidden = [1000000000]", "features = 1000000000000",
    'checkpoint = "/elsewhere"',
    'resume = "../x"', "chunk = 1000000000000", "points = 1000000000000", 'value = "solution.normal"',
    'exact = "x"', 'source = "y"',
    'function = "tan"', "a = [1e300, 1]", 'optimizer = ["lm", "adam"]', "iterations = -1",
]  # fmt: skip


def odd_toml(rng: random.Random, text: str) -> str:
    """Values replaced by odd ones, lines lost, doubled, moved or new."""
    lines = text.splitlines()
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        at = rng.randrange(len(lines))
        what = rng.randrange(10)
        stated = [i for i, line in enumerate(lines) if re.match(r"\s*[\w.]+\s*=", line)]
        if what < 5 and stated:
            at = rng.choice(stated)
            lines[at] = lines[at].split("=")[0] + "= " + rng.choice(ODD_VALUES)
        elif what == 5 and len(lines) > 1:
            del lines[at]
        elif what == 6:
            lines.insert(at, lines[rng.randrange(len(lines))])
        elif what == 7 and len(stated) > 1:
            one, two = rng.sample(stated, 2)
            a, b = lines[one].split("=", 1), lines[two].split("=", 1)
            lines[one], lines[two] = a[0] + "=" + b[1], b[0] + "=" + a[1]
        elif what == 8 and stated:
            key = rng.choice(["", "zz", "kind", "wavenumber", '"\\u001b"', "a.b"])
            at = rng.choice(stated)
            lines[at] = key + " =" + lines[at].split("=", 1)[1]
        else:
            lines.insert(at, rng.choice(ODD_LINES))
    return "\n".join(lines) + "\n"


def unpacked(content: bytes) -> tuple[Any, bytes]:
    """The header of a safetensors file and what follows it."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def packed(header: Any, body: bytes = b"") -> bytes:
    """A safetensors file of this header, whatever it is; bytes are taken as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body
