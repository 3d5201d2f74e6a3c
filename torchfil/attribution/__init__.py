"""Where the leakage lies: in which coordinates of an input, in which examples, in which layers.

    PLIS                  which pixels or columns drive an example's loss of privacy
    exposure              who is most exposed
    jacobian_sensitivity  how a layer's gradient changes with the target or the input; no attacker
    v_information         what classifiers learn from a layer's gradient about a property
    layer_gradients       the gradients by layer, which v_information takes

The layer measures (Mo et al. 2021) compare layers of one network; none is a guarantee. All values
depend on private data.
"""

from torchfil.attribution import exposure
from torchfil.attribution.layers import (
    LayerTable,
    jacobian_sensitivity,
    layer_gradients,
    v_information,
)
from torchfil.attribution.plis import PLIS

__all__ = [
    "PLIS",
    "LayerTable",
    "exposure",
    "jacobian_sensitivity",
    "layer_gradients",
    "v_information",
]
