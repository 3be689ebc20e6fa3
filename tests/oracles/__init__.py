"""Naive definitions run on counting numbers, the independent reference for the formulas."""
