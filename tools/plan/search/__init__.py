"""Which layouts are legal, which of them fit and are fastest, and why the others are not."""
