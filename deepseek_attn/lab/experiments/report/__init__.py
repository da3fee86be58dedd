"""Tables, plots and the page of an experiment's results."""
