"""From a run to its file: the tables and facts that a report is made from."""
