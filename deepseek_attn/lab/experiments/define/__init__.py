"""Definition of an experiment: its config, its variants and the units of work they make."""
