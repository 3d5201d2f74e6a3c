"""Several processes, streams, and checkpoints."""
