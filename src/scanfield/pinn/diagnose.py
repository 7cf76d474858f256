"""What is likely to go wrong, in words: before a training from the problem and its points, after it from the residuals."""

from __future__ import annotations

import itertools
import math

import numpy as np

from scanfield.optimize import LBFGS, LevenbergMarquardt
from scanfield.pinn.boundary import Dirichlet, Interface, Neumann, Periodic, Robin
from scanfield.pinn.boundary import Impedance as _Impedance
from scanfield.pinn.coverage import contradictions, uncovered
from scanfield.pinn.domains import Box
from scanfield.pinn.network import Network
from scanfield.pinn.placing import to_host
from scanfield.pinn.problem import Helmholtz, Sample
from scanfield.pinn.values import evaluate

__all__ = ["LM_LIMIT", "DiagnosisWarning", "aliasing", "diagnose", "points_per_wavelength"]

LM_LIMIT = 5000
"""Parameters above which a Levenberg-Marquardt step costs more than it gains."""

_FEWEST = 6.0
_RECOMMENDED = 10
_MODES = 300_000  # looked at: a diagnosis may not take longer than the training
_CLOSE = 1e-3  # relative distance of k^2 to an eigenvalue that counts as on it


class DiagnosisWarning(UserWarning):
    """Something about a problem or its training that will spoil the field; the text says what to do."""


def diagnose(
    problem: Helmholtz, sample: Sample, network: Network | None = None, optimizers: tuple[object, ...] = ()
) -> list[str]:
    """Warnings in words, before a training.

    Examples
    --------
    >>> from scanfield import pinn
    >>> wave = pinn.Helmholtz(pinn.Interval(0, 1), 62.8, boundary=pinn.Dirichlet(1.0, where="left"))
    >>> for words in diagnose(wave, wave.draw(30)):
    ...     print(words.split(":")[0])
    3.0 points per wavelength, fewer than 6
    no condition holds on 'right'
    """
    # A field that nothing drives is the one to mend first: what drives it is often the condition that is missing.
    zero = _zero(problem, sample)
    found = [_few_points(problem, sample), _eigenvalue(problem), zero or uncovered(problem, network)]
    found.append(contradictions(problem))
    if network is not None:
        found.append(_features(problem, network))
        second_order = [o for o in optimizers if isinstance(o, LBFGS | LevenbergMarquardt)]
        if network.dtype == "float32" and second_order:
            name = type(second_order[0]).__name__
            found.append(
                f"{name} in float32: its steps need differences of losses that float32 rounds away, so it stops early. "
                'Create the network with dtype="float64".'
            )
        if network.size > LM_LIMIT and any(isinstance(o, LevenbergMarquardt) for o in optimizers):
            found.append(
                f"Levenberg-Marquardt with {network.size} parameters: a step costs rows * parameters^2 operations; above "
                f'about {LM_LIMIT} parameters L-BFGS is faster (optimizer="lbfgs").'
            )
    return [words for words in found if words]


def points_per_wavelength(problem: Helmholtz, sample: Sample) -> float:
    """Points along one shortest wavelength, 2 pi / max Re k, at the mean density of the interior points."""
    shortest = float(np.max(np.abs(problem.wavenumber_at(sample.interior).real)))
    if shortest == 0.0:
        return math.inf
    density = math.pow(sample.interior.shape[0] / problem.domain.volume, 1.0 / problem.dimensions)
    return 2.0 * math.pi / shortest * density


def aliasing(training: float, held_out: float) -> str:
    """A warning where the equation holds at the training points and not between them; both are rms over the scale."""
    if held_out > 100.0 * training and held_out > 1e-3:
        return (
            f"the held-out residual is {held_out:.1e}, the one at the training points {training:.1e}: the equation holds at "
            "the points and not between them. Use more points, fewer parameters or lower frequencies."
        )
    return ""


def _few_points(problem: Helmholtz, sample: Sample) -> str:
    count = points_per_wavelength(problem, sample)
    if count >= _FEWEST:
        return ""
    needed = math.ceil(sample.interior.shape[0] * math.pow(_RECOMMENDED / count, problem.dimensions))
    return (
        f"{count:.1f} points per wavelength, fewer than {_FEWEST:.0f}: the residual can vanish at the points and be wrong "
        f"between them. {_RECOMMENDED} per wavelength take points={needed}."
    )


