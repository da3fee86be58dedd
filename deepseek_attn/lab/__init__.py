"""The laboratory: what measures, trains, inspects and draws. Nothing outside it imports it."""
