"""The live view of `kubectl etj watch`: nodes as a picture, pace, expected end of a recovery, observed losses.

Pure, as `pages`. It imports rich only where it draws, because the operator's image has no rich.
"""
