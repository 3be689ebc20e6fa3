"""Everything that reads a clock or an event; builds on ``counting``."""
