"""A finished run as one file: built, written, read, compared."""
