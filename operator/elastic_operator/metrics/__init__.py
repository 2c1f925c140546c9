"""The operator's metrics: definitions, counters, gauges and the exporter for Prometheus. See docs/metrics.md.

Imports the pure packages only; imported by the edges.
"""
