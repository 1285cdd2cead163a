"""Text from a checkpoint: prompts on the command line, in a file, or line by line."""
