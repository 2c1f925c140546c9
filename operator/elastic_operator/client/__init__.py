"""Requests to the API server with the official Kubernetes client: kinds, credentials, errors, one client for all kinds.

These modules know nothing of jobs. They import only the names in `reshard.contract`. `cluster`, `main` and the plugin
import them; the plugin does not import `api_client`, which needs an event loop.
"""
