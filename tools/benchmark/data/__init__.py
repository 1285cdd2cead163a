"""Data against its peers: CPU-seconds of the same work in one run, children included."""
