"""Entry points that a user calls: they own the lifecycle and restore the program's state."""
