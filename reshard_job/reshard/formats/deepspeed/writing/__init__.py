"""Lay out a native DeepSpeed checkpoint for another topology, in files that unmodified DeepSpeed loads.

Imports `reading` for sources of the same format. Imported by the entry of the format in the registry, and by
`formats.universal`.
"""
