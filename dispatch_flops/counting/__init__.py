"""Collector of costs in eager mode: dispatch mode, module tracking, aggregation; reads no clock."""
