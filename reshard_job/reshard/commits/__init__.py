"""COMMIT.json, the staging folder, OWNER.json of a checkpoint root, and the file that names the latest checkpoint.

Modules that read COMMIT.json and OWNER.json use the standard library only, because training pods import them.
"""
