"""Muon (arXiv:2502.16982): matrices' updates are orthogonalized, whole, whatever the layout; AdamW has the rest."""
