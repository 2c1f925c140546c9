"""How tensor parallelism cuts each parameter: rules, patterns, affine maps, and the file of patterns.

Pure arithmetic and strict readers. Imports nothing of DeepSpeed's files.
"""
