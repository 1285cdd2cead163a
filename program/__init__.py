"""What every program here stands on: flags, files that it is given and writes, errors, processes."""
