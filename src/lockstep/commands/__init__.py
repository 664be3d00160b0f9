"""Commands that look at runs and steer them, one in each file: ls, status, logs, top, stop, clean, events. No torch."""
