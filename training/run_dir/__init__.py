"""A run's folder: proved to be usable before step 1, and which error it is where it is not. No torch here."""
