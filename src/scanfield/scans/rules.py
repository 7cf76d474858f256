"""The family of the gated delta rule: published recurrences that are ``gdn2`` under their papers' own arguments.

=====================  ====================  ==============  =======  =========================================
function               log_decay             erase           write    source
=====================  ====================  ==============  =======  =========================================
linear_attention       0                     0               1        arXiv 2006.16236, equation 18 (no normaliser)
retention              per head              0               1        arXiv 2307.08621, equation 6
gla                    per channel           0               1        arXiv 2312.06635, equation 3
delta_rule             0                     beta            beta     arXiv 2406.06484, equation 2
gated_delta_rule       per head              beta            beta     arXiv 2412.06464, equation 10
kda                    per channel           beta            beta     arXiv 2510.26692, equation 1
comba                  per head              beta (vector)   beta     arXiv 2506.02475, equation 6
=====================  ====================  ==============  =======  =========================================

None has kernels of its own. What a rule does not have (erase, decay) reaches the kernel as None, so that its work is
not done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from scanfield.arrays import Array
from scanfield.dispatch import Derived, Grads, Input, Option, Prepared
from scanfield.scans import packing
from scanfield.scans.canonical import Canonical, Checked, quiet, restore
from scanfield.scans.gated_delta import (
    BOUNDS,
    KEY,
    OPERATION,
    QUERY,
    STATE,
    VALUE,
    assemble_rule,
    check_heads,
)

QKV = (QUERY, KEY, VALUE)
END = (STATE, BOUNDS)
HEAD_DECAY = Input("log_decay", ("batch time vheads 1",))
CHANNEL_DECAY = Input("log_decay", ("batch time vheads key",))
OPTIONS = (Option("scale", float, None), Option("chunk", int, None))

Arrays = dict[str, Any]
Build = Callable[[Checked], Arrays]
Back = Callable[[Checked, dict[str, Array]], dict[str, Array]]


class Gates(NamedTuple):
    """How a rule's arguments become the gates of ``gdn2``, how gradients come back, and what each argument needs."""

    build: Build
    back: Back
    needs: Mapping[str, tuple[str, ...]]
    erase_vector: bool = False


def derive(name: str, inputs: tuple[Input, ...], gates: Gates) -> Derived:
    """The record of a rule by its name, its inputs in order and its gates."""
    canonical = Canonical(inputs, "query", ("value", check_heads))

    def prepare(arrays: Mapping[str, Any], options: Mapping[str, Any], *, step: bool = False) -> Prepared:
        bounds, sequences = packing.read_bounds(arrays["cu_seqlens"])
        checked = canonical(arrays, sequences=sequences, step=step)
        with quiet(checked.library):
            base = gates.build(checked)
        prepared = assemble_rule(
            checked, base, options, bounds=bounds, sequences=sequences, erase_vector=gates.erase_vector
        )

        def pull(grads: Grads, d_output: Array | None) -> dict[str, Array]:
            with quiet(checked.library):
                return restore(checked, gates.back(checked, prepared.pull(grads, d_output)))

        def wanted(names: frozenset[str]) -> tuple[bool, ...]:
            return prepared.wanted(
                frozenset(base for name in names for base in gates.needs.get(name, (name,)))
            )

        return prepared._replace(pull=pull, wanted=wanted)

    return Derived(name, OPERATION, inputs, OPTIONS, "query", "value", prepare, f"scanfield.{name}")


def common(checked: Checked) -> Arrays:
    """What all rules hand on as it came; nothing decays, is erased or gated."""
    names = ("query", "key", "value", "initial_state")
    return {name: checked.arrays[name] for name in names} | dict.fromkeys(("log_decay", "erase", "write"))


def decay_only(checked: Checked) -> Arrays:
    """The same with the rule's own decay, if it has one."""
    return common(checked) | {"log_decay": checked.arrays.get("log_decay")}


def unchanged(checked: Checked, grads: dict[str, Array]) -> dict[str, Array]:
    """Gradients of ``gdn2``'s arrays that are those of the rule's."""
    return grads
