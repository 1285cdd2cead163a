"""A recipe: its sections, their ranges, and what fits together."""
