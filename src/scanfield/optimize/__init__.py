"""Optimisers for arrays of any library: Adam with schedules, L-BFGS, Levenberg-Marquardt.

All three are functional: they hold settings, and their state travels beside the parameters. `Adam` takes a mapping of
names to arrays; `LBFGS` and `LevenbergMarquardt` take one vector and a function of it, and `minimise` and
`least_squares` run them to an end that they put into words.
"""

from scanfield.optimize.adam import Adam, AdamState
from scanfield.optimize.lbfgs import LBFGS, LBFGSState, minimise
from scanfield.optimize.levenberg_marquardt import LevenbergMarquardt, LMState, Normal, least_squares
from scanfield.optimize.result import Result
from scanfield.optimize.schedules import Constant, Cosine, Exponential, Schedule

__all__ = [
    "LBFGS",
    "Adam",
    "AdamState",
    "Constant",
    "Cosine",
    "Exponential",
    "LBFGSState",
    "LMState",
    "LevenbergMarquardt",
    "Normal",
    "Result",
    "Schedule",
    "least_squares",
    "minimise",
]
