"""Raw text, document by document: what inputs name, how they are cut into units, and what is in these."""
