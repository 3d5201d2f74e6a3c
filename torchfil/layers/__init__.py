"""Which layer of a network leaks: measures of what each layer's gradient tells (Mo et al. 2021).

    jacobian_sensitivity  how much a layer's gradient moves with the target or the input; no attacker assumed
    v_information         what a family of classifiers learns from a layer's gradient about a property
    layer_gradients       the gradients by layer that the latter takes

Neither is a guarantee: they compare layers of one network. All values depend on private data.
"""

from torchfil.layers.gradients import layer_gradients
from torchfil.layers.information import v_information
from torchfil.layers.sensitivity import jacobian_sensitivity
from torchfil.layers.table import LayerTable

__all__ = ["LayerTable", "jacobian_sensitivity", "layer_gradients", "v_information"]
