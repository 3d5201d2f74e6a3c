"""What is private about an example: its inputs, some of their coordinates, its target, an
embedding.

A batch has the form that the model takes: one tensor, a tuple of positional inputs, or a dict of
keyword inputs, each tensor with the examples along its first dimension. :class:`Private` says which
coordinates an attacker wants; :class:`Examples` lays them out as one vector z of length d per
example and puts them back, so everything downstream is a function of z.
"""

from torchfil.private.batches import Inputs, as_given, check_finite
from torchfil.private.choice import Coordinates, Private, superpixel
from torchfil.private.examples import Examples, Layout, as_call, num_examples
from torchfil.private.submodules import added_to_outputs, decoder_tokens, embeddings_to_protect

__all__ = [
    "Coordinates",
    "Examples",
    "Inputs",
    "Layout",
    "Private",
    "added_to_outputs",
    "as_call",
    "as_given",
    "check_finite",
    "decoder_tokens",
    "embeddings_to_protect",
    "num_examples",
    "superpixel",
]
