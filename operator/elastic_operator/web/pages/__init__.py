"""The HTML of the status page, made from a snapshot. Pure: no requests, no clock.

Every text of the cluster is escaped and of bounded length. Scripts are forbidden, and none is needed.
"""
