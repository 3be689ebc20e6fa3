"""The eager collector: dispatch mode, module tracking and aggregation; it takes no time."""
