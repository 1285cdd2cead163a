"""Bytes on the fullest rank, predicted and measured; what would fit where memory ran out."""
