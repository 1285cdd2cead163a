"""Text to token shards to this rank's batches."""
