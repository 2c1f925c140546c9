"""The status page: read-only HTML pages about the fleet and each job, which the operator serves if asked to.

`collect` copies what the store holds, `pages` makes HTML of the copy, `site` bounds what that costs, `server` speaks
HTTP. It sends no request to the API server and decides nothing. It may import `cluster` and the pages of the plugin;
only `main` imports it.
"""
