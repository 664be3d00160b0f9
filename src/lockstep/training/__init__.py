"""Run: a training loop whose result depends neither on the number of workers nor on which of them died."""
