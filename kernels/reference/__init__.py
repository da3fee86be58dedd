"""Pure-torch definitions of every op: slow where they must be, exact, and runnable on any device."""
