"""From the arguments of a loader to the parts of a run."""
