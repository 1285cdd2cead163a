"""The planner against published runs: rows into cases, errors, intervals, cross-validation, the fit."""
