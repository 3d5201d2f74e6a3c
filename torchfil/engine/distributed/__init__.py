"""Several processes, sharded models, and checkpoints."""
