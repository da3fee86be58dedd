"""The laboratory: measurements, training, inspection and plots. Nothing outside it imports it."""
