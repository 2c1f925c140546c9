"""The profile of a run for people: as a table, and as a picture.

Imports what `cli` may import; only the verb `run` uses it, where somebody asks for a profile.
"""
