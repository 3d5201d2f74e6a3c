"""How each kind of layer makes an example's gradient, and its norm, inside a recorded pass."""
