"""The engine: requests, scheduling, sampling and stopping, on top of the model runner."""
