"""Shows what runs have recorded: a page in the browser, a report in one file, pictures, Prometheus text. No torch."""
