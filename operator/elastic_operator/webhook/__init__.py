"""Delivery of notifications to a webhook: the request, the queue with its retries, and the rate limits.

What a notification says is made in `reconcile.notifications`. Imports that, `metrics` and `settings`; imported by
`controller` and `main`. Nothing here delays a pass, or raises in one.
"""
