"""`kubectl etj`: what people ask about their jobs and tell them, in words."""
