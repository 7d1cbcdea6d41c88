"""Worker processes under the reader threads: starting, asking and ending them, and what travels between."""
