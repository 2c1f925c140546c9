"""Boxes of logical tensors and the files that hold them: geometry, shard table, layout, views, casts.

Pure, on numpy. Imports only `errors`, `topology` and `file_identity`; imported by everything that plans or moves bytes.
"""
