"""Entry points that other frameworks' training loops and engines call."""
