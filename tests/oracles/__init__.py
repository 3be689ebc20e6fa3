"""Naive definitions run on counting numbers: what the formulas are held against."""
