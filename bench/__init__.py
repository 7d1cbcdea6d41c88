"""prefetchshard beside the other loaders of the field, on the same work: `python -m bench`. RESULTS.md says how to run and to read it."""
