"""What people are told about a job: the sentence about a recovery, and notifications made from statuses.

Pure. Imports `api`, `manifests` and `goodput`; imported by `progress`, by `webhook` and `settings`, and by
`kubectl etj` for its formats.
"""
