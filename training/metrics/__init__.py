"""A run's numbers: how fast it goes (`rates`) and where logged iterations go (`sinks`)."""
