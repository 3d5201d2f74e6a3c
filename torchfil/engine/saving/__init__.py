"""From a run to its file: the tables, pictures and facts that a report is made from."""
