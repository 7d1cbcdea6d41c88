"""What everything else stands on: errors, settings, time, waiting, places in the data."""
