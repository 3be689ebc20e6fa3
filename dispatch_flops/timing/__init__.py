"""Everything that reads a clock or an event; it may build on ``counting``."""
