"""A checkpoint's scores on tasks of lm-evaluation-harness."""
