"""What every part of the library uses: trees of tensors, deferred reads, files, errors."""
