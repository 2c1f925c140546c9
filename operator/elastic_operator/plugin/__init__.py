"""The kubectl plugin `kubectl etj`: it shows jobs to people and sends their requests.

`pages` makes the output; the other modules talk to the cluster. They may import `client` without its
asyncio part, and pure packages. Only `web` imports the plugin, and of it only `pages`.
"""
