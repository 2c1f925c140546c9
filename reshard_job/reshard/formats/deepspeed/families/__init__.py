"""Known families of models: their parameters' names and shapes, and how each is split over tensor-parallel ranks.

`tables` is data, `shapes` and `fit` compare a model with it, `choose` turns the family that fits into patterns. Pure:
reads no file. Imports `formats.deepspeed.tensor_parallel` and `formats.deepspeed.logical`; imported by the writers of
DeepSpeed's formats.
"""
