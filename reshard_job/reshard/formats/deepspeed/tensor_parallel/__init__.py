"""Rules, patterns, affine maps and pattern files: how tensor parallelism cuts each parameter.

Pure arithmetic and strict readers. Imports no module that reads DeepSpeed's files; imported by `formats.deepspeed`.
"""
