"""The networks of the papers; the library itself does not need them."""
