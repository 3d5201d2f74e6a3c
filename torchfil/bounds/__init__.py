"""What Fisher information, Rényi divergence and trade-off functions mean for a reconstruction
attack.

    mse_from_trace, mse_from_fim, mse_from_spectral_norm, attribute_error
        every **unbiased** attacker, one record
    mse_biased               an attacker of known bias, one record
    mse_van_trees, population_mse_bound    **every** attacker, on average over people
    rero                     **every** attacker's chance of success, any record
    mse_from_rdp, replace_one_rdp
        every **unbiased** attacker, any record, from the accountant's divergence

Each function is the right-hand side of a theorem; its docstring says which attacker it binds. MSE
is the mean squared error per private coordinate, E‖ẑ − z‖²/d, in the squared unit of the data. A
bound of infinity means that the release carries no information; these values depend on private data
and are confidential.
"""

from torchfil.bounds.mse import (
    PopulationBound,
    Prior,
    attribute_error,
    mse_biased,
    mse_from_fim,
    mse_from_rdp,
    mse_from_spectral_norm,
    mse_from_trace,
    mse_van_trees,
    population_mse_bound,
    replace_one_rdp,
)
from torchfil.bounds.reconstruction import Bracket, rero

# unbiased attackers, biased ones, all of them
__all__ = [
    "attribute_error",
    "mse_from_fim",
    "mse_from_rdp",
    "mse_from_spectral_norm",
    "mse_from_trace",
]
__all__ += ["mse_biased", "replace_one_rdp"]
__all__ += ["Bracket", "PopulationBound", "Prior", "mse_van_trees", "population_mse_bound", "rero"]