def _eigenvalue(problem: Helmholtz) -> str:
    """Whether k^2 is an eigenvalue of -Lap in this box with these (homogeneous parts of the) conditions."""
    domain = problem.domain
    k = problem.wavenumber_at(problem.domain.interior(16, seed=0))
    if not isinstance(domain, Box) or problem.layer is not None or np.ptp(k.real) > 0 or np.any(k.imag != 0):
        return ""
    kinds: dict[str, str] = {}
    for condition in problem.conditions:
        if not isinstance(condition, Dirichlet | Neumann):
            return ""
        kinds |= dict.fromkeys(condition.on(domain), "D" if isinstance(condition, Dirichlet) else "N")
    if len(kinds) < len(domain.parts):
        return ""
    squared = float(k[0].real) ** 2
    sizes = np.subtract(domain.upper, domain.lower)
    counts, axes = [], []
    for axis, size in enumerate(sizes):
        ends = kinds[domain.parts[2 * axis]] + kinds[domain.parts[2 * axis + 1]]
        shift, first = (0.5, 1) if ends in ("DN", "ND") else (0.0, 1 if ends == "DD" else 0)
        last = math.ceil(math.sqrt(squared) * size / math.pi + shift) + 1
        counts.append(last - first + 1)
        if math.prod(counts) > _MODES:
            return ""
        axes.append([(m, (math.pi * (m - shift) / size) ** 2) for m in range(first, last + 1)])
    for modes in itertools.product(*axes):
        value = sum(part for _, part in modes)
        if abs(value - squared) <= _CLOSE * max(squared, 1e-300):
            numbers = ", ".join(str(m) for m, _ in modes)
            return (
                f"k^2 = {squared:.6g} is an eigenvalue of this box ({value:.6g}, mode {numbers}): the field is not unique. "
                "Change the wavenumber, give it an imaginary part (loss), or let waves leave (Impedance)."
            )
    return ""


def _zero(problem: Helmholtz, sample: Sample) -> str:
    """Whether every value is zero at the points where it will be asked for."""
    given = problem.domain.given
    if any(np.any(measured.values) for measured in problem.data):
        return ""
    if problem.source_size > 0 or np.any(evaluate("source", problem.source, sample.interior, given=given)):
        return ""
    for condition, surface in zip(problem.conditions, sample.surfaces, strict=True):
        if surface is None or not isinstance(condition, Dirichlet | Neumann | Robin | _Impedance):
            continue
        if np.any(problem.value_at("value", condition.value, surface)):
            return ""
    return (
        "nothing drives the field: no source, no data, and no boundary value other than zero, so the zero field satisfies "
        "everything. Give a boundary condition with a value, a source or data."
    )


def _features(problem: Helmholtz, network: Network) -> str:
    """Whether the frequencies of the features cover the wave circle |2 pi B| = k."""
    frequencies = (
        to_host(network.parameters["B"]) if network.embedding.trainable else network.embedding.frequencies
    )
    if frequencies.shape[1] == 0 or any(isinstance(c, Periodic | Interface) for c in problem.conditions):
        return ""
    sizes = 2.0 * math.pi * np.linalg.norm(frequencies, axis=0)
    k = problem.reference
    # A source may have other waves than k: only then are higher frequencies needed.
    low, high = float(sizes.min()), float(sizes.max())
    if high < 0.5 * k:
        return (
            f"the features reach |2 pi B| = {high:.3g} and the wavenumber is {k:.3g}: the waves are faster. "
            f"Use FourierFeatures(wavenumber={k:.3g}) or a larger scale (in cycles, not radians)."
        )
    if low > 2.0 * k and k > 0 and problem.source_size == 0:
        return (
            f"the features start at |2 pi B| = {low:.3g} and the wavenumber is {k:.3g}: nothing in the problem is so fast. "
            f"Use FourierFeatures(wavenumber={k:.3g}) or a smaller scale (in cycles, not radians)."
        )
    return ""
