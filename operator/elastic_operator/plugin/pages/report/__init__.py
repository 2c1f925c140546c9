"""The page of `kubectl etj report`: the story of one job as Markdown, or as HTML that needs no other file.

`story` collects what the page tells, `charts` draws it, `markdown` and `html_page` write it. Pure, as `pages`.
Whatever a tenant may have written is quoted or escaped where it is written.
"""
