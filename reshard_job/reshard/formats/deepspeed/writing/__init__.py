"""Lay out a native DeepSpeed checkpoint for another topology, for unmodified DeepSpeed to load.

Imports `reading` for sources of the same format; imported by the format's entry in the registry.
"""
