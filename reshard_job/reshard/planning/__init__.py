"""The plan of a conversion, and the proof that it is exact before a byte moves.

Pure data and arithmetic: no file is opened here. Imports `tensors`; imported by formats, execution and `api`.
"""
