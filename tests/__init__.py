"""Tests of dispatch_flops; what several of them share is imported as ``tests.helpers``."""
