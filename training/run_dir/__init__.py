"""A run's folder: what it holds, what a resumed run reports, and the proof before step 1 that it is usable."""
