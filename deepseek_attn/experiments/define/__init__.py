"""What an experiment is: its config, its variants and the units of work they make."""
