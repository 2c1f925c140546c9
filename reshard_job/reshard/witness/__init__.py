"""A witness of a conversion: it reads source and target as a stranger would, and compares them by name.

Imports `errors` and `storage`, and of the formats only the matcher of regular expressions. It does not import
the plan, the execution, the tables of tensors, or the readers and writers of any format, so that a defect in one of
those is not in the witness too. Only `api` imports this package.
"""

from __future__ import annotations

from reshard.witness.comparison import Case, Seen, WitnessReport, compare, see_source

__all__ = ("Case", "Seen", "WitnessReport", "compare", "see_source")
