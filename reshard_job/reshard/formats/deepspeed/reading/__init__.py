"""Open a native DeepSpeed checkpoint and index every stored byte of model and optimizer as a box.

Imports the shared modules of `formats.deepspeed` and `tensor_parallel`; imported by `writing` and `formats.universal`.
"""
