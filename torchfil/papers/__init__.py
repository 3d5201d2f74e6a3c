"""The papers' networks and data; the library itself needs neither."""
