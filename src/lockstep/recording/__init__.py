"""What a run has recorded of itself, in files of its run folder: their format, and what can be read from them. No torch."""
