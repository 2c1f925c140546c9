"""Messages about a job for people: the sentence about a recovery, and notifications made from statuses.

Pure. Imports `api`, `manifests` and `goodput`; imported by `progress`, by `webhook` and `settings`, and by
`kubectl etj` for its formats.
"""
