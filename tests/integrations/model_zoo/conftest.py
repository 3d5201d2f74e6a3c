"""Its modules need packages that are not everywhere, and hold no doctests."""

collect_ignore_glob = ["*.py"]
