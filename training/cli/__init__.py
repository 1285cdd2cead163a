"""The command line: flags from the recipe's dataclasses, help, dry run, elastic layouts."""
