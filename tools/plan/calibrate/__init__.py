"""calibrate: this machine's own curves, into a cluster file."""
